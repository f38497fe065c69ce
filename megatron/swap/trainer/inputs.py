"""Checks the data that training needs before anything is built."""

import json
import math
import struct
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.swap.common.types import UsageError

ENDINGS = (".idx", ".bin")
MOST_SHOWN = 3  # datasets that an error names
MARK = b"MMIDIDX\x00\x00"
# Beginning of an `.idx` file: MARK, its version, the type of its tokens, its number of documents.
HEAD = struct.Struct("<9sQBQ")
PARTS = ("training", "validation", "the test")  # parts of `--split`, in its order


def masks_documents(args: Namespace) -> bool:
    """Return whether attention shall not cross the documents of a sample. Megatron has the flag since 0.19."""
    return bool(vars(args).get("dataloader_inter_document_masking"))


def packs_documents(args: Namespace) -> bool:
    """Return whether the samples are packed documents, whose lengths attention and the rotary embedding get."""
    return bool(args.sft) or masks_documents(args)


def check_packing(args: Namespace) -> None:
    """Raise a ``UsageError`` for flags with which packed documents would train wrong and Megatron would not refuse."""
    if not packs_documents(args):
        return
    pipeline, size, context = args.pipeline_model_parallel_size, args.micro_batch_size, args.context_parallel_size
    refused = {
        "this Megatron, which packs no documents so. Install megatron-core 0.19": (
            "dataloader_inter_document_masking" not in vars(args)
        ),
        "--transformer-impl local: its attention takes no packed documents. Use transformer_engine, or "
        "--reset-attention-mask, whose masks take sequence² bytes": args.transformer_impl == "local",
        f"--context-parallel-size {context}: Megatron does not pad documents to multiples of twice that size, and "
        "attention over other lengths is wrong. Drop one of the two": context > 1 and not args.sft,
        "--hybrid-context-parallel: this script does not distribute its samples. Drop it": (
            vars(args).get("hybrid_context_parallel")
        ),
        f"--pipeline-model-parallel-size {pipeline} and --micro-batch-size {size}: a stage receives several samples, "
        "not one pack. Give --micro-batch-size 1": pipeline > 1 and size > 1,
    }
    ours = "--sft" if args.sft else "--dataloader-inter-document-masking"
    for why, is_refused in refused.items():
        if is_refused:
            raise UsageError(f"{ours} cannot be combined with {why}.")


def check_data(args: Namespace) -> None:
    """Raise a ``UsageError`` for datasets that do not exist, and for parts of them without a document."""
    blends = list(_blends(args))  # a dataset is a prefix of an .idx and a .bin file, with --sft a file
    for flag, words, _ in blends:
        for prefix in _prefixes(words):
            if args.sft:
                if not Path(prefix).is_file():
                    raise UsageError(
                        f"{flag} {prefix}: there is no such file. --sft trains on JSON lines: each has messages, a "
                        "list of objects with role and content."
                    )
                continue
            missing = [ending for ending in ENDINGS if not Path(prefix + ending).is_file()]
            if missing and "://" not in prefix:
                raise UsageError(
                    f"{flag} {prefix}: there is no {' and no '.join(prefix + ending for ending in missing)}. Give the "
                    "prefix of an indexed dataset, the path of both its files without .idx and .bin."
                    f"{_others(prefix)} tools/preprocess_data.py makes one from text, and prints its prefix; "
                    "--mock-data trains on random tokens."
                )
    # In a part without a document Megatron looks for tokens for ever.
    for flag, words, is_divided in blends if not args.sft else ():
        found = {prefix: _num_documents(flag, prefix) for prefix in _prefixes(words) if "://" not in prefix}
        if found and is_divided:
            _check_split(args, found)


def evaluates(args: Namespace) -> bool:
    """Return whether training evaluates the model on validation data, and on test data if there is any."""
    return bool(args.full_validation or args.eval_iters)


def split_for(num_documents: int) -> str:
    """Return flags with which each part of so many documents has one, or with which training has all of them."""
    whole = "--split 1,0,0 --eval-iters 0"
    if num_documents < 2:
        return whole
    split = "1,1,0" if num_documents == 2 else f"{num_documents - 2},1,1"
    return f"--split {split}, or {whole}"


def refuse_empty_part(dataset: Any) -> NoReturn:
    """Raise a ``UsageError`` for a part without tokens that a script of the user's builds."""
    split = f", by the split {dataset.config.split}" if dataset.config.split else ""
    raise UsageError(
        f"{dataset.dataset_path}: the part for {dataset.index_split.name} has {len(dataset.indices)} documents{split}, "
        "and no tokens. Give it documents, or the share 0 and no evaluation: --split 1,0,0 --eval-iters 0."
    )


def _check_split(args: Namespace, num_documents: dict[str, int]) -> None:
    """Refuse a ``--split`` that leaves no document to a part that is read. ``num_documents`` is by dataset."""
    if args.split is None:
        raise UsageError("--data-args-path: needs --split, the shares of training, validation and test, as in 98,1,1.")
    remedy = f"Give {split_for(min(num_documents.values()))}, which evaluates nothing."
    asked = {
        PARTS[0]: "" if args.skip_train else "--train-iters",
        PARTS[1]: "--full-validation" if args.full_validation else f"--eval-iters {args.eval_iters}",
    }
    for part, share in zip(PARTS if evaluates(args) else PARTS[:1], _shares(args.split), strict=False):
        if share is None:
            if asked.get(part):
                raise UsageError(
                    f"--split {args.split}: has nothing for {part}, which {asked[part]} asks for. {remedy}"
                )
            continue
        for prefix, num in num_documents.items():
            begin, end = (round(bound * num) for bound in share)  # as Megatron's builder does
            if begin == end:
                has = "1 document" if num == 1 else f"{num} documents"
                raise UsageError(f"--split {args.split}: leaves no document for {part}: {prefix} has {has}. {remedy}")


def _shares(split: str) -> Sequence[tuple[float, float] | None]:
    """Return where each part begins and ends, from 0 to 1, or None for a part without a share."""
    from megatron.core.datasets import blended_megatron_dataset_config as config

    try:
        vector = config.parse_and_normalize_split(split)
    except (AssertionError, ValueError):
        vector = [math.nan]
    if not all(map(math.isfinite, vector)):
        raise UsageError(f"--split {split}: give the shares of training, validation and test, as in 98,1,1.")
    shares: Sequence[tuple[float, float] | None] = config.convert_split_vector_to_split_matrix(vector)
    return shares


def _num_documents(flag: str, prefix: str) -> int:
    """Return the number of documents of a dataset, at least 1."""
    with Path(f"{prefix}.idx").open("rb") as stream:
        head = stream.read(HEAD.size)
    if len(head) < HEAD.size or not head.startswith(MARK):
        raise UsageError(f"{flag} {prefix}: {prefix}.idx is no index of Megatron's. Make the dataset again.")
    num_documents = int(HEAD.unpack(head)[3])
    if num_documents == 0:
        raise UsageError(f"{flag} {prefix}: the dataset has no documents. Give one that has.")
    return num_documents


def _blends(args: Namespace) -> Iterator[tuple[str, Sequence[str], bool]]:
    """Yield each flag that names datasets, its words, and whether ``--split`` divides these datasets."""
    flags = {
        "--data-path": args.data_path, "--train-data-path": args.train_data_path,
        "--valid-data-path": args.valid_data_path, "--test-data-path": args.test_data_path,
    }  # fmt: skip
    yield from ((flag, words, flag == "--data-path") for flag, words in flags.items() if words)
    if args.data_args_path is not None:
        yield f"--data-args-path {args.data_args_path}:", _text("--data-args-path", args.data_args_path).split(), True
    if args.per_split_data_args_path is not None:
        flag, path = "--per-split-data-args-path", args.per_split_data_args_path
        try:
            splits = json.loads(_text(flag, path))
            words = [splits[split] for split in ("train", "valid", "test")]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{flag} {path}: a JSON object with train, valid and test is expected, each a list of prefixes, "
                f"with or without weights ({type(error).__name__}: {error})."
            ) from None
        yield from ((f"{flag} {path}:", part.split() if isinstance(part, str) else part or (), False) for part in words)


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text() if "://" not in path else ""
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {path}: a readable text file is expected ({error}).") from None


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Return the prefixes among ``words``, as Megatron reads them: prefixes alone, or weights and prefixes in turn."""
    try:
        weights = list(map(float, words[0::2]))
    except ValueError:
        return words
    return words[1::2] if 2 * len(weights) == len(words) else words


def _others(prefix: str) -> str:
    """Name datasets that ``prefix`` may mean: with a longer name, or with an ending too many."""
    path = Path(prefix)
    begins = [found.with_suffix("") for found in sorted(path.parent.glob("*.idx")) if found.name.startswith(path.stem)]
    shown = ", ".join(map(str, begins[:MOST_SHOWN]))
    return f" There is {shown}." if shown else ""
