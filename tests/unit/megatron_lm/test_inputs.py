"""Files and libraries that are missing are named before anything is built."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.swap.common.types import UsageError
from megatron.swap.trainer.inputs import HEAD, MARK, check_data, check_packing, split_for


def data(**given: object) -> Namespace:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
             "per_split_data_args_path")  # fmt: skip
    read = {"sft": False, "split": "969, 30, 1", "eval_iters": 0, "full_validation": False, "skip_train": False}
    return Namespace(**{**dict.fromkeys(names), **read, **given})


def dataset(prefix: Path, num_documents: int) -> str:
    """Write the beginning of a dataset."""
    Path(f"{prefix}.bin").touch()
    Path(f"{prefix}.idx").write_bytes(HEAD.pack(MARK, 1, 8, num_documents))
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return dataset(tmp_path / "mine_text_document", 500)


def test_datasets_that_exist(prefix: str, tmp_path: Path):
    check_data(data())
    check_data(data(data_path=["0.3", prefix, "70", prefix], valid_data_path=[prefix]))
    check_data(data(train_data_path=[prefix], split=None, eval_iters=2))
    check_data(data(data_path=[prefix, prefix]))
    check_data(data(data_path=["s3://bucket/elsewhere"]))
    (tmp_path / "splits").write_text(json.dumps({"train": [prefix], "valid": f"1 {prefix}", "test": None}))
    check_data(data(per_split_data_args_path=str(tmp_path / "splits")))


def test_datasets_that_do_not_exist(prefix: str, tmp_path: Path):
    for given, words in (
        ("/nowhere/x", r"--data-path /nowhere/x: there is no /nowhere/x.idx and no /nowhere/x.bin.*preprocess_data"),
        *((str(tmp_path / name), f"There is {prefix}")
          for name in ("mine", "mine_text_document.bin")),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            check_data(data(data_path=[given]))
    for content in (b"", b"\x00" * 100):
        Path(f"{prefix}.idx").write_bytes(content)
        with pytest.raises(UsageError, match=r"mine_text_document\.idx is no index of Megatron's"):
            check_data(data(data_path=[prefix]))
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(UsageError, match=r"there is no \S*\.bin\. Give"):
        check_data(data(data_path=[prefix]))


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("data_args_path", "1 /nowhere/x", "--data-args-path .*file: /nowhere/x"),
        ("per_split_data_args_path", "{", "--per-split-data-args-path .*JSON object with train, valid and test"),
        ("per_split_data_args_path", '{"train": []}', "KeyError: 'valid'"),
    ],
)
def test_files_that_name_datasets(tmp_path: Path, flag: str, text: str, words: str):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match=words):
        check_data(data(**{flag: str(tmp_path / "file")}))


@pytest.mark.parametrize(
    ("num_documents", "given", "words"),
    [
        (1, {"eval_iters": 2}, "--split 969, 30, 1: leaves no document for validation: {} has 1 document. Give "),
        (100, {"eval_iters": 2}, "leaves no document for the test: {} has 100 documents. Give --split 98,1,1, or "),
        (1, {"split": "1,1,1"}, "--split 1,1,1: leaves no document for training: {} has 1 document. "),
        (9, {"split": "1,0,0", "eval_iters": 2}, "has nothing for validation, which --eval-iters 2 asks for. Give "),
        (9, {"split": "all"}, "--split all: give the shares"),
        (0, {}, "--data-path {}: the dataset has no documents"),
    ],
)  # fmt: skip
def test_a_part_without_documents(tmp_path: Path, num_documents: int, given: dict[str, object], words: str):
    found = dataset(tmp_path / "few", num_documents)
    with pytest.raises(UsageError) as caught:
        check_data(data(data_path=[found], **given))
    assert words.format(found) in str(caught.value)


@pytest.mark.parametrize("num_documents", [1, 2, 3, 100])
def test_the_split_that_an_error_names_works(tmp_path: Path, num_documents: int):
    """Also where another dataset has more documents."""
    few = dataset(tmp_path / "few", num_documents)
    blend = [few, dataset(tmp_path / "more", 2 * num_documents)]
    for flags in split_for(num_documents).split(", or "):
        words = flags.split()
        check_data(data(data_path=blend, split=words[1], eval_iters=0 if "--eval-iters" in words else 2))


def test_conversations_are_a_file(tmp_path: Path):
    (tmp_path / "mine.jsonl").touch()
    check_data(data(sft=True, data_path=[str(tmp_path / "mine.jsonl")]))
    with pytest.raises(UsageError, match=r"--data-path /nowhere/x: there is no such file. --sft trains on JSON lines"):
        check_data(data(sft=True, data_path=["/nowhere/x"]))


def packing(**given: object) -> Namespace:
    """Flags with which TransformerEngine trains on packed documents."""
    flags = {
        "sft": False, "dataloader_inter_document_masking": True, "transformer_impl": "transformer_engine",
        "context_parallel_size": 1, "pipeline_model_parallel_size": 1, "micro_batch_size": 2,
        "hybrid_context_parallel": False,
    }  # fmt: skip
    return Namespace(**flags | given)


SFT = {"sft": True, "dataloader_inter_document_masking": False}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transformer_impl": "local"}, "with --transformer-impl local: its attention takes no packed documents"),
        ({"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 4 and --micro-batch-size 2: a stage"),
    ],
)
def test_what_packed_documents_do_not_go_with(given: dict[str, object], words: str):
    with pytest.raises(UsageError, match=words):
        check_packing(packing(**given))


def test_what_packed_documents_go_with():
    check_packing(packing(**SFT, context_parallel_size=2))
    check_packing(packing(pipeline_model_parallel_size=4, micro_batch_size=1))
    args = packing(**SFT)
    del args.dataloader_inter_document_masking, args.hybrid_context_parallel
    with pytest.raises(UsageError, match=r"^--sft cannot be combined with this Megatron, which packs no documents"):
        check_packing(args)
