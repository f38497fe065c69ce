"""Writes the files of a run that plans itself: its plan, and a profile of each pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.swap.common.plan import Plan, save_plan
from megatron.swap.common.settings import Settings
from megatron.swap.planner.profile import Profile, save_profile


class PlanFiles:
    """Writes plan and profile where the settings ask for them. ``say`` takes a line about a file that cannot be
    written.
    """

    def __init__(self, settings: Settings, rank: int, stage: int, say: Callable[[str], None]) -> None:
        self._plan_path, self._profile_path = settings.save_plan, settings.save_profile
        self._rank, self._stage, self._say = rank, stage, say

    @property
    def flags(self) -> list[str]:
        """The flags that ask for a file."""
        paths = {"--swap-save-plan": self._plan_path, "--swap-save-profile": self._profile_path}
        return [flag for flag, path in paths.items() if path is not None]

    def save(self, plan: Plan | None, profile: Profile, leaders: dict[int, int]) -> None:
        """Write the whole model's plan (rank 0), and the profile of this rank's stage (``leaders[stage]``)."""
        if self._plan_path is not None and plan is not None and self._rank == 0:
            path = self._plan_path
            self._write("--swap-save-plan", lambda: save_plan(plan, path))
        if self._profile_path is not None and leaders[self._stage] == self._rank:
            target = Path(self._profile_path)
            if len(leaders) > 1:
                target = target.with_name(f"{target.stem}.stage-{self._stage}{target.suffix}")
            self._write("--swap-save-profile", lambda: save_profile(profile, target))

    def _write(self, flag: str, save: Callable[[], None]) -> None:
        try:
            save()
        except OSError as error:
            self._say(f"{flag} was not written: {error}")
