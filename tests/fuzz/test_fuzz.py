"""The first seeds of each kind, and proof that the fuzz finds planted defects and hangs."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.fuzz.__main__ import described
from tests.fuzz.pool import BAD, Pool
from tests.fuzz.records import Record, difference
from tests.fuzz.report import counts
from tests.integration.harness import Zygote
from tests.sizes import IS_SHORT, sized

TIMEOUT_S = 100.0


@pytest.mark.parametrize(("kind", "num_ranks", "num_cases", "least"), [
    ("megatron", 1, sized(6, 2, 32), {"reloaded activations": 0.5, "recomputed activations": 0.2,
                                       "had optimizer state in host memory": 0.1}),
    ("megatron", 2, sized(1, 1, 8), {"reloaded activations": 0.3}),
    ("modules", 1, sized(20, 12, 160), {"reloaded activations": 0.8, "copied and kept": 0.3, "reloaded late": 0.1}),
])  # fmt: skip
def test_random_models_are_equal_to_the_bit(
    zygote: Zygote, kind: str, num_ranks: int, num_cases: int, least: dict[str, float]
) -> None:
    """``least``: fractions of the cases that did so, so that the fuzz is not in vain."""
    with Pool(zygote, kind, num_ranks, TIMEOUT_S) as pool:
        rows = [pool.run(seed) for seed in range(num_cases)]
    bad = [described(row) for row in rows if row["outcome"] in BAD]
    assert not bad, "\n\n".join(bad)
    found = counts(rows)
    assert found["outcomes"]["equal"] > 0.6 * num_cases, found
    for what, fraction in least.items():
        num_least = fraction * found["outcomes"]["equal"]
        assert found["did"].get(what, 0) >= (int(num_least) if IS_SHORT else num_least), found


def test_layers_that_are_no_pure_functions_are_equal_or_end_the_run(zygote: Zygote) -> None:
    num_cases = sized(8, 3, 64)
    with Pool(zygote, "impure", 1, TIMEOUT_S) as pool:
        rows = [pool.run(seed) for seed in range(num_cases)]
    bad = [described(row) for row in rows if row["outcome"] not in ("equal", "refused")]
    assert not bad, "\n\n".join(bad)
    outcomes = Counter(row["outcome"] for row in rows)
    # A third is refused, but a plan follows measured times: which layers run again is another choice each time.
    assert min(outcomes["equal"], outcomes["refused"]) >= num_cases // 16, outcomes


@pytest.mark.parametrize(("kind", "fault", "first_case", "num_cases"), [
    ("modules", "uses_before_arrival", 0, 5),
    pytest.param("modules", "late_writes_unseen", 0, 60, marks=pytest.mark.slow),
    pytest.param("megatron", "uses_before_arrival", 0, 8, marks=pytest.mark.slow),
    pytest.param("megatron", "copies_overtake", 0, 40, marks=pytest.mark.nightly),
    pytest.param("impure", "no_snapshot", 1, 30, marks=pytest.mark.nightly),
    pytest.param("impure", "no_checksum", 8, 30, marks=pytest.mark.nightly),
    pytest.param("impure", "checksum_of_a_part", 4, 30, marks=pytest.mark.nightly),
    pytest.param("impure", "checksum_without_places", 26, 60, marks=pytest.mark.nightly),
    pytest.param("impure", "flags_unread", 8, 30, marks=pytest.mark.nightly),
    pytest.param("impure", "never_in_turn", 68, 60, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_planted_defect_is_found(zygote: Zygote, kind: str, fault: str, first_case: int, num_cases: int) -> None:
    """Plans follow measured times, so which case finds a defect of a layer that runs again may vary."""
    outcomes: Counter[str] = Counter()
    with Pool(zygote, kind, timeout_s=TIMEOUT_S, fault=fault) as pool:
        for seed in range(first_case, first_case + num_cases):
            outcomes[(row := pool.run(seed))["outcome"]] += 1
            if row["outcome"] in BAD:
                assert f"--seed {seed}" in described(row)
                return
    pytest.fail(f"{num_cases} cases did not find it: {outcomes}")


@pytest.mark.nightly
def test_a_case_that_hangs_is_told_with_its_stack(zygote: Zygote) -> None:
    with Pool(zygote, "modules", timeout_s=10.0, fault="never_ends") as pool:
        row = pool.run(3)
    assert row["outcome"] == "hung"
    assert "never_ends" not in row["error"]
    assert "faults.py" in row["error"], "the stack shows where it waits"
    assert "--kind modules --ranks 1 --seed 3" in described(row)


def record(value: Any) -> Record:
    made = Record()
    made.note("step", {"loss": value})
    return made


def test_a_difference_of_one_bit_is_seen() -> None:
    one = torch.tensor([1.0, float("nan"), 0.0])
    other = one.clone()
    assert difference(record(one), record(other)) is None
    other[2] = -0.0
    assert difference(record(one), record(other)) == "step 1/loss: 1 of 3 elements differ, first number 2: 0.0 and -0.0"
    assert difference(record(one), record(one.bfloat16())) is not None
    assert difference(record(1.0), record(1.0000001)) is not None
    twice = record(one)
    twice.note("step", {"loss": one})
    assert difference(record(one), twice) == "step 2/loss: missing in the first run"
