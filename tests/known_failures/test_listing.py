"""The list of known failures is whole: each has its words, its tests, its planted faults, and their results."""

from __future__ import annotations

import pytest

from benchmarks.faults.trial import CAUGHT
from tests.known_failures.listing import KnownFailure, known_failures, planted, results

FAILURES = known_failures()


def test_sixteen_and_no_fault_without_one() -> None:
    assert len(FAILURES) == 16
    assert {fault.id for failure in FAILURES for fault in failure.faults} == {fault.id for fault in planted()}
    assert results().keys() == {fault.id for fault in planted()}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_each_was_seen_planted_and_caught(failure: KnownFailure) -> None:
    assert failure.faults, "plant it, and show that its test fails"
    assert failure.threads, "name the thread it comes from"
    assert all(part.endswith((".", ".)")) for part in (failure.title, failure.seen, failure.here))
    for fault in failure.faults:
        row = results()[fault.id]
        assert (row["outcome"], row["file"], row["why"]) == (CAUGHT, fault.file, fault.why)
        assert row["test"].startswith(failure.tests)
        assert set(fault.tests) <= set(failure.tests)
