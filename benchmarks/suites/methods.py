"""The methods that are compared: what each is, and what it adds to a run.

A suite writes a method as parts joined by ` + `, each a kind and its arguments: `ours --swap-layers all +
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
OUR_CHOICES = ("--swap-layers", PLAN_FLAG, *SEARCHES, "--swap-policy", "--swap-optimizer")
"""One of them says what is swapped."""
NUM_LAYERS_WORDS = ("all-but-one", "half")
OPTIMIZER_WORDS = {"overlap": "--overlap-cpu-optimizer-d2h-h2d", "unpinned": "--no-pin-cpu-grads"}
"""Of Megatron's optimizer offload. Pinned blocks are rounded up to powers of two: without, larger models fit."""


class MethodError(ValueError):
    """A method that cannot be built; the message names what was given and what is allowed."""


@dataclass(frozen=True)
class Piece:
    """What one part of a method adds to a run."""

    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    wrap: str | None = None
    """`module:function` that gets the built model chunks."""
    requires: tuple[str, ...] = ()
    """Packages that it imports."""


@dataclass(frozen=True)
class Kind:
    """One way of saving memory."""

    what: str
    build: Callable[[list[str], int], Piece]
    """From the arguments and the model's number of layers."""
    needs_te: bool = False
    """Only with TransformerEngine's layers."""
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
    """Neither recomputes nor moves anything: forward and backward can be timed by marks."""

    @property
    def searches(self) -> bool:
        """Its first steps look for a plan."""
        return searches(self.piece.flags)

    @property
    def plan_file(self) -> str | None:
        """The plan that it obeys."""
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
    """Without workers of the data loader: they are forked once Megatron's optimizer is built, and the memory that they
    share with it then stays in use when the optimizer gives it back or writes to it."""
    part, *words = arguments or [""]
    try:
        is_part = 0 < float(part) <= 1
    except ValueError:
        is_part = False
    if not is_part or set(words) - set(OPTIMIZER_WORDS) or len(set(words)) != len(words):
        raise MethodError(
            "optimizer-cpu-offload takes a part of the optimizer's state, above 0 and at most 1, and perhaps the words "
            f"{', '.join(OPTIMIZER_WORDS)}; given: {shlex.join(arguments) or 'nothing'}"
        )
    more = (OPTIMIZER_WORDS[word] for word in words)
    return Piece(flags=("--optimizer-cpu-offload", "--optimizer-offload-fraction", part, *more, "--num-workers", "0"))


def _wrapped(name: str, *requires: str) -> Callable[[list[str], int], Piece]:
    """Functions of `baselines.py` take no arguments."""

    def build(arguments: list[str], num_layers: int) -> Piece:
        _refuse_arguments(name.replace("_", "-"), arguments)
        return Piece(wrap=f"benchmarks.suites.baselines:{name}", requires=requires)

    return build


def _ours(arguments: list[str], num_layers: int) -> Piece:
    others = [word for word in arguments if word.startswith("--") and not word.startswith("--swap-")]
    if not set(OUR_CHOICES) & set(arguments) or others:
        raise MethodError(
            f"ours takes {' or '.join(OUR_CHOICES)} and further --swap- flags; given: {shlex.join(arguments)}. "
            "Recomputation is added as a part of its own: ' + full-recompute'."
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
        _wrapped("deepspeed_checkpoint", "deepspeed"), needs_gpu=True,  # without one it empties what it should keep
    ),
    "ours": Kind("Megatron Swap.", _ours),
}  # fmt: skip


def parse_method(name: str, text: str, *, num_layers: int, has_te: bool, on_gpu: bool) -> Method:
    """The method that ``text`` describes, for a model of ``num_layers`` layers.

    Raises:
        MethodError: an unknown kind, wrong arguments, or a kind that does not go with the case or the machine.
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
