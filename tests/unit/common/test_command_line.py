"""A mistake on a command line is told in a paragraph, with the nearest flag or the help of the flag."""

import pytest

from megatron.swap.common.flag_names import is_flag, nearest_flag
from megatron.swap.common.flags import CommandLine

KNOWN = ["--swap-layers", "--swap-memory-gib", "--swap-memory-fraction", "--swap-modules", "--num-layers", "-h"]


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--swap-lay", "--swap-layers"),
        ("--swap_layers", "--swap-layers"),
        ("—swap-layers", "--swap-layers"),
        ("--Swap-Layers", "--swap-layers"),
        ("--swaplayers", "--swap-layers"),
        ("--swap-memory", "--swap-memory-gib"),
        ("--memory-gib", "--swap-memory-gib"),
        ("--quux", None),
    ],
)
def test_the_nearest_flag(given: str, nearest: str | None) -> None:
    assert nearest_flag(given, KNOWN) == nearest


def test_what_is_meant_as_a_flag() -> None:
    assert [word for word in ("--a", "-a", "–a", "a", "-1", "--", "-", "") if is_flag(word)] == ["--a", "-a", "–a"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nmu 3", "--nmu is not a flag: the nearest is --num."),
        ("--num 3 --quux=4", "--quux is not a flag: `program --help` lists all of them."),
        ("--num 3 4", "'4' belongs to no flag. Flags begin with --; a value with blanks needs quotes around it."),
        ("--num x", "argument --num: invalid int value: 'x'. --num: how many, 5 if it is not given"),
    ],
)
def test_a_mistake_is_a_paragraph(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandLine(prog="program", allow_abbrev=False)
    parser.add_argument("--num", type=int, default=5, help="how many, %(default)s if it is not given")
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(words.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"\nerror: {told}\n"
