"""Compares a run with its plan, and saves what the run did as a plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.swap.common.collectives import gather
from megatron.swap.common.plan import Model, save_plan
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB, Site
from megatron.swap.engine.decision import Decision
from megatron.swap.reporting.site_log import SiteLog, merged, plan_of_run, unlike_plan


class PlanRun:
    """Watches the decisions about saved tensors, as long as a comparison with a plan or a file needs them.

    ``describe`` returns the model that a saved plan is for. It is called at the end of training.
    """

    def __init__(self, settings: Settings, describe: Callable[[], Model]) -> None:
        self._settings = settings
        self._describe = describe
        self._log: SiteLog | None = SiteLog()
        self._num_steps = 0

    def note(self, site: Site, storage: torch.UntypedStorage, decision: Decision) -> None:
        """Note that autograd saved ``storage`` at ``site``, and the decision about it."""
        if self._log is not None:
            self._log.note(site, storage, decision)

    def step_ended(self) -> list[str]:
        """Return lines on differences between run and plan, after the first step alone."""
        self._num_steps += 1
        plan = self._settings.plan
        if self._num_steps > 1 or plan is None or self._log is None:
            return []
        lines = unlike_plan(plan, self._log.sites, int(self._settings.min_mib * MIB))
        if self._settings.save_plan is None:
            self._log = None
        return [f"--swap-plan: {line}" for line in lines]

    def save(self) -> list[str]:
        """Save the plan if the settings ask for it, and return a line if that fails. Call it on all ranks; rank 0
        writes.
        """
        if self._settings.save_plan is None or self._log is None:
            return []
        logs = gather(self._log.sites)
        if logs is None:
            return []
        try:
            save_plan(plan_of_run(self._describe(), merged(logs), self._settings.plan), self._settings.save_plan)
        except OSError as error:  # must not end the run: its last checkpoint is still to be written
            return [f"--swap-save-plan was not written: {error}"]
        return []
