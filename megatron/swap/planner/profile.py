"""Profiles: the measured or estimated training step of one pipeline rank, from which a plan is made.

Times are those of the compute stream without swapping. Times within a layer count from the start of its forward or
backward. Sizes are those of whole storages. A storage has the name of the site that saves it first.
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

MAX_FRAGMENTS = 2.25
"""Upper bound of the allocator's fragmentation, in multiples of the largest tensor. Up to 2.0 was measured on one H200
(docs/dev/history.md)."""
HOLES, MOST_HOLES = 0.3, 0.5
"""Fragmentation in bytes for each weight that has copies, expected and at most, unless the largest tensor says more.
One H200: 0.4 in a model whose largest tensor is small (docs/dev/fp8.md). Gaps of offloaded optimizer state are counted
besides."""
BUCKET_BYTES = 256 << 20
"""Size of a bucket of offloaded state on the device. Copies of this size reach the link's full speed."""
BUCKETS_GIB = 3 * BUCKET_BYTES / GIB
"""Device memory of the buckets during the optimizer step (``optimizer/stepper.py``), when no activations are held."""
GAPS_GIB = 5 * BUCKET_BYTES / GIB
"""Fragmentation by buckets that are allocated and freed among activations. 1.1 GiB were measured: an 8B model reserved
133.8 GiB without such buckets and 134.9 GiB with them."""
RESERVE_FRACTIONS = (1.0, 2 / 3, 1 / 3)
"""Fractions of ``Profile.reserve_gib`` to leave free, tried in order until a plan fits. A run that plans itself notices
if less than the whole is too little."""

MS_PER_MIB = 2**20 / 1e6
"""Time to copy one MiB at 1 GB/s, in ms."""


@dataclass(frozen=True)
class Device:
    """The accelerator. ``memory_gib``: device memory that a process can use."""

    name: str
    memory_gib: float


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
    """Optimizer state on this rank, if the planner decides how much of it is offloaded to host memory and disk.

    Attributes:
        state_gib: size of the whole state.
        fraction: fraction of the state, 0 to 1, that was offloaded during profiling. It is the maximum.
        is_fixed: the fraction is given, and no other is tried.
        update_ms: time of the optimizer's kernels for the whole state. Copies overlap with them. 0: not known.
        disk_gib: the part of the offloaded state whose parameters had state on disk. A smaller fraction keeps this part
            on the device first.
        disk_ms: time of reading and writing ``disk_gib`` in a step.
        requantized_gib: the part of the whole state that is copied to the device once more behind a step, if it is
            offloaded: main values of parameters in 8 bits (``--fp8-param-gather``).
    """

    state_gib: float
    fraction: float = field(metadata={"key": "share"})
    update_ms: float
    disk_gib: float = 0.0
    disk_ms: float = 0.0
    is_fixed: bool = field(metadata={"key": "fixed"}, default=False)
    requantized_gib: float = 0.0

    def __post_init__(self) -> None:
        sizes = (self.state_gib, self.update_ms, self.disk_gib, self.disk_ms, self.requantized_gib)
        if min(sizes) < 0 or not 0 <= self.fraction <= 1:
            raise UsageError(f"resting: {records.to_json(self)} is given; share must be 0 to 1, all others 0 or more.")

    def with_fraction(self, fraction: float) -> OffloadedState:
        """Return the state as if ``fraction`` of it was offloaded. A smaller fraction leaves less on disk."""
        left_gib = max(0.0, self.disk_gib - (self.fraction - fraction) * self.state_gib)
        disk_ms = self.disk_ms * left_gib / self.disk_gib if self.disk_gib else 0.0
        return replace(self, fraction=fraction, disk_gib=left_gib, disk_ms=disk_ms)


@dataclass(frozen=True)
class NonLayerSite:
    """A storage that autograd saves outside the layers. It is always kept.

    Attributes:
        site: ``path/ordinal``. Outside submodules the path is ``model`` before the layers and ``loss`` after them.
        idle_ms: time from its save to its first use in backward.
        ineligible: why it could not be offloaded. ``held``: there are other references (the model's frames, the batch)
            at least until forward ends. ``small``: it is below the minimum size.
    """

    site: str
    mib: float
    idle_ms: float
    ineligible: Literal["held", "small"] | None = field(metadata={"key": "stays"}, default=None)


@dataclass(frozen=True)
class NonLayer:
    """The part of a step outside the layers.

    Attributes:
        forward_ms, backward_ms: embedding, final norm, logits and loss of one micro-batch.
        optimizer_ms: the rest of the step.
        kept_gib: storages saved outside layers; they live from a micro-batch's forward to its backward.
        peak_gib: peak memory around the loss, saved or not, beyond what the layers hold.
        sites: the saved storages, for people. The planner uses ``kept_gib``.
    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    kept_gib: float
    peak_gib: float
    sites: tuple[NonLayerSite, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Position of the rank in the pipeline. ``chunks``: the layers of each of its virtual stages, in model order."""

    size: int = 1
    rank: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()


def is_unsaved(site: str) -> bool:
    """Whether ``site`` names a storage that autograd does not save, and that recomputation may read."""
    return site.startswith((f"{CHECKPOINT_PATH}/", f"{SOURCE_PATH}/"))


@dataclass(frozen=True)
class SiteProfile:
    """A storage that autograd saves in a layer.

    Attributes:
        site: ``path/ordinal``.
        saved_at_ms: time of its save, in the layer's forward.
        needed_at_ms: time of its first use, in the layer's backward.
        done_at_ms: time when the layer's backward frees it.
        recompute_ms: time to recompute it; ``None``: it cannot be recomputed alone.
        recompute_needs: sites that recomputing it reads.
        gone_at_ms: time in forward when it is freed if it is recomputed; ``None``: when forward ends.
        beside_mib: peak of forward since the save before, besides saved tensors; ``None``: as ``LayerClass`` says.
        is_ineligible: offloading it is not worth it or frees nothing, because it is small or there are other references
            (to the first layer's input, for example).
    """

    site: str
    mib: float
    saved_at_ms: float
    needed_at_ms: float
    done_at_ms: float
    recompute_ms: float | None = None
    recompute_needs: tuple[str, ...] = ()
    gone_at_ms: float | None = None
    beside_mib: float | None = None
    is_ineligible: bool = field(metadata={"key": "stays"}, default=False)

    @property
    def is_unsaved(self) -> bool:
        """Whether only recomputation reads it: it is held where a section that needs it is recomputed."""
        return is_unsaved(self.site)


@dataclass(frozen=True)
class Section:
    """A part of a layer that can be recomputed as a whole, when backward needs the first of ``frees``.

    Attributes:
        frees: sites that it recomputes.
        needs: sites that it reads.
        peak_mib: peak memory while it runs, without ``frees``.
    """

    name: str
    frees: tuple[str, ...]
    needs: tuple[str, ...]
    recompute_ms: float
    peak_mib: float = 0.0


@dataclass(frozen=True)
class LayerClass:
    """Layers with equal sites, sizes and times.

    Attributes:
        layers: layer numbers, 0-based over the whole model.
        sites: saved storages, in the order of forward.
        sections: parts that can be recomputed. They are nested in each other or disjoint.
        temporaries: ``(at_ms, mib)`` in backward: from ``at_ms`` on, ``mib`` are in use besides saved tensors
            (gradients, workspaces).
        forward_peak_mib: peak of forward besides saved tensors; behind the last save, if sites say the rest.
        host_ms: the host's time in forward without hooks; 0: it is not known, or the device does not wait for it.
        made_mib: gradients of weights that the step's first backward makes and leaves; 0: there is memory for them
            throughout, or a buffer that others own.
    """

    layers: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    sites: tuple[SiteProfile, ...]
    sections: tuple[Section, ...] = ()
    temporaries: tuple[tuple[float, float], ...] = ()
    forward_peak_mib: float = 0.0
    host_ms: float = 0.0
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
        """MiB that one layer saves, unless some of it is recomputed."""
        return sum(site.mib for site in self.sites if not site.is_unsaved)


@dataclass(frozen=True)
class ModelFigures:
    """Figures of a plan's memory that follow from the model alone; of a model of unknown kind, none.

    Attributes:
        copied_weights: weights of a layer that have copies of another type, over all tensor-parallel ranks. A layer's
            experts count as one.
        uncopied_layers: layers whose weights have none.
        max_fragments: upper bound of measured fragmentation, in multiples of the largest tensor.
        blocks: sites, and the largest block that the backward that reads one allocates, in multiples of its size.
        in_parts: path of a submodule that runs once for each part of the sequence, and path of the one before it.
        num_parts: of the sequence.
    """

    copied_weights: float = 0.0
    uncopied_layers: tuple[int, ...] = ()
    max_fragments: float = MAX_FRAGMENTS
    blocks: tuple[tuple[str, float], ...] = ()
    in_parts: tuple[str, str] = ("", "")
    num_parts: int = 1


UNKNOWN = ModelFigures()


@dataclass(frozen=True)
class Profile:
    """The training step of one pipeline rank.

    Attributes:
        source: where the figures come from, for people.
        static_gib: memory held throughout the step: weights, gradients, optimizer state.
        allocator_gib: memory that the allocator reserved beyond the peak in use during profiling; 0: there is no
            allocator that reserves memory; ``None``: it is not measured, and no run corrects the plan.
        host_gib: host memory that this rank may reserve for activations; ``None``: no limit.
        optimizer_gib: peak of memory between a step's last backward and the next step's first forward, besides
            ``static_gib``: gradients that the optimizer copies in single precision, buckets of offloaded state. Without
            layers: the peak of the whole step.
        offloaded_state: ``None``: the planner does not decide how much optimizer state is offloaded.
        hook_ms: time that forward and backward each take longer in a layer that swaps or recomputes, beyond copies and
            recomputation: the host's work, which shows where the device waits for the host. It is what the chosen plan
            took beyond its prediction. 0: that was little, or is not known.
        figures: of the model. Files do not hold them: ``forecast.profiles.load_profile`` knows them.
    """

    source: str
    model: Model
    device: Device
    link: Link
    static_gib: float
    allocator_gib: float | None
    host_gib: float | None
    num_micro_batches: int
    non_layer: NonLayer = field(metadata={"key": "outside"})
    layers: tuple[LayerClass, ...]
    pipeline: Pipeline = Pipeline()
    offloaded_state: OffloadedState | None = field(metadata={"key": "resting"}, default=None)
    hook_ms: float = 0.0
    optimizer_gib: float = 0.0
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
        """Fragmentation that is expected under any plan.

        It is the larger of the measured fragmentation (without a measurement: that of weights' copies) and the largest
        tensor, plus the gaps that buckets of offloaded optimizer state leave. A plan that swaps has
        ``attention_block_gib`` if that is more, unless only inputs of layers that run again as a whole come back.
        """
        gaps_gib = GAPS_GIB if self.offloaded_state is not None and self.offloaded_state.fraction else 0.0
        return self._holes_gib + gaps_gib if self._has_allocator else 0.0

    @property
    def attention_block_gib(self) -> float:
        """The largest block of attention's backward, for which the allocator takes new memory.

        Tensors that come back lie in the memory that others have freed, so that no free piece is as large. One H200
        held 3.5, 3.7, 1.5 and 2.1 GiB more than was in use, with blocks of 4, 4, 2 and 2; without swapping 0.7, with a
        block of 4 (docs/results: h200-plan-points.json, h200-attention.json).
        """
        sites = (site for entry in self.layers for site in entry.sites if self._has_allocator)
        of_site = dict(self.figures.blocks)
        blocks = (of_site.get(site.site, 0.0) * site.mib for site in sites)
        return max(blocks, default=0.0) * MIB / GIB

    @property
    def reserve_gib(self) -> float:
        """Fragmentation beyond what is expected that some plans may have, to be left free."""
        more_gib = max(0.0, self.attention_block_gib - self.fragments_gib)  # is expected where something is swapped
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
        """The memory to leave free, tried in order until a plan fits. Without a measurement it is the whole reserve."""
        fractions = RESERVE_FRACTIONS[:1] if self.allocator_gib is None else RESERVE_FRACTIONS
        return tuple(fraction * self.reserve_gib for fraction in fractions)

    @property
    def loss_block_gib(self) -> float:
        """The largest tensor around the loss, mostly the logits. A measured profile has it in its fragmentation: 0."""
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
        """Weights of this rank that have copies."""
        here = {layer for entry in self.layers for layer in entry.layers}
        return self.figures.copied_weights * len(here - set(self.figures.uncopied_layers)) / self.model.tensor_parallel

    @property
    def _largest_gib(self) -> float:
        """The largest tensor that a layer saves, or a fifth of its measured temporaries if that is larger.

        The workspace of deterministic attention is larger than every saved tensor.
        """
        saved = (site.mib for entry in self.layers for site in entry.sites)
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
        """Time to offload one MiB. In a pipeline forward and backward alternate, so both directions are busy."""
        link = self.link
        return MS_PER_MIB / (link.d2h_gb_s if self.pipeline.size == 1 else link.d2h_beside_h2d_gb_s)

    @property
    def in_ms_per_mib(self) -> float:
        """Time to reload one MiB."""
        link = self.link
        return MS_PER_MIB / (link.h2d_gb_s if self.pipeline.size == 1 else link.h2d_beside_d2h_gb_s)

    def of_layer(self, layer: int) -> LayerClass:
        """Return the class of ``layer``."""
        return next(entry for entry in self.layers if layer in entry.layers)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile. ``forecast.profiles.load_profile`` returns an equal one."""
    records.save(profile, path, FORMAT, VERSION)


def sha256(profile: Profile) -> str:
    """Return the hash by which a plan names its profile. ``hook_ms`` does not count: it is known after the plan."""
    return hashlib.sha256(records.to_text(replace(profile, hook_ms=0.0), FORMAT, VERSION).encode()).hexdigest()
