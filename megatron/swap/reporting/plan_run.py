"""A run beside its plan: what differs from the plan that it was given, and the plan that it leaves behind."""

from __future__ import annotations

import sys

import torch

from megatron.swap.common.collectives import gather
from megatron.swap.common.config import SwapConfig
from megatron.swap.common.plan import Model, save_plan
from megatron.swap.common.types import MIB, Site
from megatron.swap.engine.decision import Decision
from megatron.swap.reporting.site_log import SiteLog, merged, plan_of_run, unlike_plan


class PlanRun:
    """Watches what is done with saved tensors, as long as somebody wants to know.

    Args:
        config: the plan to compare with, and where to save one; at least one of the two.
        model: what a saved plan is for.
    """

    def __init__(self, config: SwapConfig, model: Model) -> None:
        self._config = config
        self._model = model
        self._log: SiteLog | None = SiteLog()
        self._num_steps = 0

    def note(self, site: Site, storage: torch.UntypedStorage, decision: Decision) -> None:
        """Autograd saved ``storage`` at ``site``, and this was done with it."""
        if self._log is not None:
            self._log.note(site, storage, decision)

    def step_ended(self) -> list[str]:
        """Lines to tell: after the first step where the run is not what the plan was made for, then none."""
        self._num_steps += 1
        plan = self._config.plan
        if self._num_steps > 1 or plan is None or self._log is None:
            return []
        lines = unlike_plan(plan, self._log.sites, int(self._config.min_mib * MIB))
        if self._config.save_plan is None:
            self._log = None
        return [f"--swap-plan: {line}" for line in lines]

    def save(self) -> None:
        """Training is over on all ranks: rank 0 writes what was done, where that was asked for."""
        if self._config.save_plan is None or self._log is None:
            return
        logs = gather(self._log.sites)
        if logs is None:
            return
        try:
            save_plan(plan_of_run(self._model, merged(logs), self._config.plan), self._config.save_plan)
        except OSError as error:  # the last checkpoint is still to come: it matters more
            print(f" swap: --swap-save-plan was not written: {error}", file=sys.stderr, flush=True)
