"""Whole numbers rounded to multiples. No torch, no Megatron."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return ceil_div(number, multiple) * multiple


def round_down(number: int, multiple: int) -> int:
    """Return the largest multiple of ``multiple`` that is at most ``number``."""
    return number // multiple * multiple
