"""Reads the config file of a transformers model. Names of code and files stay out: the file comes from anybody."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.swap.common.printable import in_one_line
from megatron.swap.common.records import read_text
from megatron.swap.common.types import UsageError

# Keys that are left out, at any depth: the code that builds the model, the question that transformers would ask, and
# the type of its results.
NOT_OF_THE_MODEL = ("auto_map", "trust_remote_code", "return_dict")
# Ends of keys, with the values that need no code beside transformers and torch.
IMPLEMENTATIONS = {
    "attn_implementation": (None, "eager", "sdpa"),
    "experts_implementation": (None, "eager", "grouped_mm", "batched_mm"),
}
QUANTIZED = ("quantization_config", "compression_config")
COUNTS = re.compile("layer|expert|head|label|block")  # in the names of keys with a number of parts
MOST_PARTS = 100_000


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a model in ``path``, a config.json or its folder, or raise a ``UsageError``."""
    try:
        file = path / "config.json" if path.is_dir() else path
        found = json.loads(read_text(file), parse_constant=_constant)
        if not isinstance(found["model_type"], str):
            raise TypeError(f"model_type is {found['model_type']!r}, not a name")
        return {key: _checked(path, key, value) for key, value in found.items() if key not in NOT_OF_THE_MODEL}
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--hf {path}: is no config.json of transformers ({in_one_line(error)}). Give the file, which "
            "model.config.save_pretrained(FOLDER) writes, or its folder."
        ) from error


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)  # Infinity, which transformers writes for some models


def _checked(path: Path, key: str, value: Any) -> Any:
    """Return ``value`` without keys that are not of the model."""
    if key in QUANTIZED and value is not None:
        raise UsageError(
            f"--hf {path}: {key}: quantized weights are not planned, --weights says which are. Remove the key."
        )
    for name, known in IMPLEMENTATIONS.items():
        if key.removesuffix("_internal").endswith(name):
            given = value.values() if isinstance(value, Mapping) else (value,)
            if wrong := [one for one in given if not isinstance(one, str | None) or one not in known]:
                allowed = ", ".join(one for one in known if one is not None)
                raise UsageError(
                    f"--hf {path}: {key} {wrong[0]!r}: is not planned, and nothing is downloaded. Give one of "
                    f"{allowed}, or remove the key."
                )
    if isinstance(value, int) and value > MOST_PARTS and COUNTS.search(key):
        raise UsageError(f"--hf {path}: {key} {value:.4g}: must be at most {MOST_PARTS}.")
    if isinstance(value, Mapping):
        return {name: _checked(path, name, part) for name, part in value.items() if name not in NOT_OF_THE_MODEL}
    if isinstance(value, list):
        return [_checked(path, key, part) for part in value]
    return value
