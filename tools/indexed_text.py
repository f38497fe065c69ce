"""Write text as Megatron indexed datasets: shared code of the data programs.

The byte-level encoding needs no vocabulary file and no download: a token is a byte, and 256 ends a document. Megatron
has no flag for its own byte-level tokenizer. Training needs only the vocabulary size and the end-of-document id, and
`NullTokenizer` has both: train with `BYTE_LEVEL_FLAGS`.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

BYTE_EOD = 256
BYTE_VOCAB_SIZE = 257
BYTE_LEVEL_FLAGS = f"--tokenizer-type NullTokenizer --vocab-size {BYTE_VOCAB_SIZE}"
ENOUGH_DOCUMENTS = 500
"""Megatron's default --split 969,30,1 leaves none of fewer for the test."""

Tokens = npt.NDArray[np.int64]


def encode_bytes(text: str) -> Tokens:
    """Return the UTF-8 bytes of `text`, one token each."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)


def decode_bytes(tokens: Sequence[int] | npt.NDArray[Any]) -> str:
    """Return the text of byte-level `tokens` without end-of-document tokens."""
    return bytes(int(token) for token in tokens if token != BYTE_EOD).decode("utf-8")


def dataset_files(prefix: Path) -> tuple[Path, Path]:
    """Return the `.bin` and `.idx` paths of a dataset prefix (a prefix may hold dots: `stdlib-3.12.1`)."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def dataset_exists(prefix: Path) -> bool:
    """Return whether a complete dataset exists under `prefix`."""
    return all(path.exists() for path in dataset_files(prefix))


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide upstream's import warnings (no apex, no CUDA), which do not matter for preparing text."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class DatasetWriter:
    """Write one indexed dataset under a temporary name; `commit()` renames it.

    The index is renamed last, and without an index there is no dataset. So Megatron never reads a half-written dataset
    of an interrupted run or of two concurrent runs.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        with quiet_imports():
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        prefix.parent.mkdir(parents=True, exist_ok=True)
        self.prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0
        self._dtype = np.dtype(DType.optimal_dtype(vocab_size))
        self._temporary = prefix.with_name(f".{prefix.name}.{platform.node()}-{os.getpid()}.partial")
        self._builder = IndexedDatasetBuilder(str(dataset_files(self._temporary)[0]), dtype=self._dtype.type)

    def add(self, tokens: Tokens) -> None:
        """Append one document. Raises: `ValueError` if the file's integer type cannot hold a token."""
        limit = np.iinfo(self._dtype)
        if tokens.size and not (limit.min <= tokens.min() and tokens.max() <= limit.max):
            raise ValueError(
                f"token ids from {tokens.min()} to {tokens.max()} do not fit {self._dtype}, the type for the "
                "tokenizer's stated vocabulary size: state the real one with --vocab-size"
            )
        self._builder.add_document(tokens, [tokens.size])
        self.num_documents += 1
        self.num_tokens += int(tokens.size)

    def commit(self) -> None:
        """Write the index, then rename both files. Raises: `ValueError` if there is no document."""
        if self.num_documents == 0:
            raise ValueError(f"no document to write to {self.prefix}: the input is empty")
        temporary_bin, temporary_idx = dataset_files(self._temporary)
        final_bin, final_idx = dataset_files(self.prefix)
        self._builder.finalize(str(temporary_idx))
        final_idx.unlink(missing_ok=True)
        for indices in self.prefix.glob("cache/*_indices"):  # Megatron's, of the dataset that this one replaces
            shutil.rmtree(indices)
        temporary_bin.replace(final_bin)
        temporary_idx.replace(final_idx)

    def discard(self) -> None:
        """Remove the temporary files; after a commit there are none."""
        self._builder.data_file.close()
        for path in dataset_files(self._temporary):
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def write_byte_level(prefix: Path, texts: Iterable[str]) -> DatasetWriter:
    """Write `texts`, a document each with its end-of-document token, as one byte-level dataset."""
    with DatasetWriter(prefix, BYTE_VOCAB_SIZE) as writer:
        for text in texts:
            writer.add(np.append(encode_bytes(text), BYTE_EOD))
        writer.commit()
    return writer
