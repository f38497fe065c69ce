"""The compared methods and the flags, environment and wrappers that each adds to a run.

A suite writes a method as parts joined by ` + `. Each part is a kind and its arguments: `ours --swap-layers all +
selective-recompute mlp`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.runner.planning import PLAN_FLAG, SEARCHES, plan_file, searches
from benchmarks.suites import budgets

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts")
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
MLP_CHUNKS = "--mlp-chunks-for-training"
"""Megatron's flag that our plans use: each chunk is swapped by itself."""
OUR_CHOICES = ("--swap-layers", PLAN_FLAG, *SEARCHES, "--swap-policy", "--swap-optimizer", "--swap-loss-chunks")
"""A method of ours has at least one of these flags: they choose what is swapped or split."""
NUM_LAYERS_WORDS = ("all-but-one", "half")
OPTIMIZER_WORDS = {"overlap": "--overlap-cpu-optimizer-d2h-h2d", "unpinned": "--no-pin-cpu-grads"}
"""Options of Megatron's optimizer offload. Pinned blocks are rounded up to powers of two; unpinned, larger models
fit."""


class MethodError(ValueError):
    """A method cannot be built; the message names the given arguments and the allowed ones."""


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


def _nothing(arguments: list[str], num_layers: int) -> Piece:
    _refuse_arguments("none", arguments)
    return Piece()


def _full_recompute(arguments: list[str], num_layers: int) -> Piece:
    _refuse_arguments("full-recompute", arguments)
    segments = ("--recompute-method", "uniform", "--recompute-num-layers", "1")
    return Piece(flags=("--recompute-granularity", "full", *segments))


def _selective_recompute(arguments: list[str], num_layers: int) -> Piece:
    _check_choice("selective-recompute", arguments, RECOMPUTE_MODULES)
    return Piece(flags=("--recompute-granularity", "selective", "--recompute-modules", *arguments))


def _fine_grained_offload(arguments: list[str], num_layers: int) -> Piece:
    _check_choice("fine-grained-offload", arguments, OFFLOAD_MODULES)
    return Piece(
        flags=("--fine-grained-activation-offloading", "--offload-modules", *arguments),
        env={"NVTE_CPU_OFFLOAD_V1": "1"},
    )


def _layer_offload(arguments: list[str], num_layers: int) -> Piece:
    if len(arguments) != 1 or not (arguments[0].isdigit() or arguments[0] in NUM_LAYERS_WORDS):
        raise MethodError(
            f"layer-offload takes a number of layers, or {' or '.join(NUM_LAYERS_WORDS)}; given: {arguments}"
        )
    named = {"all-but-one": num_layers - 1, "half": num_layers // 2}
    number = named.get(arguments[0]) or int(arguments[0])
    return Piece(flags=("--cpu-offloading-num-layers", str(number)))


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
        raise MethodError(
            "optimizer-cpu-offload takes a fraction of the optimizer state, above 0 and at most 1, and optionally the "
            f"words {', '.join(OPTIMIZER_WORDS)}; given: {shlex.join(arguments) or 'nothing'}"
        )
    more = (OPTIMIZER_WORDS[word] for word in words)
    no_workers = ("--num-workers", "0")
    return Piece(flags=("--optimizer-cpu-offload", "--optimizer-offload-fraction", fraction, *more, *no_workers))


def _unfused_gradients(arguments: list[str], num_layers: int) -> Piece:
    _refuse_arguments("unfused-gradients", arguments)
    return Piece(flags=("--no-gradient-accumulation-fusion",))


def _wrapped(name: str, *requires: str) -> Callable[[list[str], int], Piece]:
    """Return the builder of a method that wraps the model with a function of `baselines.py`; it takes no arguments."""

    def build(arguments: list[str], num_layers: int) -> Piece:
        _refuse_arguments(name.replace("_", "-"), arguments)
        return Piece(wrap=f"benchmarks.suites.baselines:{name}", requires=requires)

    return build


def _ours(arguments: list[str], num_layers: int) -> Piece:
    others = [word for word in arguments if word.startswith("--") and not word.startswith(("--swap-", MLP_CHUNKS))]
    if not set(OUR_CHOICES) & set(arguments) or others:
        raise MethodError(
            f"ours takes {' or '.join(OUR_CHOICES)}, further --swap- flags and {MLP_CHUNKS}; "
            f"given: {shlex.join(arguments)}. Add recomputation as a separate part: ' + full-recompute'."
        )
    for word in filter(budgets.is_relative, arguments):
        try:
            budgets.check(word)
        except ValueError as error:
            raise MethodError(str(error)) from error
    return Piece(flags=tuple(arguments))


KINDS: dict[str, Kind] = {
    "none": Kind("Everything that backward needs stays on the device.", _nothing),
    "full-recompute": Kind("Megatron keeps each layer's input and runs the layer again in backward.", _full_recompute),
    "selective-recompute": Kind("Megatron runs the named modules again in backward.", _selective_recompute),
    "fine-grained-offload": Kind(
        "Megatron's fine-grained activation offloading moves what the named modules save to pinned memory.",
        _fine_grained_offload, needs_te=True,
    ),
    "layer-offload": Kind(
        "TransformerEngine's CPU offloading moves what whole layers save (Megatron's --cpu-offloading-num-layers).",
        _layer_offload, needs_te=True,
    ),
    "optimizer-cpu-offload": Kind(
        "Megatron's optimizer offload: a part of the parameters is stepped by the CPU.", _optimizer_cpu_offload,
    ),
    "unfused-gradients": Kind(
        "Linear layers compute a weight's gradient in 16 bits; Megatron adds it to main_grad.", _unfused_gradients,
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


def parse_method(name: str, text: str, *, num_layers: int, has_te: bool, on_gpu: bool) -> Method:
    """Build the method that ``text`` describes, for a model of ``num_layers`` layers.

    Raises:
        MethodError: an unknown kind, wrong arguments, or a kind that the case or the machine does not support.
    """
    kinds: list[str] = []
    what: list[str] = []
    flags: list[str] = []
    wraps: list[str] = []
    requires: list[str] = []
    env: dict[str, str] = {}
    for part in text.split(" + "):
        kind_name, *arguments = shlex.split(part) or [""]
        if kind_name not in KINDS:
            raise MethodError(f"method {name!r}: {kind_name!r} is no kind of method; known: {', '.join(KINDS)}")
        kind = KINDS[kind_name]
        if kind.needs_te and not has_te:
            raise MethodError(f"method {name!r}: {kind_name} needs --transformer-impl transformer_engine")
        if kind.needs_gpu and not on_gpu:
            raise MethodError(f"method {name!r}: {kind_name} needs a GPU (device = 'gpu' in the suite)")
        try:
            piece = kind.build(arguments, num_layers)
        except MethodError as error:
            raise MethodError(f"method {name!r}: {error}") from error
        kinds.append(kind_name)
        what.append(kind.what)
        flags += piece.flags
        env.update(piece.env)
        requires += piece.requires
        wraps += [piece.wrap] if piece.wrap else []
    if len(set(kinds)) != len(kinds) or len(wraps) > 1 or ("none" in kinds and len(kinds) > 1):
        raise MethodError(f"method {name!r}: {' + '.join(kinds)} cannot be combined")
    piece = Piece(tuple(flags), env, wraps[0] if wraps else None, tuple(requires))
    return Method(name, text, " ".join(what), piece, is_ours="ours" in kinds, runs_layers_once=kinds == ["none"])


def _refuse_arguments(kind: str, arguments: list[str]) -> None:
    if arguments:
        raise MethodError(f"{kind} takes no arguments; given: {shlex.join(arguments)}")


def _check_choice(kind: str, arguments: list[str], allowed: tuple[str, ...]) -> None:
    unknown = [word for word in arguments if word not in allowed]
    if unknown or not arguments:
        raise MethodError(f"{kind} takes modules out of {', '.join(allowed)}; given: {shlex.join(arguments) or 'none'}")
