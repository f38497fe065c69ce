"""Whole numbers rounded to multiples. No torch, no Megatron."""


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    return ceil_div(number, multiple) * multiple


def round_down(number: int, multiple: int) -> int:
    return number // multiple * multiple
