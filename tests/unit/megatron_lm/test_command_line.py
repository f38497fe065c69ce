"""``add_swap_args`` on parsers of other programs."""

import argparse
import sys
from collections.abc import Iterator

import pytest

from megatron.swap.trainer.command_line import add_swap_args


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Stands for Megatron's, with a help text that argparse cannot print."""
    theirs = argparse.ArgumentParser(prog="program", allow_abbrev=False)
    theirs.add_argument("--num-layers", type=int, help="about 50% (of all)")
    return theirs


@pytest.fixture(autouse=True)
def _hook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def test_the_same_parser_is_returned(parser: argparse.ArgumentParser) -> None:
    assert add_swap_args(parser) is parser
    parser.add_argument("--later", help="100%")  # a script may add its own behind ours
    text = parser.format_help()
    assert text.startswith("usage: program [--swap-… flags] [Megatron's flags]\n")
    assert "about 50% (of all)" in text
    assert "100%" in text
    assert text.index("--swap-layers LAYERS") < text.index("--num-layers")


@pytest.mark.parametrize("flag", ["--swap-layer", "—swap-layers"])
def test_ours_are_known_where_unknown_flags_are_ignored(
    parser: argparse.ArgumentParser, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add_swap_args(parser)
    found, rest = parser.parse_known_args(["--theirs", "3", "--swap-layers", "all"])
    assert (found.swap_layers, rest) == ("all", ["--theirs", "3"])
    with pytest.raises(SystemExit):
        parser.parse_known_args(["--theirs", "3", flag, "all"])
    assert capsys.readouterr().err == f"\nerror: {flag} is not a flag: the nearest is --swap-layers.\n"
