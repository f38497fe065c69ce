"""Totals of the counters between two moments."""

from __future__ import annotations

from megatron.swap.common.counters import Counters, Totals


def test_totals_between_two_moments():
    counters = Counters()
    counters.layers[3].out_bytes = 10
    counters.num_out_copies = 2
    before = counters.totals()
    counters.layers[3].out_bytes = 25
    counters.layers[4].in_bytes = 5
    counters.num_out_copies = 3
    moved = counters.totals().since(before)
    assert moved.layers == {3: (15, 0), 4: (0, 5)}
    assert (moved.out_bytes, moved.in_bytes, moved.num_out_copies) == (15, 5, 1)
    assert before.since(Totals()) == before
