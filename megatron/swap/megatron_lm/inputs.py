"""Checks the files and libraries that training needs before anything is built."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.swap.common.types import UsageError

TOKENIZER_LIBRARIES = {
    "HuggingFaceTokenizer": "transformers",
    "SFTTokenizer": "transformers",
    "MultimodalTokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""Libraries of Megatron's tokenizers that megatron-core does not bring along."""
ENDINGS = (".idx", ".bin")
MOST_SHOWN = 3
"""Datasets that an error names."""


def check_tokenizer(args: Namespace) -> None:
    """Refuse a tokenizer whose library is not installed.

    Raises:
        UsageError: names the library.
    """
    library = TOKENIZER_LIBRARIES.get(args.tokenizer_type)
    if library is not None and importlib.util.find_spec(library) is None:
        raise UsageError(
            f"--tokenizer-type {args.tokenizer_type} needs the Python package {library}, which is not installed. "
            f"Install it (pip install {library}), or choose a tokenizer that needs none: --tokenizer-type "
            "NullTokenizer with --vocab-size, for data that consists of token numbers."
        )


def build_tokenizer(build: Callable[..., Any], args: Namespace, **options: Any) -> Any:
    """Return what ``build``, Megatron's function, returns.

    Raises:
        UsageError: a library or file is missing, or a flag.
    """
    check_tokenizer(args)
    try:
        return build(args, **options)
    except (AssertionError, ImportError, OSError, ValueError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        model = f" --tokenizer-model {args.tokenizer_model}" if args.tokenizer_model else ""
        raise UsageError(
            f"--tokenizer-type {args.tokenizer_type}{model}: Megatron cannot build this tokenizer ({words}). Give "
            "--tokenizer-model a file or folder that is there, or a name that Hugging Face's hub has and this machine "
            "can reach."
        ) from error


def masks_documents(args: Namespace) -> bool:
    """Return whether attention shall not cross the documents of a sample. Megatron has the flag since 0.19."""
    return bool(vars(args).get("dataloader_inter_document_masking"))


def packs_documents(args: Namespace) -> bool:
    """Return whether the samples are packed documents, whose lengths attention and the rotary embedding get."""
    return bool(args.sft) or masks_documents(args)


def check_packing(args: Namespace) -> None:
    """Refuse what Megatron cannot do with packed documents and does not refuse, or not in words.

    Raises:
        UsageError: names the flags.
    """
    if not packs_documents(args):
        return
    ours = "--sft" if args.sft else "--dataloader-inter-document-masking"
    pipeline, size = args.pipeline_model_parallel_size, args.micro_batch_size
    context = args.context_parallel_size
    refused = {
        "this Megatron does not pack documents so. Install megatron-core 0.19": (
            "dataloader_inter_document_masking" not in vars(args)
        ),
        "the local spec's attention takes no packed documents. Use --transformer-impl transformer_engine, or "
        "--reset-attention-mask, whose masks take sequence² bytes": args.transformer_impl == "local",
        f"cannot be combined with --context-parallel-size {context}: Megatron does not pad documents to multiples of "
        "twice that size, and attention over other lengths is wrong. Drop one of the two": context > 1 and not args.sft,
        "cannot be combined with --hybrid-context-parallel: this script does not distribute its samples. Drop it": (
            vars(args).get("hybrid_context_parallel")
        ),
        f"cannot be combined with --pipeline-model-parallel-size {pipeline} and --micro-batch-size {size}: a stage "
        "receives several samples, not one pack. Give --micro-batch-size 1": pipeline > 1 and size > 1,
        "trains on conversations. Drop --mock-data, and give --data-path FILE.jsonl": args.sft and args.mock_data,
        "needs --tokenizer-type SFTTokenizer, and --tokenizer-model with a Hugging Face tokenizer": (
            args.sft and args.tokenizer_type != "SFTTokenizer"
        ),
        "resets positions and attention by itself. Drop --reset-position-ids and --reset-attention-mask": (
            args.sft and (args.reset_position_ids or args.reset_attention_mask)
        ),
        "needs the Python package datasets, which is not installed. Install it (pip install datasets)": (
            args.sft and importlib.util.find_spec("datasets") is None
        ),
    }
    for why, is_refused in refused.items():
        if is_refused:
            raise UsageError(f"{ours}: {why}.")


def check_data(args: Namespace) -> None:
    """Refuse datasets that do not exist: each is a prefix of an ``.idx`` and a ``.bin`` file, with ``--sft`` a file.

    Raises:
        UsageError: names the flag, the missing files, and datasets that are there.
    """
    for flag, words in _blends(args):
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


def _blends(args: Namespace) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each flag that names datasets, with its words."""
    flags = {
        "--data-path": args.data_path, "--train-data-path": args.train_data_path,
        "--valid-data-path": args.valid_data_path, "--test-data-path": args.test_data_path,
    }  # fmt: skip
    yield from ((flag, words) for flag, words in flags.items() if words)
    if args.data_args_path is not None:
        yield f"--data-args-path {args.data_args_path}:", _text("--data-args-path", args.data_args_path).split()
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
        yield from ((f"{flag} {path}:", part.split() if isinstance(part, str) else part or ()) for part in words)


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text() if "://" not in path else ""
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {path}: a readable text file is expected ({error}).") from None


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Return the prefixes among ``words``, as Megatron reads them: prefixes alone, or weights and prefixes in turn."""
    is_weighted = len(words) % 2 == 0 and all(map(_is_number, words[0::2]))
    return words[1::2] if is_weighted else words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _others(prefix: str) -> str:
    """Name datasets that ``prefix`` may mean: with a longer name, or with an ending too many."""
    path = Path(prefix)
    begins = [found.with_suffix("") for found in sorted(path.parent.glob("*.idx")) if found.name.startswith(path.stem)]
    shown = ", ".join(map(str, begins[:MOST_SHOWN]))
    return f" There is {shown}." if shown else ""
