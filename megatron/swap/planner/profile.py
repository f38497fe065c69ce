"""Profiles: the measured or estimated training step of one pipeline rank, from which a plan is made.

Times are the compute stream's, without swapping. Times within a layer count from the start of its forward or backward.
Sizes are those of whole storages. A storage has the name of the site that saves it first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron.swap.common import records
from megatron.swap.common.plan import Model
from megatron.swap.common.site_paths import CHECKPOINT_PATH, SOURCE_PATH
from megatron.swap.common.types import GIB, MIB, MOST, UsageError

FORMAT = "megatron-swap profile"
VERSION = 1

# Upper bound of the allocator's fragmentation, in multiples of the largest tensor. One H200: up to 2.0
# (docs/dev/log.md).
MAX_FRAGMENTS = 2.25
# Fragmentation in bytes for each weight that has copies, expected and at most, unless the largest tensor gives more.
# One H200: 0.4 in a model whose largest tensor is small (docs/dev/fp8.md). Gaps of offloaded optimizer state come on
# top.
HOLES, MOST_HOLES = 0.3, 0.5
BUCKET_BYTES = 256 << 20  # of offloaded state on the device; copies of this size reach the link's full speed
# Device memory of the buckets in the optimizer's step (optimizer/stepper.py), when no activations are held.
BUCKETS_GIB = 3 * BUCKET_BYTES / GIB
# Fragmentation by buckets that are allocated and freed among activations. 1.1 GiB were measured: an 8B model reserved
# 133.8 GiB without such buckets and 134.9 GiB with them.
GAPS_GIB = 5 * BUCKET_BYTES / GIB
# Fractions of `Profile.reserve_gib` to leave free, tried in order until a plan fits. A run that plans itself notices if
# less than the whole reserve is too little.
RESERVE_FRACTIONS = (1.0, 2 / 3, 1 / 3)
MS_PER_MIB = 2**20 / 1e6  # ms to copy one MiB at 1 GB/s


@dataclass(frozen=True)
class Device:
    name: str
    memory_gib: float  # that a process can use


@dataclass(frozen=True)
class Link:
    """Copy speeds in each direction, alone and beside the other direction, while all ranks of the host copy."""

    d2h_gb_s: float
    h2d_gb_s: float
    d2h_beside_h2d_gb_s: float
    h2d_beside_d2h_gb_s: float

    def __post_init__(self) -> None:
        for name, speed in vars(self).items():
            if not 0 < speed <= MOST:
                raise UsageError(f"{name}: {speed} is given; a link's speed must be above 0 GB/s, at most {MOST:g}.")


@dataclass(frozen=True)
class OffloadedState:
    """Optimizer state on this rank, if the planner decides how much is offloaded to host memory and disk."""

    state_gib: float  # of the whole state
    fraction: float = field(metadata={"key": "share"})  # offloaded during profiling, 0 to 1; the maximum
    update_ms: float  # of the optimizer's kernels for the whole state, beside copies; 0 if unknown
    # Offloaded state of parameters whose state was on disk. A smaller fraction keeps this part on the device first.
    disk_gib: float = 0.0
    disk_ms: float = 0.0  # to read and write disk_gib in a step
    is_fixed: bool = field(metadata={"key": "fixed"}, default=False)  # no other fraction is tried
    # State that is copied to the device once more behind a step, if offloaded: main values of parameters in 8 bits
    # (--fp8-param-gather).
    requantized_gib: float = 0.0

    def __post_init__(self) -> None:
        sizes = (self.state_gib, self.update_ms, self.disk_gib, self.disk_ms, self.requantized_gib)
        if min(sizes) < 0 or not 0 <= self.fraction <= 1:
            raise UsageError(f"resting: {records.to_json(self)} is given; share must be 0 to 1, all others 0 or more.")

    def with_fraction(self, fraction: float) -> OffloadedState:
        """Return the state as if ``fraction`` was offloaded. A smaller fraction leaves less on disk."""
        left_gib = max(0.0, self.disk_gib - (self.fraction - fraction) * self.state_gib)
        disk_ms = self.disk_ms * left_gib / self.disk_gib if self.disk_gib else 0.0
        return replace(self, fraction=fraction, disk_gib=left_gib, disk_ms=disk_ms)


@dataclass(frozen=True)
class NonLayerSite:
    """A storage that autograd saves outside the layers. It is always kept."""

    site: str  # path/ordinal; outside submodules the path is "model" before the layers and "loss" after them
    mib: float
    idle_ms: float  # from its save to its first use in backward
    # Why it cannot be offloaded. "held": other references exist (the model's frames, the batch), at least until forward
    # ends. "small": below the minimum size.
    ineligible: Literal["held", "small"] | None = field(metadata={"key": "stays"}, default=None)


@dataclass(frozen=True)
class NonLayer:
    """The part of a step outside the layers."""

    forward_ms: float  # embedding, final norm, logits and loss of one micro-batch
    backward_ms: float  # of the same
    optimizer_ms: float  # the rest of the step
    kept_gib: float  # storages saved outside layers, from a micro-batch's forward to its backward
    peak_gib: float  # peak around the loss, saved or not, beyond the memory of the layers
    sites: tuple[NonLayerSite, ...] = ()  # for people; the planner uses kept_gib


@dataclass(frozen=True)
class Pipeline:
    size: int = 1
    rank: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()  # layers of each virtual stage, in model order


def is_unsaved(site: str) -> bool:
    """Whether ``site`` names a storage that autograd does not save, and that recomputation may read."""
    return site.startswith((f"{CHECKPOINT_PATH}/", f"{SOURCE_PATH}/"))


@dataclass(frozen=True)
class SiteProfile:
    site: str  # path/ordinal
    mib: float
    saved_at_ms: float  # in the layer's forward
    needed_at_ms: float  # first use in the layer's backward
    done_at_ms: float  # the layer's backward frees it
    recompute_ms: float | None = None  # None if it cannot be recomputed alone
    recompute_needs: tuple[str, ...] = ()  # sites that its recomputation reads
    gone_at_ms: float | None = None  # freed in forward if recomputed; None for the end of forward
    beside_mib: float | None = None  # peak of forward since the save before, beside saved tensors; None: LayerClass's
    # Offloading frees nothing or too little: it is small, or has other references (the first layer's input, say).
    is_ineligible: bool = field(metadata={"key": "stays"}, default=False)

    @property
    def is_unsaved(self) -> bool:
        """Whether only recomputation reads it. A layer holds it if a section that needs it is recomputed."""
        return is_unsaved(self.site)


@dataclass(frozen=True)
class Section:
    """A part of a layer that can be recomputed as a whole, when backward needs the first of ``frees``."""

    name: str
    frees: tuple[str, ...]  # sites that it recomputes
    needs: tuple[str, ...]  # sites that it reads
    recompute_ms: float
    peak_mib: float = 0.0  # while it runs, without frees


@dataclass(frozen=True)
class LayerClass:
    """Layers with equal sites, sizes and times."""

    layers: tuple[int, ...]  # 0-based over the whole model
    forward_ms: float
    backward_ms: float
    sites: tuple[SiteProfile, ...]  # in the order of forward
    sections: tuple[Section, ...] = ()  # nested in each other or disjoint
    temporaries: tuple[tuple[float, float], ...] = ()  # (at_ms, mib) in backward beside saved tensors, from at_ms on
    forward_peak_mib: float = 0.0  # beside saved tensors; behind the last save, if sites say the rest
    host_ms: float = 0.0  # the host's time in forward without hooks; 0 if unknown, or if the device does not wait
    # Gradients of weights that the step's first backward makes and leaves. 0 if they have memory throughout, or a
    # buffer of another owner.
    made_mib: float = 0.0

    def __post_init__(self) -> None:
        names = [site.site for site in self.sites]
        here = f"layers {self.layers[0] if self.layers else '(none)'}…"
        if not self.layers or len(set(names)) != len(names):
            raise UsageError(f"{here}: a class needs at least one layer, and each site once; given are {names}.")
        for site in self.sites:
            in_order = 0 <= site.needed_at_ms <= site.done_at_ms and site.saved_at_ms >= 0 and site.mib >= 0
            if not in_order or (site.recompute_ms or 0) < 0:
                raise UsageError(f"{here} {site.site}: sizes and times must be 0 or more, done_at_ms at least "
                                 f"needed_at_ms; given are {site}.")  # fmt: skip
            if unknown := set(site.recompute_needs) - set(names):
                raise UsageError(f"{here} {site.site}: {sorted(unknown)} in recompute_needs are not sites; there are "
                                 f"{names}.")  # fmt: skip
        for section in self.sections:
            unknown = {*section.frees, *section.needs} - set(names)
            if unknown:
                raise UsageError(f"{here} section {section.name}: {sorted(unknown)} are not sites; there are {names}.")
            for other in self.sections:
                mine, theirs = set(section.frees), set(other.frees)
                if mine & theirs and not (mine <= theirs or theirs <= mine):
                    raise UsageError(f"{here}: sections {section.name} and {other.name} overlap; sections must be "
                                     "nested in each other or disjoint.")  # fmt: skip

    @property
    def saved_mib(self) -> float:
        """MiB that one layer saves, without recomputation."""
        return sum(site.mib for site in self.sites if not site.is_unsaved)


@dataclass(frozen=True)
class ModelFigures:
    """Figures of a plan's memory that follow from the model alone. A model of unknown kind has none."""

    # Weights of a layer with copies of another type, over all tensor-parallel ranks. A layer's experts count as one.
    copied_weights: float = 0.0
    uncopied_layers: tuple[int, ...] = ()  # layers whose weights have no copies
    max_fragments: float = MAX_FRAGMENTS  # upper bound, in multiples of the largest tensor
    # Sites, and the largest block that a backward which reads the site allocates, in multiples of the site's size.
    blocks: tuple[tuple[str, float], ...] = ()
    # Paths of a submodule that runs once for each part of the sequence, and of the submodule before.
    in_parts: tuple[str, str] = ("", "")
    num_parts: int = 1  # of the sequence


UNKNOWN = ModelFigures()


@dataclass(frozen=True)
class Profile:
    """The training step of one pipeline rank."""

    source: str  # origin of the figures, for people
    model: Model
    device: Device
    link: Link
    static_gib: float  # throughout the step: weights, gradients, optimizer state
    # Memory that the allocator reserved beyond the peak in use during profiling. 0 without an allocator that reserves.
    # None if not measured: then no run corrects the plan.
    allocator_gib: float | None
    host_gib: float | None  # host memory for this rank's activations; None without limit
    num_micro_batches: int
    non_layer: NonLayer = field(metadata={"key": "outside"})
    layers: tuple[LayerClass, ...]
    pipeline: Pipeline = Pipeline()
    # None if the planner does not decide how much optimizer state is offloaded.
    offloaded_state: OffloadedState | None = field(metadata={"key": "resting"}, default=None)
    # Time that forward and backward each take longer in a layer that swaps or recomputes, beyond copies and
    # recomputation. The chosen plan took it beyond its prediction: the device waited for the host. 0 if little or
    # unknown.
    hook_ms: float = 0.0
    # Peak between a step's last backward and the next first forward, beside static_gib: gradients that the optimizer
    # copies in single precision, buckets of offloaded state. Without layers the peak of the whole step.
    optimizer_gib: float = 0.0
    # Of the model. Files do not hold them: forecast.profiles.load_profile makes them.
    figures: ModelFigures = field(metadata={"key": None}, default=UNKNOWN)

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1 or (self.allocator_gib or 0.0) < 0:
            raise UsageError(f"num_micro_batches {self.num_micro_batches} must be at least 1, and allocator_gib "
                             f"{self.allocator_gib} at least 0.")  # fmt: skip
        here = [layer for entry in self.layers for layer in entry.layers]
        if len(set(here)) != len(here):
            raise UsageError("layers: a layer is in two classes; each may be in one.")
        if self.pipeline.chunks and sorted(layer for chunk in self.pipeline.chunks for layer in chunk) != sorted(here):
            raise UsageError(f"pipeline: chunks: must hold the layers of this rank, {sorted(here)}, each once.")
        if not 0 <= self.pipeline.rank < self.pipeline.size:
            raise UsageError(f"pipeline: rank {self.pipeline.rank} of {self.pipeline.size}: must be 0 to size - 1.")
        if self.pipeline.size > 1 and len(self.pipeline.chunks) > 1 and self.num_micro_batches % self.pipeline.size:
            raise UsageError(
                f"micro-batches a step: {self.num_micro_batches} is given; with virtual pipeline stages it must be a "
                f"multiple of the {self.pipeline.size} stages. Set --global-batch-size to a multiple of "
                f"{self.pipeline.size} x --micro-batch-size x data-parallel replicas. Megatron's other groups of "
                "micro-batches are not planned."
            )

    @property
    def fragments_gib(self) -> float:
        """Fragmentation that is expected under any plan."""
        # A plan that swaps has `attention_block_gib` if larger, unless only inputs of whole recomputed layers come
        # back.
        gaps_gib = GAPS_GIB if self.offloaded_state is not None and self.offloaded_state.fraction else 0.0
        return self._holes_gib + gaps_gib if self._has_allocator else 0.0

    @property
    def attention_block_gib(self) -> float:
        """The largest block of attention's backward, for which the allocator takes new memory."""
        # Reloaded tensors lie in memory that others have freed, so no free piece is as large. One H200 held 3.5, 3.7,
        # 1.5 and 2.1 GiB more than was in use, with blocks of 4, 4, 2 and 2; without swapping 0.7, with a block of 4
        # (docs/results: h200-plan-points.json, h200-attention.json).
        sites = (site for entry in self.layers for site in entry.sites if self._has_allocator)
        of_site = dict(self.figures.blocks)
        blocks = (of_site.get(site.site, 0.0) * site.mib for site in sites)
        return max(blocks, default=0.0) * MIB / GIB

    @property
    def reserve_gib(self) -> float:
        """Fragmentation to leave free, beyond the expected: some plans have more."""
        more_gib = max(0.0, self.attention_block_gib - self.fragments_gib)  # expected where something is swapped
        reserve_gib = self._reserve_gib - more_gib
        return max(reserve_gib, self.attention_block_gib / 8) if more_gib else reserve_gib

    @property
    def _reserve_gib(self) -> float:
        most = MAX_FRAGMENTS if self.allocator_gib is None else self.figures.max_fragments
        most_gib = max(most * self._largest_gib, MOST_HOLES * self._copied_weights / GIB)
        if self.allocator_gib is None:
            gaps_gib = self.fragments_gib - self._holes_gib
            return most_gib - self._holes_gib + (MAX_FRAGMENTS - 1) * gaps_gib
        expected_gib = self._holes_gib if self._has_allocator else 0.0
        return max(most_gib - expected_gib, expected_gib / 2) if expected_gib else 0.0

    @property
    def reserves_gib(self) -> tuple[float, ...]:
        """The memory to leave free, tried in order until a plan fits. Without a measurement only the whole reserve."""
        fractions = RESERVE_FRACTIONS[:1] if self.allocator_gib is None else RESERVE_FRACTIONS
        return tuple(fraction * self.reserve_gib for fraction in fractions)

    @property
    def loss_block_gib(self) -> float:
        """The largest tensor around the loss, mostly the logits. 0 in a measured profile: its fragmentation has it."""
        if self.allocator_gib is not None:
            return 0.0
        return max((site.mib for site in self.non_layer.sites), default=0.0) * MIB / GIB

    @property
    def _has_allocator(self) -> bool:
        return self.allocator_gib is None or self.allocator_gib > 0

    @property
    def _holes_gib(self) -> float:
        if self.allocator_gib is None:
            return max(HOLES * self._copied_weights / GIB, self._largest_gib)
        return max(self.allocator_gib, self._largest_gib)

    @property
    def _copied_weights(self) -> float:
        here = {layer for entry in self.layers for layer in entry.layers}
        return self.figures.copied_weights * len(here - set(self.figures.uncopied_layers)) / self.model.tensor_parallel

    @property
    def _largest_gib(self) -> float:
        """The largest tensor that a layer saves, or a fifth of its measured temporaries if larger."""
        saved = (site.mib for entry in self.layers for site in entry.sites)
        # The workspace of deterministic attention is larger than every saved tensor.
        besides = (mib / 5 for entry in self.layers for _, mib in entry.temporaries if self.allocator_gib is not None)
        return max((*saved, *besides), default=0.0) * MIB / GIB

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each virtual stage of this rank."""
        return self.pipeline.chunks or (tuple(sorted(layer for entry in self.layers for layer in entry.layers)),)

    @property
    def saved_mib(self) -> float:
        """MiB that one micro-batch saves in all layers."""
        return sum(len(entry.layers) * entry.saved_mib for entry in self.layers)

    @property
    def has_loss(self) -> bool:
        """Whether the last chunk of this rank ends in the loss."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def out_ms_per_mib(self) -> float:
        """Time to offload one MiB."""
        # In a pipeline forward and backward alternate, so both directions of the link are busy.
        link = self.link
        return MS_PER_MIB / (link.d2h_gb_s if self.pipeline.size == 1 else link.d2h_beside_h2d_gb_s)

    @property
    def in_ms_per_mib(self) -> float:
        """Time to reload one MiB."""
        link = self.link
        return MS_PER_MIB / (link.h2d_gb_s if self.pipeline.size == 1 else link.h2d_beside_d2h_gb_s)

    def of_layer(self, layer: int) -> LayerClass:
        return next(entry for entry in self.layers if layer in entry.layers)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile. ``forecast.profiles.load_profile`` returns an equal one."""
    records.save(profile, path, FORMAT, VERSION)


def sha256(profile: Profile) -> str:
    """Return the hash by which a plan names its profile. ``hook_ms`` does not count: it comes after the plan."""
    return hashlib.sha256(records.to_text(replace(profile, hook_ms=0.0), FORMAT, VERSION).encode()).hexdigest()
