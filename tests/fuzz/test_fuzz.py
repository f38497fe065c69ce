"""The first seeds of each kind, and proof that the fuzz finds planted defects and hangs."""

from __future__ import annotations

from collections import Counter

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
    ("megatron", 1, sized(10, 2, 32), {"reloaded activations": 0.5, "recomputed activations": 0.2,
                                       "had optimizer state in host memory": 0.1}),
    ("megatron", 2, sized(2, 1, 8), {"reloaded activations": 0.3}),
    ("modules", 1, sized(40, 12, 160), {"reloaded activations": 0.8, "copied and kept": 0.3, "reloaded late": 0.1}),
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


@pytest.mark.parametrize(("kind", "fault", "num_cases"), [
    ("modules", "uses_before_arrival", 5),
    pytest.param("modules", "late_writes_unseen", 60, marks=pytest.mark.slow),
    pytest.param("megatron", "uses_before_arrival", 8, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_planted_defect_is_found(zygote: Zygote, kind: str, fault: str, num_cases: int) -> None:
    outcomes: Counter[str] = Counter()
    with Pool(zygote, kind, timeout_s=TIMEOUT_S, fault=fault) as pool:
        for seed in range(num_cases):
            outcomes[(row := pool.run(seed))["outcome"]] += 1
            if row["outcome"] in BAD:
                assert f"--seed {seed}" in described(row)
                return
    pytest.fail(f"{num_cases} cases did not find it: {outcomes}")


def test_a_difference_of_one_bit_is_seen() -> None:
    one = torch.tensor([1.0, float("nan"), 0.0])
    records = [Record() for _ in range(3)]
    for record, value in zip(records, (one, one.clone(), one * torch.tensor([1, 1, -1])), strict=True):
        record.note("step", {"loss": value})
    assert difference(records[0], records[1]) is None
    assert difference(records[0], records[2]) == (
        "step 1/loss: 1 of 3 elements differ, first number 2: 0.0 and -0.0"
    )
