"""Turn JSONL or text into a Megatron indexed dataset.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix .data/mine --append-eod
    python tools/preprocess_data.py --input books/ --glob '*.txt' --output-prefix .data/books --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2

`.jsonl` and `.json` inputs hold one JSON object a line; any other file is one document; a folder is searched for
--glob. Result: PREFIX_text_document.bin and .idx (PREFIX_KEY_document for each of --json-keys); give
`PREFIX_text_document` as DATA_PATH or --data-path. Without --tokenizer-type a token is a byte.
Lines that cannot be used are named with file and line, and nothing is written unless --skip-bad-lines says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from indexed_text import (
    BYTE_EOD,
    BYTE_LEVEL_FLAGS,
    BYTE_VOCAB_SIZE,
    ENOUGH_DOCUMENTS,
    DatasetWriter,
    Tokens,
    dataset_files,
    encode_bytes,
    quiet_imports,
)

CHUNK_BYTES = 1 << 20
MAX_REPORTED = 20
NOT_FOR_TEXT = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer: its encoding, vocabulary size and end-of-document id (`None`: it has none)."""

    encode: Callable[[str], Tokens]
    vocab_size: int
    eod: int | None


@dataclass(frozen=True)
class Line:
    """One raw record; `number` is its line, or `None` if the whole file is one document."""

    source: str
    number: int | None
    raw: bytes

    @property
    def place(self) -> str:
        """Return `FILE:LINE`, or `FILE` for a whole file."""
        return self.source if self.number is None else f"{self.source}:{self.number}"


@dataclass
class Encoded:
    """A chunk's documents by key, in input order, and the problems of unusable lines."""

    documents: dict[str, list[Tokens]]
    problems: list[str] = field(default_factory=list)
    num_bytes: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define our flags; Megatron's tokenizer flags come from Megatron itself."""
    parser.add_argument("--input", nargs="+", type=Path, required=True, help="JSONL files, text files or folders")
    parser.add_argument("--output-prefix", type=Path, required=True, help="path prefix of the dataset")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys to take, a dataset each (default: text)")
    parser.add_argument("--glob", default="*.txt", help="which files of a folder to take (default: *.txt)")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--skip-bad-lines", action="store_true", help="leave bad lines out instead of stopping")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of that name")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; Megatron's tokenizer flags are loaded only if used, since that takes seconds."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser)
    if any(word in ("-h", "--help") or "token" in word or "vocab" in word for word in words):
        with quiet_imports():
            from megatron.training.argument_utils import ArgumentGroupFactory
            from megatron.training.config import TokenizerConfig

        ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer (Megatron's own flags)")
    else:
        parser.set_defaults(tokenizer_type=None)
    args = parser.parse_args(words)
    if args.tokenizer_type in NOT_FOR_TEXT:
        parser.error(f"--tokenizer-type {args.tokenizer_type} is for images or conversations, not for plain text")
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least 1 is needed")
    return args


def build_encoder(args: argparse.Namespace) -> Encoder:
    """Build Megatron's tokenizer, or the byte-level one that needs none."""
    if args.tokenizer_type is None:
        return Encoder(encode_bytes, BYTE_VOCAB_SIZE, BYTE_EOD)
    with quiet_imports():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    # No padding of the vocabulary: it depends on the tensor-parallel size, which is unknown here.
    try:
        tokenizer = build_tokenizer(argparse.Namespace(**{**vars(args), "pad_vocab_size": False}))
    except (ImportError, NameError, AssertionError, AttributeError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"Megatron cannot build --tokenizer-type {args.tokenizer_type}: {error}") from error
    eod = tokenizer.eod
    return Encoder(
        lambda text: np.asarray(tokenizer.tokenize(text), dtype=np.int64),
        tokenizer.vocab_size,
        eod if eod is not None and eod >= 0 else None,
    )


def find_inputs(paths: list[Path], glob: str) -> list[Path]:
    """Expand folders in a fixed order. Raises: `FileNotFoundError` for a missing path or an empty folder."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(entry for entry in path.rglob(glob) if entry.is_file())
            if not found:
                raise FileNotFoundError(f"--input {path}: no file there matches --glob '{glob}'")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"--input {path}: no such file or folder")
    return files


def read_chunks(files: list[Path]) -> Iterator[list[Line]]:
    """Yield the records in order, in chunks of about 1 MiB."""
    chunk: list[Line] = []
    num_bytes = 0
    for line in read_lines(files):
        chunk.append(line)
        num_bytes += len(line.raw)
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def read_lines(files: list[Path]) -> Iterator[Line]:
    """Yield JSONL lines with their numbers, and other files whole."""
    for path in files:
        if path.suffix in (".jsonl", ".json"):
            with path.open("rb") as stream:
                for number, raw in enumerate(stream, start=1):
                    yield Line(str(path), number, raw)
        else:
            yield Line(str(path), None, path.read_bytes())


def texts_of(line: Line, keys: list[str]) -> dict[str, str]:
    """Return the line's text for every key. Raises: `ValueError`, which says what is wrong with the line."""
    text = line.raw.decode("utf-8")
    if line.number is None:
        return {keys[0]: text}
    if not text.strip():
        return {}
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, not {type(record).__name__}")
    for key in keys:
        if not isinstance(record.get(key), str):
            known = ", ".join(map(str, record)) or "none"
            raise ValueError(f"no text under key '{key}' (keys of this line: {known})")
    return {key: record[key] for key in keys}


def encode_chunk(encoder: Encoder, keys: list[str], append_eod: bool, chunk: list[Line]) -> Encoded:
    """Encode one chunk; a bad line costs that line and is named."""
    result = Encoded({key: [] for key in keys})
    ending = [encoder.eod] if append_eod and encoder.eod is not None else []
    for line in chunk:
        result.num_bytes += len(line.raw)
        try:
            tokens = {key: encoder.encode(text) for key, text in texts_of(line, keys).items()}
        # Bad UTF-8, bad JSON or one nested too deeply, lone surrogates, words that a tokenizer refuses.
        except (ValueError, RecursionError) as error:
            result.problems.append(f"{line.place}: {error}")
            continue
        for key, ids in tokens.items():
            if ids.size:
                result.documents[key].append(np.append(ids, ending).astype(np.int64) if ending else ids)
    return result


_worker_encoder: Encoder  # set once per worker process, so that the tokenizer is not pickled for every chunk


def _start_worker(args: argparse.Namespace) -> None:
    global _worker_encoder
    _worker_encoder = build_encoder(args)


def _encode_in_worker(keys: list[str], append_eod: bool, chunk: list[Line]) -> Encoded:
    return encode_chunk(_worker_encoder, keys, append_eod, chunk)


def encode_all(args: argparse.Namespace, encoder: Encoder, files: list[Path]) -> Iterator[Encoded]:
    """Yield the encoded chunks in input order, whatever the number of workers."""
    if args.workers == 1:
        for chunk in read_chunks(files):
            yield encode_chunk(encoder, args.json_keys, args.append_eod, chunk)
        return
    # spawn: torch and the progress bar have threads, and a fork with threads may deadlock.
    with ProcessPoolExecutor(args.workers, get_context("spawn"), _start_worker, (args,)) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for chunk in read_chunks(files):
                pending.append(pool.submit(_encode_in_worker, args.json_keys, args.append_eod, chunk))
                if len(pending) > 4 * args.workers:  # bounded: the input may be larger than memory
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def run(args: argparse.Namespace) -> int:
    """Convert the inputs to datasets and return 0; errors are raised."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for megatron.swap
    files = find_inputs(args.input, args.glob)
    stem: Path = args.output_prefix
    prefixes = {key: stem.with_name(f"{stem.name}_{key}_document") for key in args.json_keys}
    taken = [str(path) for prefix in prefixes.values() for path in dataset_files(prefix) if path.exists()]
    if taken and not args.overwrite:
        raise FileExistsError(f"{', '.join(taken)}: there already; choose another --output-prefix or add --overwrite")
    encoder = build_encoder(args)
    if args.append_eod and encoder.eod is None:
        raise ValueError(f"--append-eod: {args.tokenizer_type} has no end-of-document token")

    problems: list[str] = []
    console = Console(stderr=True)
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(DatasetWriter(prefix, encoder.vocab_size)) for key, prefix in prefixes.items()
        }
        progress = stack.enter_context(Progress(*columns, console=console))
        task = progress.add_task("tokenizing", total=sum(path.stat().st_size for path in files))
        for chunk in encode_all(args, encoder, files):
            for key, documents in chunk.documents.items():
                for document in documents:
                    writers[key].add(document)
            problems += chunk.problems
            progress.advance(task, chunk.num_bytes)
            if len(problems) >= MAX_REPORTED and not args.skip_bad_lines:
                break
        progress.stop()
        for problem in problems[:MAX_REPORTED]:
            print(f"bad line: {problem}", file=sys.stderr)
        if len(problems) > MAX_REPORTED:
            print(f"… and {len(problems) - MAX_REPORTED} more", file=sys.stderr)
        if problems and not args.skip_bad_lines:
            raise ValueError("nothing was written. Correct these lines, or leave them out with --skip-bad-lines")
        for writer in writers.values():
            writer.commit()
    for key, writer in writers.items():
        counts = f"{writer.num_documents} documents, {writer.num_tokens} tokens, {len(problems)} lines left out"
        print(f"{prefixes[key]}: {counts}")
    if args.tokenizer_type is None:
        print(f"byte-level: train with {BYTE_LEVEL_FLAGS}")
    fewest = min(writer.num_documents for writer in writers.values())
    if fewest < ENOUGH_DOCUMENTS:
        from megatron.swap.trainer.inputs import split_for

        print(f"too few documents for Megatron's --split 969,30,1: train with {split_for(fewest)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status; an error is printed as one line."""
    try:
        return run(parse_arguments(argv))
    except (OSError, ValueError, ImportError) as error:  # rich comes with the extra `measure`
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
