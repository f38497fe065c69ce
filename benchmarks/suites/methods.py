"""The compared methods and the flags, environment and wrappers that each adds to a run.

A suite writes a method as parts joined by ` + `. Each part is a kind of ``methods.toml`` and its arguments: `ours
--swap-layers all + selective-recompute mlp`.
"""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.runner.planning import PLAN_FLAG, SEARCHES, plan_file, searches
from benchmarks.suites import budgets
from benchmarks.suites.toml_file import SuiteError, number, value_of

MLP_CHUNKS = "--mlp-chunks-for-training"  # Megatron's flag that our plans use: each chunk is swapped by itself
OUR_CHOICES = ("--swap-layers", PLAN_FLAG, *SEARCHES, "--swap-policy", "--swap-optimizer", "--swap-loss-chunks")
"""A method of ours has at least one of these flags: they choose what is swapped or split."""


@dataclass(frozen=True)
class Piece:
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    wrap: str | None = None  # `module:function`, called with the built model chunks
    requires: tuple[str, ...] = ()  # Packages that the method imports


@dataclass(frozen=True)
class Kind:
    """One way of saving memory, with the keys of ``methods.toml``."""

    what: str
    flags: str = ""
    words: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    wrap: str | None = None
    requires: tuple[str, ...] = ()
    needs_te: bool = False
    needs_gpu: bool = False

    def build(self, arguments: Sequence[str], num_layers: int) -> Piece:
        if bool(arguments) != ("{}" in self.flags):
            raise ValueError(f"takes {'' if '{}' in self.flags else 'no '}arguments; given: {shlex.join(arguments)}")
        words = {"all-but-one": f"{num_layers - 1}", "half": f"{num_layers // 2}", **self.words}
        given = [words.get(word, word) for word in arguments]
        flags = [part for flag in self.flags.split() for part in (given if flag == "{}" else [flag])]
        wrap = self.wrap and f"benchmarks.suites.baselines:{self.wrap}"
        return Piece(tuple(flags), self.env, wrap, tuple(self.requires))


KINDS = {
    name: Kind(**content)
    for name, content in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Method:
    name: str
    text: str
    what: str
    piece: Piece
    is_ours: bool
    runs_layers_once: bool
    """The method neither recomputes nor swaps, so that forward and backward can be timed by hooks."""

    @property
    def searches(self) -> bool:
        return searches(self.piece.flags)

    @property
    def plan_file(self) -> str | None:
        return plan_file(self.piece.flags)


def _check_ours(arguments: Sequence[str]) -> None:
    others = [word for word in arguments if word.startswith("--") and not word.startswith(("--swap-", MLP_CHUNKS))]
    if not set(OUR_CHOICES) & set(arguments) or others:
        raise ValueError(
            f"takes {' or '.join(OUR_CHOICES)}, further --swap- flags and {MLP_CHUNKS}; "
            f"given: {shlex.join(arguments)}. Add recomputation as a separate part: ' + full-recompute'."
        )
    for word in filter(budgets.is_relative, arguments):
        budgets.check(word)


def parse_method(where: str, name: str, text: str, words: Sequence[str], *, on_gpu: bool) -> Method:
    num_layers = number(where, words, "--num-layers")
    has_te = value_of(where, words, "--transformer-impl") == "transformer_engine"
    parts = [shlex.split(part) or [""] for part in text.split(" + ")]
    names = [part[0] for part in parts]
    pieces = []
    try:
        for kind_name, *arguments in parts:
            if kind_name not in KINDS:
                raise ValueError(f"is no kind of method; known: {', '.join(KINDS)}")
            kind = KINDS[kind_name]
            if kind.needs_te and not has_te:
                raise ValueError("needs --transformer-impl transformer_engine")
            if kind.needs_gpu and not on_gpu:
                raise ValueError("needs a GPU (device = 'gpu' in the suite)")
            if kind_name == "ours":
                _check_ours(arguments)
            pieces.append(kind.build(arguments, num_layers))
    except ValueError as error:
        raise SuiteError(f"{where}: method {name!r}: {kind_name} {error}") from error
    wraps = [piece.wrap for piece in pieces if piece.wrap]
    if len(set(names)) != len(names) or len(wraps) > 1 or ("none" in names and len(names) > 1):
        raise SuiteError(f"{where}: method {name!r}: {' + '.join(names)} cannot be combined")
    piece = Piece(
        tuple(flag for piece in pieces for flag in piece.flags),
        {variable: value for piece in pieces for variable, value in piece.env.items()},
        wraps[0] if wraps else None,
        tuple(package for piece in pieces for package in piece.requires),
    )
    what = " ".join(KINDS[kind].what for kind in names)
    return Method(name, text, what, piece, is_ours="ours" in names, runs_layers_once=names == ["none"])
