"""A plan: for every layer and site of one model, keep, swap or recompute. A file that people may read and edit."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal

from megatron.swap.common import records
from megatron.swap.common.layer_ranges import MOST_LAYERS, parse_ranges
from megatron.swap.common.types import MIB, MOST, Action, Site, UsageError

FORMAT = "megatron-swap plan"
VERSION = 1

ACTIONS = {"keep": Action.KEEP, "swap": Action.SWAP, "recompute": Action.RECOMPUTE}
SITE = re.compile(r"[^/\s]+/\d+")
LAYERS_SYNTAX = "layers and ranges, such as 0-9,12"
KEPT = "keep"
DROPPED = "recompute"
FP8_WEIGHTS = (KEPT, DROPPED)  # values of ``--swap-fp8-weights``
LAYER_SECTION = "layer"  # the section that is a whole layer, the only section that training can recompute


class Infeasible(UsageError):
    """Error: no plan fits."""

    def __init__(self, message: str, smallest_gib: float, fragments_gib: float = 0.0) -> None:
        super().__init__(message)
        self.smallest_gib = smallest_gib  # the smallest budget, in GiB, for which a plan was found, rounded up
        # How much of it allows for fragmentation as it was measured. The plan may need that much less.
        self.fragments_gib = fragments_gib


@dataclass(frozen=True)
class Model:
    """The model that a plan is for. It determines sites and sizes. Counts are those of the whole model."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    seq_length: int
    micro_batch_size: int
    padded_vocab_size: int
    transformer_impl: str
    dtype: str
    gated: bool  # whether the MLP's activation has a gate (SwiGLU), so that fc1 is twice as wide
    num_experts: int | None = None
    head_size: int | None = None  # None: hidden_size / num_attention_heads
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    num_virtual_stages: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    # Scaling of linear layers to FP8 (``tensorwise``, ``delayed``, ``blockwise`` …); None: no FP8.
    fp8_recipe: str | None = None
    bf16_layers: tuple[int, ...] = ()  # the layers without FP8, if others have it
    swap_fp8_weights: str = KEPT  # the flag of this name, one of ``FP8_WEIGHTS``
    mlp_chunks: int = 1  # ``--mlp-chunks-for-training``: chunks of the sequence in which a layer's MLP runs
    # Saved by the norm of such a chunk: 1 of RMSNorm, 2 of LayerNorm; None: no chunks.
    mlp_statistics: int | None = None
    flash_attention: bool = False  # TransformerEngine takes flash-attn (``--attention-backend flash``), not cuDNN

    @property
    def keeps_fp8_weights(self) -> bool:
        return self.swap_fp8_weights == KEPT

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = MOST_LAYERS if name == "num_layers" else MOST
            if type(value) is int and not 1 <= value <= most:
                raise UsageError(f"{name}: {value} is given; it must be at least 1 and at most {most:g}.")


@dataclass(frozen=True)
class SitePlan:
    action: Literal["keep", "swap", "recompute"]
    # Size, and the reason, for people.
    mib: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class PlanClass:
    layers: str  # layer numbers, 0-based over the whole model, such as ``0-9,12``
    sites: dict[str, SitePlan]  # actions by ``path/ordinal``. Other sites are kept.
    sections: tuple[str, ...] = ()  # recomputed in backward (``mlp``, ``layer``); their saved tensors are freed

    def __post_init__(self) -> None:
        self.numbers()
        for site in self.sites:
            if not SITE.fullmatch(site):
                raise UsageError(f"sites: {site!r} is not a site. Write path/ordinal, such as mlp.linear_fc1/0.")

    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(parse_ranges(self.layers, f"layers: {self.layers!r} is given", LAYERS_SYNTAX)))


@dataclass(frozen=True)
class Predicted:
    """Predictions of the cost model. ``lower_bound_ms``: no plan for this model and budget has a shorter step."""

    peak_gib: float
    step_ms: float
    lower_bound_ms: float | None
    host_gib: float


@dataclass(frozen=True)
class Plan:
    """The action for each site of each layer. Raises a ``UsageError`` if a layer is in two classes or out of range."""

    model: Model
    budget_gib: float | None
    profile_sha256: str | None
    predicted: Predicted | None
    classes: tuple[PlanClass, ...]
    prefetch_gib: float | None = None
    """Most that is prefetched ahead of its layer's backward; None: as much as the largest layer swaps."""
    offload_fraction: float | None = field(metadata={"key": "resting"}, default=None)
    """Fraction of the optimizer state that is offloaded; None: the plan does not set it."""
    file: str | None = field(metadata={"key": None}, default=None, compare=False)
    """The file that the plan was read from."""
    _class_of_layer: dict[int, PlanClass] = field(
        init=False, repr=False, compare=False, default_factory=dict, metadata={"key": None}
    )

    def __post_init__(self) -> None:
        if self.prefetch_gib is not None and not 0 < self.prefetch_gib < inf:
            raise UsageError(f"prefetch_gib: {self.prefetch_gib} is given; it must be above 0 and finite, or null.")
        if self.offload_fraction is not None and not 0 <= self.offload_fraction <= 1:
            raise UsageError(f"resting: {self.offload_fraction} is given; it must be 0 to 1, or null.")
        for entry in self.classes:
            for layer in entry.numbers():
                if layer >= self.model.num_layers:
                    raise UsageError(
                        f"classes: layers {entry.layers!r}: the model has {self.model.num_layers} layers, allowed are "
                        f"0 to {self.model.num_layers - 1}."
                    )
                if layer in self._class_of_layer:
                    raise UsageError(f"classes: layer {layer} is in {self._class_of_layer[layer].layers!r} and in "
                                     f"{entry.layers!r}; each layer may be in one class.")  # fmt: skip
                self._class_of_layer[layer] = entry

    def action(self, site: Site) -> Action:
        """Return the action for ``site``: KEEP if the plan does not name it, even if a section frees it."""
        planned = self.planned(site.layer).get(f"{site.path}/{site.ordinal}")
        return ACTIONS[planned.action] if planned else Action.KEEP

    def sites(self, layer: int) -> dict[str, Action]:
        """Return the actions of the sites that ``layer`` names, by ``path/ordinal``."""
        return {site: ACTIONS[planned.action] for site, planned in self.planned(layer).items()}

    def sections(self, layer: int) -> tuple[str, ...]:
        entry = self._class_of_layer.get(layer)
        return entry.sections if entry else ()

    def swaps_layer(self, layer: int) -> bool:
        return Action.SWAP in self.sites(layer).values()

    def recomputes_layer(self, layer: int) -> bool:
        return Action.RECOMPUTE in self.sites(layer).values()

    @property
    def keeps_all(self) -> bool:
        acts = (entry.sections or any(site.action != "keep" for site in entry.sites.values()) for entry in self.classes)
        return not any(acts)

    def least_host_bytes(self) -> int:
        """Return a lower bound of the host bytes that a micro-batch takes if a rank has all layers."""
        return sum(  # backward needs the last two layers so soon that they are kept
            int((planned.mib or 0) * MIB)
            for layer in range(self.model.num_layers - 2)
            for planned in self.planned(layer).values()
            if planned.action == "swap"
        )

    def planned(self, layer: int) -> dict[str, SitePlan]:
        """Return the plans of the sites that ``layer`` names, by ``path/ordinal``."""
        entry = self._class_of_layer.get(layer)
        return entry.sites if entry else {}

    def layers(self) -> tuple[int, ...]:
        """Return the layers that a class names, ascending."""
        return tuple(sorted(self._class_of_layer))


def merged(plans: Sequence[Plan]) -> Plan:
    """Merge plans for different layers of a model, such as pipeline stages. Predictions are the largest of all."""
    first = plans[0]
    if len(plans) == 1:
        return first
    hashes = [plan.profile_sha256 for plan in plans]
    together = hashlib.sha256("".join(map(str, hashes)).encode()).hexdigest()
    predictions = [plan.predicted for plan in plans if plan.predicted is not None]
    predicted = None
    if len(predictions) == len(plans):
        bounds = [one.lower_bound_ms for one in predictions if one.lower_bound_ms is not None]
        predicted = Predicted(
            max(one.peak_gib for one in predictions), max(one.step_ms for one in predictions),
            max(bounds, default=None), max(one.host_gib for one in predictions),
        )  # fmt: skip
    classes = tuple(entry for plan in plans for entry in plan.classes)
    sha256 = None if None in hashes else together
    parts = [plan.offload_fraction for plan in plans if plan.offload_fraction is not None]
    return Plan(first.model, first.budget_gib, sha256, predicted, classes, offload_fraction=max(parts, default=None))


def load_plan(path: str | Path) -> Plan:
    """Read a plan, or raise ``UsageError`` with the file, the key, the given value and the allowed values."""
    return dataclasses.replace(records.load(Plan, path, FORMAT, VERSION), file=str(path))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan. ``load_plan`` returns an equal one."""
    records.save(plan, path, FORMAT, VERSION)


def check_model(plan: Plan, model: Model, name: str = "the plan") -> None:
    """Raise ``UsageError`` with all differences if the plan was made for another model."""
    differences = [
        f"{item.name} is {_text(getattr(plan.model, item.name))} there, {_text(getattr(model, item.name))} here"
        for item in dataclasses.fields(Model)
        if getattr(plan.model, item.name) != getattr(model, item.name)
    ]
    if differences:
        raise UsageError(f"{name} was made for another model: {'; '.join(differences)}. Make a new plan for this one.")


def _text(value: object) -> str:
    return {"None": "not set", "True": "on", "False": "off"}.get(str(value), str(value))
