"""Make a training corpus from the source files of Python's standard library, without a download.

The corpus is up to 30 MB of English and Python, byte-level. The program prints the prefix for Megatron's `--data-path`.
An existing corpus for this Python version is not changed.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from indexed_text import dataset_exists, write_byte_level

REVISION = 1  # raise it when the choice or order of files changes: it is part of the name


def corpus_prefix(folder: Path) -> Path:
    """Return the dataset's prefix, which contains the Python version."""
    return folder / f"stdlib-py{platform.python_version()}-r{REVISION}_text_document"


def source_files(library: Path) -> list[Path]:
    """Return the library's Python files in a fixed, shuffled order.

    Megatron's `--split` takes validation from the end: in alphabetical order that would be `xml` to `zoneinfo`.
    """
    names = [
        path.relative_to(library)
        for path in library.rglob("*.py")
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
    ]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    return [library / name for name in names]


def read_texts(files: list[Path]) -> Iterator[str]:
    """Yield the text of every file that is not empty and is valid UTF-8 (some test files are not)."""
    for path in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            yield text


def main() -> int:
    """Prepare the corpus unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".data"), help="where the dataset goes (default: .data)")
    folder: Path = parser.parse_args().folder
    prefix = corpus_prefix(folder.resolve())
    if not dataset_exists(prefix):
        library = Path(sysconfig.get_paths()["stdlib"])
        files = source_files(library)
        if not files:
            print(f"error: {library} holds no .py files; name your own data with DATA_PATH=", file=sys.stderr)
            return 1
        try:
            written = write_byte_level(prefix, read_texts(files))
        except (OSError, ValueError) as error:  # a folder that cannot be written, a full disk, no text
            print(f"error: {error}; --folder says where the corpus goes", file=sys.stderr)
            return 1
        mib = written.num_tokens / 2**20
        print(
            f"[megatron-swap] corpus: {written.num_documents} files of Python {platform.python_version()}'s standard "
            f"library, {mib:.1f} MiB, one token a byte",
            file=sys.stderr,
        )
    print(prefix)
    return 0


if __name__ == "__main__":
    sys.exit(main())
