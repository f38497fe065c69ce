"""Reads profiles from files."""

from pathlib import Path

from megatron.swap.common import records
from megatron.swap.forecast.figures import with_figures
from megatron.swap.planner.profile import FORMAT, VERSION, Profile


def load_profile(path: str | Path) -> Profile:
    """Read a profile, or raise ``UsageError`` with file, key, the given value and the allowed values."""
    return with_figures(records.load(Profile, path, FORMAT, VERSION))
