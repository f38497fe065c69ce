"""Profiles recorded by the real trainer: the same under any policy, and what is planned from them comes true."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.swap.plan import save_plan
from megatron.swap.planner.profile import Profile, load_profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan, solve
from megatron.swap.types import GIB
from tests.integration.harness import ROOT, SWAP_SMALL, Run, Trainer, assert_same_training, recorded
from tests.integration.test_training import MOE

SCRIPT = ROOT / "tests" / "integration" / "recording_script.py"
HOOKED = f"{SWAP_SMALL} --swap-layers all --swap-recompute norm activation {recorded('torch')}"
STEPS = "--train-iters 5"


def recorded_run(trainer: Trainer, flags: str, policy: str | Path, ranks: int = 1) -> Run:
    return trainer.run(f"{flags} {STEPS} {HOOKED} --record-policy {policy}", program=SCRIPT, ranks=ranks)


def shape(profile: Profile) -> object:
    """All of it but times, and when between two storages that are freed at once the level of temporaries is lower."""
    return [
        (
            entry.layers,
            [(one.site, one.mib, one.recompute_needs, one.recompute_ms is None, one.stays) for one in entry.sites],
            max((mib for _, mib in entry.temporaries), default=0.0),
            entry.forward_peak_mib,
        )
        for entry in profile.layers
    ], profile.outside.kept_gib, profile.outside.peak_gib, profile.static_gib


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("", 1, id="gpt"),
        pytest.param("--attention-dropout 0.1 --hidden-dropout 0.1 --bf16", 1, id="bf16-dropout"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", 2, id="pipeline"),
    ],
)
def test_the_profile_does_not_depend_on_the_policy(trainer: Trainer, flags: str, ranks: int) -> None:
    plain = trainer.unswapped(f"{flags} {STEPS}", ranks=ranks)
    shapes = []
    for policy in ("keep", "swap", "recompute"):
        run = recorded_run(trainer, flags, policy, ranks)
        assert_same_training(plain, run)
        profiles = [load_profile(run.directory / f"profile-{rank}.json") for rank in range(ranks)]
        shapes.append([shape(profile) for profile in profiles])
        for profile in profiles:
            first, *_ = profile.chunks[0]
            assert profile.of_layer(first).sites[0].stays  # the schedule or the model holds it
            assert sum(site.recompute_ms is not None for site in profile.of_layer(first).sites) == 3
    assert shapes[1] == shapes[0]
    assert shapes[2] == shapes[0]


def test_a_plan_made_from_a_recording_holds_what_was_predicted(trainer: Trainer, tmp_path: Path) -> None:
    """To the byte where the peak is at the loss; the observer does not see what is prefetched before it is used."""
    plain = trainer.unswapped(STEPS)
    profile = load_profile(recorded_run(trainer, "", "swap").directory / "profile-0.json")
    everything = simulate(profile, empty_plan(profile)).peak_gib
    assert everything * GIB == plain.summary["saved_peak_bytes"]
    for share in (0.9, 0.7, 0.4):
        solution = solve(profile, share * everything)
        save_plan(solution.plan, tmp_path / f"{share}.json")
        run = recorded_run(trainer, "", tmp_path / f"{share}.json")
        assert_same_training(plain, run)
        measured, predicted = run.summary["saved_peak_bytes"], solution.prediction.peak_gib * GIB
        if solution.prediction.peak_at.startswith("at the loss"):
            assert measured == predicted
        assert 0.97 * predicted <= measured <= predicted <= share * everything * GIB


def test_experts_of_changing_size_are_planned_for_their_largest(trainer: Trainer) -> None:
    profile = load_profile(recorded_run(trainer, MOE, "keep").directory / "profile-0.json")
    peak = trainer.unswapped(f"{MOE} {STEPS}").summary["saved_peak_bytes"]
    assert [entry.layers for entry in profile.layers] == [(0,), tuple(range(1, 8))]
    assert peak <= simulate(profile, empty_plan(profile)).peak_gib * GIB
