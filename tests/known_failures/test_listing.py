"""The list of known failures is whole: each has its words, its tests, its planted faults, and their results."""

import pytest

from benchmarks.faults.trial import CAUGHT
from tests.known_failures.listing import ROOT, THREAD, KnownFailure, known_failures, planted, reported_kinds, results

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


def test_each_report_is_listed_once_with_a_kind_and_an_outcome() -> None:
    kinds = reported_kinds()
    threads = [thread for kind in kinds for thread in kind.reports]
    of_sections = {thread for failure in FAILURES for thread in failure.threads}
    assert len(set(threads)) == len(threads) >= 60
    assert not of_sections & set(threads)
    assert all(THREAD.fullmatch(thread) for thread in threads)
    assert all(kind.what and kind.here and all(kind.reports.values()) for kind in kinds)


@pytest.mark.parametrize("test", sorted({test for kind in reported_kinds() for test in kind.tests}))
def test_each_test_of_a_report_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert not name or f"def {name}(" in (ROOT / file).read_text()
    assert (ROOT / file).exists()
