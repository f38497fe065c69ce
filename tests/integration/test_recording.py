"""Profiles recorded by the real trainer: equal under any policy, and plans made from them match their predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.swap.common.plan import Plan, save_plan
from megatron.swap.common.types import GIB, MIB, PRODUCERS, QUANTIZED, RESIDUAL, Action
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.planner.profile import LayerClass, Link, Profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan, smallest_budget, solve
from tests.integration.harness import ROOT, SWAP_SMALL, Run, Trainer, assert_same_training, recorded
from tests.integration.rows import ANGLES_BYTES, FUSED_LLAMA, MOE

SCRIPT = ROOT / "tests" / "integration" / "recording_script.py"
HOOKED = f"{SWAP_SMALL} --swap-layers all --swap-recompute {{}} {recorded('torch')}"
STEPS = "--train-iters 5"


def recorded_run(trainer: Trainer, flags: str, policy: str = "safe", ranks: int = 1) -> Run:
    without = {QUANTIZED, *([RESIDUAL] if "--hidden-dropout" in flags else [])}
    hooked = HOOKED.format(" ".join(kind for kind in PRODUCERS if kind not in without))
    return trainer.run(f"{flags} {STEPS} {hooked} --record-policy {policy}", program=SCRIPT, ranks=ranks)


def planned_run(trainer: Trainer, flags: str, plan: Plan, path: Path) -> Run:
    save_plan(plan, path)
    return trainer.live(f"{flags} {STEPS} {SWAP_SMALL} --swap-plan {path}")


def shape(profile: Profile) -> object:
    """Return a profile without times, recomputations and moments. Of the temporaries only the largest value is kept."""
    return [
        (
            entry.layers,
            [(one.site, one.mib, one.is_ineligible) for one in entry.sites],
            max((mib for _, mib in entry.temporaries), default=0.0),
            entry.forward_peak_mib,
        )
        for entry in profile.layers
    ], profile.non_layer.kept_gib, profile.non_layer.peak_gib, [(one.site, one.mib) for one in profile.non_layer.sites]


def recipes(entry: LayerClass) -> dict[str, tuple[str, ...]]:
    return {one.site: one.recompute_needs for one in entry.sites if one.recompute_ms is not None}


@pytest.mark.parametrize(
    ("flags", "ranks", "num_recipes"),
    [
        pytest.param("", 1, 6, id="gpt"),
        # Attention with dropout saves other tensors.
        pytest.param("--attention-dropout 0.1 --hidden-dropout 0.1 --bf16", 1, 3, id="bf16-dropout"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", 2, 6, id="pipeline"),
    ],
)
def test_the_profile_does_not_depend_on_the_policy(
    trainer: Trainer, flags: str, ranks: int, num_recipes: int
) -> None:
    plain = trainer.unswapped(f"{flags} {STEPS}", ranks=ranks, saved="torch")
    shapes = []
    for policy in ("keep", "swap", "safe"):
        run = recorded_run(trainer, flags, policy, ranks)
        assert_same_training(plain, run)
        profiles = [load_profile(run.directory / f"profile-{rank}.json") for rank in range(ranks)]
        shapes.append([shape(profile) for profile in profiles])
        for profile in profiles:
            first, *_ = profile.chunks[0]
            assert profile.of_layer(first).sites[0].is_ineligible  # the schedule or the model holds it
            known = {len(recipes(entry)) for entry in profile.layers}
            assert known == {num_recipes if policy == "safe" else 0}
    assert shapes[1] == shapes[0]
    assert shapes[2] == shapes[0]


TOKENS, HIDDEN, VOCABULARY = 2 * 64, 64, 256


@pytest.mark.parametrize(
    ("flags", "ranks", "bytes_each"),
    [
        pytest.param("", 1, 4, id="gpt"),
        pytest.param("--hidden-dropout 0.1 --bf16", 1, 2, id="bf16-dropout"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8 --hidden-dropout 0.1", 2, 4, id="stages"),
    ],
)
def test_what_is_saved_outside_the_layers_has_a_name(
    trainer: Trainer, flags: str, ranks: int, bytes_each: int
) -> None:
    """The sizes follow from the model's shape. Their sum is what was held there, except for the batch's token
    numbers."""
    run = recorded_run(trainer, flags, ranks=ranks)
    assert_same_training(trainer.unswapped(f"{flags} {STEPS}", ranks=ranks, saved="torch"), run)
    hidden = TOKENS * HIDDEN * bytes_each
    tokens = {"embedding.word_embeddings/0": 8 * TOKENS}
    mask = {"embedding.embedding_dropout/0": hidden} if "dropout" in flags else {}  # on a CPU as wide as its input
    norm = {f"decoder.final_layernorm/{i}": size for i, size in enumerate((hidden, *2 * [TOKENS * bytes_each]))}
    # Cross entropy is in fp32; it saves softmax, a mask and the masked labels. Of 16-bit logits it saves
    # those, each token's maximum and sum, the labels and a mask.
    if bytes_each == 4:
        of_loss = [4 * TOKENS * VOCABULARY, TOKENS, 8 * TOKENS]
    else:
        of_loss = [2 * TOKENS * VOCABULARY, 4 * TOKENS, 4 * TOKENS, 8 * TOKENS, TOKENS]
    loss = {"output_layer/0": hidden, **{f"loss/{i}": size for i, size in enumerate(of_loss)}}
    for rank in range(ranks):
        non_layer = load_profile(run.directory / f"profile-{rank}.json").non_layer
        is_first, is_last = rank == 0, rank == ranks - 1
        expected = {**((tokens | mask) if is_first else {}), **((norm | loss) if is_last else {})}
        assert {one.site: one.mib * MIB for one in non_layer.sites} == expected
        batch_bytes = 8 * TOKENS if is_first else 0  # between steps the data loader may hold as much
        assert 0 <= sum(expected.values()) - non_layer.kept_gib * GIB <= batch_bytes
        held = {one.site for one in non_layer.sites if one.ineligible == "held"}
        assert held == {*(["output_layer/0"] if is_last else [])}  # by the model's own frames, while it has the logits
        idle = {one.site: one.idle_ms for one in non_layer.sites}
        if is_first and is_last:
            assert idle["embedding.word_embeddings/0"] > idle["decoder.final_layernorm/0"] > idle["loss/0"]


def test_what_is_made_from_what(trainer: Trainer) -> None:
    """Megatron's own layers save linear_qkv's output as the values' storage, and make the others from it."""
    profile = load_profile(recorded_run(trainer, FUSED_LLAMA).directory / "profile-0.json")
    for entry in profile.layers:
        core = "self_attention.core_attention"
        assert recipes(entry) == {
            "self_attention.linear_qkv/0": ("input_layernorm/0",),
            f"{core}/0": (f"{core}/2",),
            f"{core}/2": ("self_attention.linear_qkv/0",),
            "mlp.linear_fc1/0": ("pre_mlp_layernorm/0",),
            "mlp/0": ("mlp.linear_fc1/0",),
            "mlp.linear_fc2/0": ("mlp/0",),
        }
        # Keys of few heads are rotated in a copy that nobody saves. Neither is linear_proj's output.
        context = f"{core}/4"
        assert [(section.frees, section.needs) for section in entry.sections] == [
            ((f"{core}/1",), (f"{core}/2",)),
            (("pre_mlp_layernorm/0",), (context, "input_layernorm/0")),
        ]


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        pytest.param(FUSED_LLAMA, (0.85, 0.6, 0.45), id="llama"),
        pytest.param(f"{FUSED_LLAMA} --mlp-chunks-for-training 3", (0.6, 0.4), id="mlp-chunks"),
        pytest.param("", (0.6,), id="gpt"),
        pytest.param(f"{FUSED_LLAMA} --bf16 --attention-dropout 0.1 --hidden-dropout 0.1", (0.6,), id="bf16-dropout"),
    ],
)
def test_a_plan_made_from_a_recording_holds_what_was_predicted(
    trainer: Trainer, tmp_path: Path, flags: str, shares: tuple[float, ...]
) -> None:
    """The link is so slow that recomputation pays. Around the loss only a table that recomputations read differs.

    Of 16-bit logits Megatron saves a copy in single precision, and we themselves and two numbers for each token.
    """
    plain = trainer.unswapped(f"{flags} {STEPS}")
    profile = load_profile(recorded_run(trainer, flags).directory / "profile-0.json")
    profile = replace(profile, link=Link(0.05, 0.05, 0.05, 0.05))
    everything = simulate(profile, empty_plan(profile)).peak_gib
    less_bytes = (2 * VOCABULARY - 8) * TOKENS if "--bf16" in flags else 0
    assert 0 <= everything * GIB + less_bytes - plain.summary["saved_peak_bytes"] <= ANGLES_BYTES
    seen: set[Action] = set()
    for share in shares:
        solution = solve(profile, share * everything)
        run = planned_run(trainer, flags, solution.plan, tmp_path / f"{share}.json")
        assert_same_training(plain, run)
        assert run.summary["recompute_refused"] == []
        assert "--swap-plan: " not in run.output, run.tail
        measured, predicted = run.summary["saved_peak_bytes"], solution.prediction.peak_gib * GIB
        if solution.prediction.peak_at.startswith("at the loss"):
            assert predicted - measured <= ANGLES_BYTES
        # In forward what is recomputed counts until its layer ends; some of it is gone before.
        least = 0.97 if solution.prediction.peak_at.startswith("forward") else 0.99
        assert least * predicted <= measured <= predicted <= share * everything * GIB, solution.prediction.peak_at
        seen.update(action for layer in solution.plan.layers() for action in solution.plan.sites(layer).values())
    assert len(seen) > 1  # which of them: that depends on how fast this machine copies


def test_no_plan_holds_more_than_was_predicted(trainer: Trainer, tmp_path: Path) -> None:
    """Under the plan with the lowest peak, recomputed storages are freed a little earlier in forward than predicted."""
    plain = trainer.unswapped(f"{FUSED_LLAMA} {STEPS}")
    profile = load_profile(recorded_run(trainer, FUSED_LLAMA).directory / "profile-0.json")
    solution = solve(profile, smallest_budget(profile))
    run = planned_run(trainer, FUSED_LLAMA, solution.plan, tmp_path / "plan.json")
    assert_same_training(plain, run)
    measured = run.summary["saved_peak_bytes"]
    assert measured <= solution.prediction.peak_gib * GIB < 0.3 * plain.summary["saved_peak_bytes"]


@pytest.mark.parametrize("policy", ["keep", "safe"])
def test_experts_of_changing_size_are_planned_for_their_largest(trainer: Trainer, policy: str) -> None:
    profile = load_profile(recorded_run(trainer, MOE, policy).directory / "profile-0.json")
    peak = trainer.unswapped(f"{MOE} {STEPS}").summary["saved_peak_bytes"]
    assert [entry.layers for entry in profile.layers] == [(0,), tuple(range(1, 8))]
    assert peak <= simulate(profile, empty_plan(profile)).peak_gib * GIB
