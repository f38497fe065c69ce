"""What was measured (or is estimated) of a training step of one pipeline rank: all that a plan is made from.

Times are those of the compute stream without any swapping, offsets inside a layer count from the start of its forward
or backward. Sizes are those of whole storages, each named by the site that saves it first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron.swap.common import records
from megatron.swap.common.plan import Model
from megatron.swap.common.types import GIB, MIB, MOST, UsageError
from megatron.swap.planner.states import GAPS_GIB

FORMAT = "megatron-swap profile"
VERSION = 1

MOST_FRAGMENTS = 2.25
"""Most that the allocator is taken to hold beyond what is in use, in largest tensors: on one H200 up to 2.0 were seen
(docs/log.md)."""

MS_PER_MIB = 2**20 / 1e6
"""Milliseconds that a MiB takes at 1 GB/s."""


@dataclass(frozen=True)
class Device:
    """The accelerator. ``memory_gib``: what a process may have of it."""

    name: str
    memory_gib: float


@dataclass(frozen=True)
class Link:
    """Speed of copies to host memory and back while *all* ranks of the host copy: one direction, and both at once."""

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
    """Optimizer state of which the planner decides how much is offloaded to host memory, and behind that to disk.

    Attributes:
        state_gib: all of it, on this rank.
        fraction: part of it, 0 to 1, that was offloaded when the profile was made. No more can be.
        update_ms: what the optimizer's own kernels take for all of it; copies run beside them. 0: not known.
        disk_gib: of what rested then, the state of parameters of which some was on disk: it is the first to stay.
        disk_ms: what reading and writing that takes in a step.
    """

    state_gib: float
    fraction: float = field(metadata={"key": "share"})
    update_ms: float
    disk_gib: float = 0.0
    disk_ms: float = 0.0

    def __post_init__(self) -> None:
        if min(self.state_gib, self.update_ms, self.disk_gib, self.disk_ms) < 0 or not 0 <= self.fraction <= 1:
            raise UsageError(f"resting: {records.to_json(self)} is given; share must be 0 to 1, all others 0 or more.")

    def with_fraction(self, fraction: float) -> OffloadedState:
        """Return the state as if ``fraction`` of it was offloaded: less of it is on disk, or none."""
        left_gib = max(0.0, self.disk_gib - (self.fraction - fraction) * self.state_gib)
        disk_ms = self.disk_ms * left_gib / self.disk_gib if self.disk_gib else 0.0
        return replace(self, fraction=fraction, disk_gib=left_gib, disk_ms=disk_ms)


@dataclass(frozen=True)
class NonLayerSite:
    """A storage that autograd saves outside the layers. It is kept.

    Attributes:
        site: ``path/ordinal``; in no submodule ``model/…`` before the layers, ``loss/…`` behind them.
        idle_ms: from when it is saved to its first use in backward.
        ineligible: why it is never offloaded. ``held``: others hold it until forward ends at least (the model's frames,
            the batch); ``small``.
    """

    site: str
    mib: float
    idle_ms: float
    ineligible: Literal["held", "small"] | None = field(metadata={"key": "stays"}, default=None)


@dataclass(frozen=True)
class NonLayer:
    """What is not in a layer.

    Attributes:
        forward_ms, backward_ms: embedding, final norm, logits, loss; of a micro-batch.
        optimizer_ms: the rest of the step, once.
        kept_gib: saved outside layers, from a micro-batch's forward to its backward.
        peak_gib: the most that is there around the loss (saved or not), above what the layers hold.
        sites: what is saved, by name; for people: plans are made with ``kept_gib``.
    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    kept_gib: float
    peak_gib: float
    sites: tuple[NonLayerSite, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """This rank's place. ``chunks``: the layers of each of its virtual stages, in the order of the model."""

    size: int = 1
    rank: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class SiteProfile:
    """A storage that autograd saves.

    Attributes:
        site: ``path/ordinal``.
        saved_at_ms: when, in the layer's forward.
        needed_at_ms: first use, in its backward.
        done_at_ms: when backward is through with it, so that its memory is free.
        recompute_ms: cost of making it again; ``None``: no recipe.
        recompute_needs: sites that the recipe reads.
        is_ineligible: others hold it (the first layer's input, say), so that offloading would not free it.
    """

    site: str
    mib: float
    saved_at_ms: float
    needed_at_ms: float
    done_at_ms: float
    recompute_ms: float | None = None
    recompute_needs: tuple[str, ...] = ()
    is_ineligible: bool = field(metadata={"key": "stays"}, default=False)


@dataclass(frozen=True)
class Section:
    """A part of a layer that can run again in backward as a whole, when the first of ``frees`` is needed.

    ``peak_mib``: the most that it holds meanwhile besides what it frees.
    """

    name: str
    frees: tuple[str, ...]
    needs: tuple[str, ...]
    recompute_ms: float
    peak_mib: float = 0.0


@dataclass(frozen=True)
class LayerClass:
    """Layers that are equal.

    Attributes:
        layers: their numbers, 0-based over the whole model.
        sites: in the order in which forward saves them.
        sections: nested in each other or disjoint.
        temporaries: ``(at_ms, mib)``: from that moment of backward on, so much is held besides saved tensors
            (gradients, workspaces).
        forward_peak_mib: the most that forward holds besides saved tensors.
    """

    layers: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    sites: tuple[SiteProfile, ...]
    sections: tuple[Section, ...] = ()
    temporaries: tuple[tuple[float, float], ...] = ()
    forward_peak_mib: float = 0.0

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
                raise UsageError(f"{here} {site.site}: {sorted(unknown)} in recompute_needs are no sites; there are "
                                 f"{names}.")  # fmt: skip
        for section in self.sections:
            unknown = {*section.frees, *section.needs} - set(names)
            if unknown:
                raise UsageError(f"{here} section {section.name}: {sorted(unknown)} are no sites; there are {names}.")
            for other in self.sections:
                mine, theirs = set(section.frees), set(other.frees)
                if mine & theirs and not (mine <= theirs or theirs <= mine):
                    raise UsageError(f"{here}: sections {section.name} and {other.name} overlap; sections must be "
                                     "nested in each other or disjoint.")  # fmt: skip

    @property
    def num_mib(self) -> float:
        """What one layer saves."""
        return sum(site.mib for site in self.sites)


@dataclass(frozen=True)
class Profile:
    """One pipeline rank's training step.

    Attributes:
        source: where the figures come from, for people.
        static_gib: weights, gradients, optimizer: what is held all the time.
        allocator_gib: what the allocator held beyond what was in use at the peak while this was measured; 0 where
            there was none.
        host_gib: host memory that this rank may book for activations; ``None``: as much as it needs.
        offloaded_state: ``None``: how much is offloaded is not the planner's to decide.
    """

    source: str
    model: Model
    device: Device
    link: Link
    static_gib: float
    allocator_gib: float
    host_gib: float | None
    num_micro_batches: int
    non_layer: NonLayer = field(metadata={"key": "outside"})
    layers: tuple[LayerClass, ...]
    pipeline: Pipeline = Pipeline()
    offloaded_state: OffloadedState | None = field(metadata={"key": "resting"}, default=None)

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1 or self.allocator_gib < 0:
            raise UsageError(f"num_micro_batches {self.num_micro_batches} must be at least 1, and allocator_gib "
                             f"{self.allocator_gib} at least 0.")  # fmt: skip
        here = [layer for entry in self.layers for layer in entry.layers]
        if len(set(here)) != len(here):
            raise UsageError("layers: a layer stands in two classes; each may stand in one.")
        if self.pipeline.chunks and sorted(layer for chunk in self.pipeline.chunks for layer in chunk) != sorted(here):
            raise UsageError(f"pipeline: chunks: must hold the layers of this rank, {sorted(here)}, each once.")
        if not 0 <= self.pipeline.rank < self.pipeline.size:
            raise UsageError(f"pipeline: rank {self.pipeline.rank} of {self.pipeline.size}: must be 0 to size - 1.")

    @property
    def fragments_gib(self) -> float:
        """What the allocator is expected to hold beyond what is in use under any plan: holes as large as the largest
        tensor, or what it held while it was measured; and what buckets of optimizer state leave between others."""
        gaps_gib = GAPS_GIB if self.offloaded_state is not None and self.offloaded_state.fraction else 0.0
        return self._holes_gib + gaps_gib if self.allocator_gib else 0.0

    @property
    def doubt_gib(self) -> float:
        """It may be so much more: fragments differ from plan to plan (``MOST_FRAGMENTS``)."""
        expected_gib = self._holes_gib if self.allocator_gib else 0.0
        return max(MOST_FRAGMENTS * self._largest_gib - expected_gib, expected_gib / 2) if expected_gib else 0.0

    @property
    def _holes_gib(self) -> float:
        return max(self.allocator_gib, self._largest_gib)

    @property
    def _largest_gib(self) -> float:
        """The largest tensor that a layer saves, or a fifth of what its backward takes besides: the workspace of
        deterministic attention is larger than any tensor."""
        saved = (site.mib for entry in self.layers for site in entry.sites)
        besides = (mib / 5 for entry in self.layers for _, mib in entry.temporaries)
        return max((*saved, *besides), default=0.0) * MIB / GIB

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each virtual stage."""
        return self.pipeline.chunks or (tuple(sorted(layer for entry in self.layers for layer in entry.layers)),)

    @property
    def num_mib(self) -> float:
        """What a micro-batch saves in all layers."""
        return sum(len(entry.layers) * entry.num_mib for entry in self.layers)

    @property
    def has_loss(self) -> bool:
        """Whether the last chunk of this rank ends in the loss."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def out_ms_per_mib(self) -> float:
        """Under a pipeline forward and backward alternate: both directions are busy."""
        link = self.link
        return MS_PER_MIB / (link.d2h_gb_s if self.pipeline.size == 1 else link.d2h_beside_h2d_gb_s)

    @property
    def in_ms_per_mib(self) -> float:
        link = self.link
        return MS_PER_MIB / (link.h2d_gb_s if self.pipeline.size == 1 else link.h2d_beside_d2h_gb_s)

    def of_layer(self, layer: int) -> LayerClass:
        """The class that ``layer`` stands in."""
        return next(entry for entry in self.layers if layer in entry.layers)


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        UsageError: file, key, what was given, what is allowed.
    """
    return records.load(Profile, path, FORMAT, VERSION)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile; ``load_profile`` gives an equal one back."""
    records.save(profile, path, FORMAT, VERSION)


def sha256(profile: Profile) -> str:
    """Names a profile: a plan says which one it was made from."""
    return hashlib.sha256(records.to_text(profile, FORMAT, VERSION).encode()).hexdigest()
