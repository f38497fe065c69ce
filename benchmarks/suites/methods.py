"""The compared methods and the flags, environment and wrappers that each adds to a run.

A suite writes a method as parts joined by ` + `. Each part is a kind and its arguments: `ours --swap-layers all +
selective-recompute mlp`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.runner.planning import PLAN_FLAG, SEARCHES, plan_file, searches
from benchmarks.suites import budgets
from benchmarks.suites.toml_file import SuiteError, number, value_of

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts")
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
MLP_CHUNKS = "--mlp-chunks-for-training"
"""Megatron's flag that our plans use: each chunk is swapped by itself."""
OUR_CHOICES = ("--swap-layers", PLAN_FLAG, *SEARCHES, "--swap-policy", "--swap-optimizer", "--swap-loss-chunks")
"""A method of ours has at least one of these flags: they choose what is swapped or split."""
OPTIMIZER_WORDS = {"overlap": "--overlap-cpu-optimizer-d2h-h2d", "unpinned": "--no-pin-cpu-grads"}
"""Options of Megatron's optimizer offload. Pinned blocks are rounded up to powers of two; unpinned, larger models
fit."""


@dataclass(frozen=True)
class Piece:
    """Flags, environment, wrapper and packages that one part of a method adds to a run."""

    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    wrap: str | None = None
    """`module:function`, called with the built model chunks."""
    requires: tuple[str, ...] = ()
    """Packages that the method imports."""


@dataclass(frozen=True)
class Kind:
    """One way of saving memory."""

    what: str
    build: Callable[[list[str], int], Piece]
    """Called with the arguments and the model's number of layers."""
    needs_te: bool = False
    """The kind works only with TransformerEngine's layers."""
    needs_gpu: bool = False


@dataclass(frozen=True, eq=False)
class Method:
    """A method of a suite, for one case."""

    name: str
    text: str
    what: str
    piece: Piece
    is_ours: bool
    runs_layers_once: bool
    """The method neither recomputes nor swaps, so that forward and backward can be timed by hooks."""

    @property
    def searches(self) -> bool:
        """Return whether the run searches for its plan in its first steps."""
        return searches(self.piece.flags)

    @property
    def plan_file(self) -> str | None:
        """Return the path of the plan file that the run follows; ``None``: it follows none."""
        return plan_file(self.piece.flags)


def _fixed(piece: Piece, arguments: list[str], num_layers: int) -> Piece:
    if arguments:
        raise ValueError(f"takes no arguments; given: {shlex.join(arguments)}")
    return piece


def _modules(allowed: tuple[str, ...], piece: Piece, arguments: list[str], num_layers: int) -> Piece:
    """Add module names to the flags of ``piece``."""
    if not arguments or set(arguments) - set(allowed):
        raise ValueError(f"takes modules out of {', '.join(allowed)}; given: {shlex.join(arguments) or 'none'}")
    return Piece((*piece.flags, *arguments), piece.env)


def _layer_offload(arguments: list[str], num_layers: int) -> Piece:
    numbers = {"all-but-one": num_layers - 1, "half": num_layers // 2}
    if len(arguments) != 1 or not (arguments[0].isdigit() or arguments[0] in numbers):
        raise ValueError(f"takes a number of layers, or {' or '.join(numbers)}; given: {arguments}")
    return Piece(("--cpu-offloading-num-layers", str(numbers.get(arguments[0], arguments[0]))))


def _optimizer_cpu_offload(arguments: list[str], num_layers: int) -> Piece:
    """Build Megatron's optimizer offload, without data loader workers.

    Workers are forked after Megatron's optimizer is built. Host memory that they share with the optimizer stays in use
    when the optimizer frees it or writes to it.
    """
    fraction, *words = arguments or [""]
    try:
        is_fraction = 0 < float(fraction) <= 1
    except ValueError:
        is_fraction = False
    if not is_fraction or set(words) - set(OPTIMIZER_WORDS) or len(set(words)) != len(words):
        raise ValueError(
            "takes a fraction of the optimizer state, above 0 and at most 1, and optionally the "
            f"words {', '.join(OPTIMIZER_WORDS)}; given: {shlex.join(arguments) or 'nothing'}"
        )
    more = (OPTIMIZER_WORDS[word] for word in words)
    return Piece(
        ("--optimizer-cpu-offload", "--optimizer-offload-fraction", fraction, *more, "--num-workers", "0")
    )


def _ours(arguments: list[str], num_layers: int) -> Piece:
    others = [word for word in arguments if word.startswith("--") and not word.startswith(("--swap-", MLP_CHUNKS))]
    if not set(OUR_CHOICES) & set(arguments) or others:
        raise ValueError(
            f"takes {' or '.join(OUR_CHOICES)}, further --swap- flags and {MLP_CHUNKS}; "
            f"given: {shlex.join(arguments)}. Add recomputation as a separate part: ' + full-recompute'."
        )
    for word in filter(budgets.is_relative, arguments):
        budgets.check(word)
    return Piece(tuple(arguments))


def _flags(*flags: str) -> Callable[[list[str], int], Piece]:
    return partial(_fixed, Piece(flags))


def _wrapped(name: str, *requires: str) -> Callable[[list[str], int], Piece]:
    """Return the builder of a method that wraps the model with a function of `baselines.py`."""
    return partial(_fixed, Piece(wrap=f"benchmarks.suites.baselines:{name}", requires=requires))


RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules")
OFFLOAD = ("--fine-grained-activation-offloading", "--offload-modules")
KINDS: dict[str, Kind] = {
    "none": Kind("Everything that backward needs stays on the device.", _flags()),
    "full-recompute": Kind(
        "Megatron keeps each layer's input and runs the layer again in backward.",
        _flags("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "selective-recompute": Kind(
        "Megatron runs the named modules again in backward.", partial(_modules, RECOMPUTE_MODULES, Piece(RECOMPUTE)),
    ),
    "fine-grained-offload": Kind(
        "Megatron's fine-grained activation offloading moves what the named modules save to pinned memory.",
        partial(_modules, OFFLOAD_MODULES, Piece(OFFLOAD, {"NVTE_CPU_OFFLOAD_V1": "1"})), needs_te=True,
    ),
    "layer-offload": Kind(
        "TransformerEngine's CPU offloading moves what whole layers save (Megatron's --cpu-offloading-num-layers).",
        _layer_offload, needs_te=True,
    ),
    "optimizer-cpu-offload": Kind(
        "Megatron's optimizer offload: a part of the parameters is stepped by the CPU.", _optimizer_cpu_offload,
    ),
    "unfused-gradients": Kind(
        "Linear layers compute a weight's gradient in 16 bits; Megatron adds it to main_grad.",
        _flags("--no-gradient-accumulation-fusion"),
    ),
    "save-on-cpu": Kind(
        "torch.autograd.graph.save_on_cpu(pin_memory=True) around the decoder: every saved tensor, synchronously.",
        _wrapped("save_on_cpu"),
    ),
    "torchtune-offload": Kind(
        "torchtune's OffloadActivations (pinned memory, streams) around the decoder.",
        _wrapped("torchtune_offload", "torchtune.training"), needs_gpu=True,
    ),
    "torchtune-offload-one-stream": Kind(
        "torchtune's OffloadActivations (pinned memory) around the decoder, without its copy stream.",
        _wrapped("torchtune_offload_one_stream", "torchtune.training"), needs_gpu=True,
    ),
    "deepspeed-checkpoint": Kind(
        "DeepSpeed's activation checkpointing of each layer, with checkpoint_in_cpu and without its engine.",
        _wrapped("deepspeed_checkpoint", "deepspeed"), needs_gpu=True,  # without one it frees the inputs it should keep
    ),
    "ours": Kind("Megatron Swap.", _ours),
}  # fmt: skip


def parse_method(where: str, name: str, text: str, words: Sequence[str], *, on_gpu: bool) -> Method:
    """Build the method that ``text`` describes, for the model of the flags ``words``.

    Raises:
        SuiteError: an unknown kind, wrong arguments, or a kind that the case or the machine does not support.
    """
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
