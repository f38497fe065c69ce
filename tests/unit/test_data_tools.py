"""The data programs: output equals input, in order, and a failure leaves no half-written file."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import indexed_text
import prepare_stdlib_corpus
import preprocess_data
import pytest


def read_documents(prefix: Path) -> list[list[int]]:
    with indexed_text.quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    dataset = IndexedDataset(str(prefix))
    # A document for every sequence: Megatron's --split cuts by documents.
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def convert(*words: object) -> int:
    return preprocess_data.main([str(word) for word in words])


def test_bytes_round_trip(tmp_path: Path) -> None:
    texts = ["plain", "größer × 2 …", "\x00 and \n", "🙂"]
    written = indexed_text.write_byte_level(tmp_path / "v1.2_data", texts)
    documents = read_documents(tmp_path / "v1.2_data")
    assert [indexed_text.decode_bytes(document) for document in documents] == texts
    assert all(document[-1] == indexed_text.BYTE_EOD for document in documents)
    assert written.num_tokens == sum(map(len, documents))


def test_jsonl_and_text_files(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", ["first", "", "second ×"])
    books = tmp_path / "books"
    books.mkdir()
    (books / "b.txt").write_text("book b\nline 2")
    (books / "a.txt").write_text("book a")
    (books / "ignored.bin").write_bytes(b"\xff")
    assert convert("--input", lines, books, "--output-prefix", tmp_path / "out", "--append-eod", "--workers", 1) == 0
    documents = read_documents(tmp_path / "out_text_document")
    assert [indexed_text.decode_bytes(document) for document in documents] == [
        "first", "second ×", "book a", "book b\nline 2",
    ]  # an empty text is no document
    assert all(document[-1] == indexed_text.BYTE_EOD for document in documents)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}", "Expecting property name"),
        (b'{"other": 1}', "no text under key 'text' \\(keys of this line: other\\)"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, reason: str
) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "also good"}\n')
    words = ("--input", source, "--output-prefix", tmp_path / "out" / "set", "--workers", 1)
    assert convert(*words) == 1
    said = capsys.readouterr().err
    assert f"{source}:3: " in said
    assert re.search(reason, said)
    assert list((tmp_path / "out").iterdir()) == []

    assert convert(*words, "--skip-bad-lines") == 0
    assert read_documents(tmp_path / "out" / "set_text_document") == [list(b"good"), list(b"also good")]


def test_parallel_equals_serial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    texts = ["".join(chance.choices("abcdefgh ×\n", k=chance.randrange(1, 400))) for _ in range(400)]
    source = write_jsonl(tmp_path / "many.jsonl", texts)
    monkeypatch.setattr(preprocess_data, "CHUNK_BYTES", 2000)  # many chunks, more than may be in flight
    for workers in (1, 2):
        assert convert("--input", source, "--output-prefix", tmp_path / f"w{workers}", "--workers", workers) == 0
    for ending in (".bin", ".idx"):
        one, two = (tmp_path / f"w{workers}_text_document{ending}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()
    assert [indexed_text.decode_bytes(d) for d in read_documents(tmp_path / "w2_text_document")] == texts


def test_tokenizers_of_megatron(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "ids.jsonl", ["1 2 3", "70000 5"])
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100_000, "--append-eod", "--workers", 1)
    assert convert("--input", source, "--output-prefix", tmp_path / "ids", *flags) == 0
    assert read_documents(tmp_path / "ids_text_document") == [[1, 2, 3, 99_999], [70000, 5, 99_999]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--input", "missing.jsonl"), "no such file"),
        (("--input", "empty.jsonl"), "the input is empty"),
        (("--input", "a.jsonl", "--tokenizer-type", "TikTokenizer", "--tokenizer-model", "no/such"), "TikTokenizer"),
    ],
)
def test_wrong_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    (tmp_path / "empty.jsonl").touch()
    assert convert(*words, "--output-prefix", tmp_path / "out" / "set", "--workers", 1) == 1
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))


def test_an_existing_dataset_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--output-prefix", tmp_path / "set", "--workers", 1)
    assert convert("--input", write_jsonl(tmp_path / "a.jsonl", ["old"]), *words) == 0
    assert convert("--input", write_jsonl(tmp_path / "b.jsonl", ["new"]), *words) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert read_documents(tmp_path / "set_text_document") == [list(b"old")]
    assert convert("--input", tmp_path / "b.jsonl", *words, "--overwrite") == 0
    assert read_documents(tmp_path / "set_text_document") == [list(b"new")]
    (tmp_path / "set_text_document.idx").unlink()  # half of one may be on its way here
    assert convert("--input", tmp_path / "a.jsonl", *words) == 1
    assert "set_text_document.bin: there already" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        indexed_text.write_byte_level(tmp_path / "set", texts())
    assert list(tmp_path.iterdir()) == []


def test_corpus_is_deterministic_and_decodes(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    contents = {"b.py": b"b = 1\n", "a.py": "é = 2\n".encode(), "test/bad_latin.py": b"# \xe9\n", "empty.py": b"",
                "site-packages/other.py": b"no", "notes.txt": b"no"}  # fmt: skip
    for name, content in contents.items():
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    files = prepare_stdlib_corpus.source_files(library)
    assert files == prepare_stdlib_corpus.source_files(library)
    assert sorted(prepare_stdlib_corpus.read_texts(files)) == ["b = 1\n", "é = 2\n"]
