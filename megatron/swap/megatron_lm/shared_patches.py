"""The patches that all models of ``install`` in one process share: an actor and a critic, for example."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from megatron.swap.common.settings import Settings
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.model_patches import ModelEvents, patches_of_model
from megatron.swap.patches import registry
from megatron.swap.patches.registry import AppliedPatches


class SharedPatches:
    """Applies the patches that the first model needs, adds those of further models, and reverts all with the last one.

    The patched functions call this object, which passes each call on to the model that it concerns. It keeps no model
    alive: a deleted model is forgotten.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[ModelEvents]] = []
        self._applied: list[AppliedPatches] = []

    @property
    def models(self) -> list[ModelEvents]:
        """The models that swap now."""
        return [model for reference in self._models if (model := reference()) is not None]

    def add(
        self, model: ModelEvents, facts: MegatronFacts, settings: Settings, kinds: Collection[str], *,
        patches_full: bool,
    ) -> AppliedPatches:  # fmt: skip
        """Apply patches that ``model`` needs and no other has applied, or raise a ``PatchError``. Return them."""
        patches = patches_of_model(facts, settings, kinds, self, patches_full=patches_full)
        there = {symbol for applied in self._applied for symbol in applied.symbols}
        applied = registry.apply(
            [patch for patch in patches.needs if patch.symbol not in there],
            [patch for patch in patches.optional if patch.symbol not in there],
        )
        self._models.append(weakref.ref(model, self._forget))
        self._applied.append(applied)
        return applied

    def remove(self, model: ModelEvents) -> None:
        """Forget ``model``. Patches stay until the last model is gone: a graph of another model may call them."""
        for reference in [one for one in self._models if one() is model]:
            self._forget(reference)

    def _forget(self, reference: weakref.ref[ModelEvents]) -> None:
        self._models.remove(reference)
        while self._applied and not self._models:
            self._applied.pop().revert()

    @contextmanager
    def around_checkpointed_forward(self, block: nn.Module) -> Iterator[None]:
        """Return the context for a block's forward with full recomputation."""
        with ExitStack() as contexts:
            for model in self.models:
                contexts.enter_context(model.around_checkpointed_forward(block))
            yield

    def recomputer(self) -> Recomputer | None:
        """Return the recomputer of the model whose layer runs now."""
        found = (model.recomputer() for model in self.models)
        return next((one for one in found if one is not None and one.is_recording), None)


SHARED = SharedPatches()  # Upstream's functions exist once a process, and so does this.
