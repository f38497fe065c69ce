"""Files and libraries that are missing are named before anything is built."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.inputs import TOKENIZER_LIBRARIES, check_data, check_tokenizer


def data(**given: object) -> Namespace:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
             "per_split_data_args_path")  # fmt: skip
    return Namespace(**{**dict.fromkeys(names), **given})


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    for ending in (".idx", ".bin"):
        (tmp_path / f"mine_text_document{ending}").touch()
    return str(tmp_path / "mine_text_document")


def test_datasets_that_exist(prefix: str, tmp_path: Path):
    check_data(data())
    check_data(data(data_path=[prefix]))
    check_data(data(data_path=["0.3", prefix, "70", prefix], valid_data_path=[prefix]))
    check_data(data(data_path=[prefix, prefix]))
    check_data(data(data_path=["s3://bucket/elsewhere"]))
    (tmp_path / "blend").write_text(f"1 {prefix}\n2 {prefix}")
    check_data(data(data_args_path=str(tmp_path / "blend")))
    (tmp_path / "splits").write_text(json.dumps({"train": [prefix], "valid": f"1 {prefix}", "test": None}))
    check_data(data(per_split_data_args_path=str(tmp_path / "splits")))


def test_no_dataset():
    with pytest.raises(UsageError) as caught:
        check_data(data(data_path=["/nowhere/x"]))
    for words in ("--data-path /nowhere/x: there is no /nowhere/x.idx and no /nowhere/x.bin", "preprocess_data"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["mine", "mine_text_document.bin", "mine_text_document.idx"])
def test_the_dataset_that_was_meant_is_named(prefix: str, tmp_path: Path, given: str):
    with pytest.raises(UsageError, match=f"There is {prefix}"):
        check_data(data(data_path=[str(tmp_path / given)]))


def test_half_a_dataset(prefix: str):
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(UsageError, match=r"there is no \S*\.bin\. Give"):
        check_data(data(data_path=[prefix]))


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("data_args_path", None, "--data-args-path .*file.*No such file"),
        ("data_args_path", "1 /nowhere/x", "--data-args-path .*file: /nowhere/x"),
        ("per_split_data_args_path", "{", "--per-split-data-args-path .*JSON object with train, valid and test"),
        ("per_split_data_args_path", '{"train": []}', "KeyError: 'valid'"),
    ],
)
def test_files_that_name_datasets(tmp_path: Path, flag: str, text: str | None, words: str):
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match=words):
        check_data(data(**{flag: str(tmp_path / "file")}))


@pytest.mark.parametrize("tokenizer", TOKENIZER_LIBRARIES)
def test_a_tokenizer_without_its_library(monkeypatch: pytest.MonkeyPatch, tokenizer: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        check_tokenizer(Namespace(tokenizer_type=tokenizer))
    library = TOKENIZER_LIBRARIES[tokenizer]
    assert f"--tokenizer-type {tokenizer} needs the Python package {library}" in str(caught.value)
    assert f"pip install {library}" in str(caught.value)


def test_tokenizers_that_can_be_built(monkeypatch: pytest.MonkeyPatch):
    check_tokenizer(Namespace(tokenizer_type="NullTokenizer"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_tokenizer(Namespace(tokenizer_type="HuggingFaceTokenizer"))
