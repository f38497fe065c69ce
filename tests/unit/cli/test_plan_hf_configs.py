"""megatron-swap plan --hf reads config files of anybody: each is planned or refused in a line, and asks for nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.cli import plan_hf
from megatron.swap.common.types import UsageError
from megatron.swap.dry import config_model

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
RUNS = "a step ran"
LINE = "--gpu h200 --hf config.json --seq-length 64"

Read = Callable[[Any], str]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Read:
    """Return what is said of a config, an object or the bytes of its file: one line, and nothing that is asked."""

    def stop(*_: Any, **__: Any) -> None:
        raise UsageError(RUNS)

    def asked(*_: Any) -> str:
        pytest.fail("it asks")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_hf, "dry_profile", stop)  # behind a step without swapping
    monkeypatch.setattr("builtins.input", asked)

    def said(config: Any) -> str:
        content = config if isinstance(config, bytes) else json.dumps(config).encode()
        Path("config.json").write_bytes(content)
        assert program.main(LINE.split()) == 1
        found = capsys.readouterr()
        assert found.out == ""
        assert found.err.startswith("error: ")
        assert found.err.endswith("\n")
        assert found.err[:-1].isprintable(), found.err
        return found.err.removeprefix("error: ")

    return said


ATTENTION = "is not planned, and nothing is downloaded. Give one of eager, sdpa, or remove the key."
EXPERTS = "Give one of eager, grouped_mm, batched_mm, or remove the key."
QUANTIZED = "quantization_config: quantized weights are not planned, --weights says which are. Remove the key."
NO_CONFIG = "is no config.json of transformers ("
OF_ANOTHER = {"AutoConfig": "a/b--c.D", "AutoModel": "a/b--c.D", "AutoModelForCausalLM": "a/b--c.D"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attn_implementation": "kernels-community/flash-attn"}, ATTENTION),
        ({"_attn_implementation": "flash_attention_2"}, "_attn_implementation 'flash_attention_2': " + ATTENTION),
        ({"_attn_implementation_internal": "a/b:c"}, "_attn_implementation_internal 'a/b:c': " + ATTENTION),
        ({"attn_implementation": {"": "sdpa", "text_config": "/tmp/x"}}, "attn_implementation '/tmp/x': "),
        ({"text_config": {"a": [{"attn_implementation": "a/b"}]}}, "attn_implementation 'a/b': " + ATTENTION),
        ({"experts_implementation": "a/b"}, EXPERTS),
        ({"quantization_config": {"quant_method": "fp8"}}, QUANTIZED),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers 1e+07: must be at most 100000."),
        ({"num_hidden_layers": 99_999}, "the model has more than 300 modules. Give a smaller one."),
        ({"vocab_size": 10**30}, "transformers cannot build the model"),
        ({"model_type": "\x1b]0;x"}, r"model_type '\x1b]0;x' is not in transformers"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], not a name"),
        ({"attention_dropout": None}, "cannot run dry (TypeError"),
        ({"auto_map": OF_ANOTHER, "trust_remote_code": True, "_name_or_path": "a/b"}, RUNS),
        ({"quantization_config": None, "attn_implementation": None, "_attn_implementation_autoset": True}, RUNS),
        ({"return_dict": False}, RUNS),
    ],
    ids=lambda what: str(what)[:40].encode("unicode_escape").decode() if isinstance(what, dict) else "",
)
def test_keys(monkeypatch: pytest.MonkeyPatch, read: Read, keys: dict[str, Any], words: str) -> None:
    monkeypatch.setattr(config_model, "MOST_MODULES", 300)
    assert words in read(LLAMA | keys)


def test_files_that_are_no_config(read: Read) -> None:
    for content in (
        b"", b"\x00" * 100, bytes(range(256)), b"\xff\xfe{\x00}\x00", b"3", b"null", b"[]", b'"llama"', b"{}",
        b'{"model_type": "llama", "rms_norm_eps": NaN}', b'{"model_type": "llama", "x": 1' + b"0" * 5000 + b"}",
        b'{"model_type": "llama", "x": ' + b"[" * 200_000,
        b'{"model_type": "llama", "x": ' + b'{"a": ' * 20_000 + b"1" + b"}" * 20_001,
    ):  # fmt: skip
        assert NO_CONFIG in read(content), content[:40]


def test_paths_that_are_no_file(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("piped").mkdir()
    os.mkfifo("piped/config.json")
    Path("zero").symlink_to("/dev/zero")
    for path in ("/dev/zero", "zero", "fifo", "folder", "piped", "nowhere", "a" * 5000, "\x1b[2J"):
        assert program.main(["--gpu", "h200", "--hf", path, "--seq-length", "64"]) == 1
        said = capsys.readouterr().err
        assert NO_CONFIG in said
        assert said[:-1].isprintable()
