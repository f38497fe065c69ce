"""Exact figures of traces that can be computed by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import intervals
from benchmarks.traces.analysis import Analysis, analyse
from benchmarks.traces.reader import read_trace
from tests.unit.benchmarks.made_traces import AUTOGRAD, IN, MS, OUT, US, Made

MIB = 1 << 20


def by_hand() -> Made:
    """A trace of two layers of 4 ms each way, with one storage of 8 MiB. In ms of the device's time::

        compute  |F0 1-5|F1 5-9|B1 9-11|  stall 11-14.5  |  15-19 B0|  23-24 optimizer|
        out             |5 ---- 9|              (release after F1)
        in                            |10.5 ---- 14.5|
    """
    made = Made()
    made.range("step 7", 0, 30 * MS)
    made.range("forward layers.0 mb0", 10 * US, 100 * US)
    made.run("kernel", 20 * US, 1 * MS, 5 * MS)
    made.range("swap_out layers.0 mb0 8 MiB", 40 * US, 90 * US)
    made.range("copy_out layers.0/mlp.linear_fc1/0 mb0 8388608", 50 * US, 80 * US)
    made.run("DtoH", 60 * US, 5 * MS, 9 * MS, OUT, num_bytes=8 * MIB)
    made.range("memory 100", 95 * US, 95 * US)
    made.range("forward layers.1 mb0", 110 * US, 190 * US)
    made.run("kernel", 120 * US, 5 * MS, 9 * MS - 5 * US)
    made.range("memory 300", 130 * US, 130 * US)
    made.range("release layers.0/mlp.linear_fc1/0 mb0", 140 * US, 150 * US)
    made.range("memory 200", 160 * US, 160 * US)
    made.range("backward layers.1 mb0", 200 * US, 290 * US, AUTOGRAD)
    made.run("kernel", 210 * US, 9 * MS, 11 * MS, thread=AUTOGRAD)
    made.range("prefetch layers.0 mb0 8 MiB", 10 * MS, 10 * MS + 90 * US, AUTOGRAD)
    made.range("copy_in layers.0/mlp.linear_fc1/0 mb0 8388608", 10 * MS + 10 * US, 10 * MS + 80 * US, AUTOGRAD)
    copy = made.run("HtoD", 10 * MS + 20 * US, 11 * MS, 14_500 * US, IN, AUTOGRAD, 8 * MIB)
    assert copy.end - copy.start == 3_500 * US
    made.range("backward layers.0 mb0", 10_200 * US, 10_600 * US, AUTOGRAD)
    made.range("wait layers.0/mlp.linear_fc1/0 mb0", 10_300 * US, 10_400 * US, AUTOGRAD)
    made.run("kernel", 10_500 * US, 15 * MS, 19 * MS, thread=AUTOGRAD)
    made.range("Optimizer.step", 20 * MS, 29 * MS)
    made.run("kernel", 22 * MS, 23 * MS, 24 * MS)
    return made


@pytest.fixture(params=["kineto", "nsys"])
def analysis(request: pytest.FixtureRequest, tmp_path: Path) -> Analysis:
    return analyse(read_trace(by_hand().write(tmp_path, request.param)))


def test_the_hidden_share_is_the_copy_time_in_which_compute_was_busy(analysis: Analysis):
    # Out: 4 ms under compute (the gap of 5 µs is closed). In: 3.5 ms in which compute stood still.
    assert analysis.links["out"].hidden_share == 1.0
    assert analysis.links["in"].hidden_share == 0.0
    assert analysis.hidden_share == 4 / 7.5
    assert analysis.is_clean


def test_the_link_is_measured_while_it_copies(analysis: Analysis):
    out, back = analysis.links["out"], analysis.links["in"]
    assert (out.num_copies, out.num_bytes, out.copy_ms, out.busy_share) == (1, 8 * MIB, 4.0, 4 / 30)
    assert (back.copy_ms, back.busy_share) == (3.5, 3.5 / 30)
    assert (out.gb_per_s, back.gb_per_s) == (8 * MIB / 4e6, 8 * MIB / 3.5e6)


def test_a_stall_lasts_while_the_wait_is_enqueued_the_copy_runs_and_compute_idles(analysis: Analysis):
    # Release: compute idled from 8.995 ms, the copy ended at 9.
    assert [(stall.name, stall.ms) for stall in analysis.stalls] == [
        ("release layers.0/mlp.linear_fc1/0 mb0", 0.005),
        ("wait layers.0/mlp.linear_fc1/0 mb0", 3.5),
    ]


def test_gaps_are_told_by_size_with_their_owner(analysis: Analysis):
    gaps = [(gap.start_ms, gap.ms, gap.owner, gap.stalled_ms) for gap in analysis.gaps]
    assert gaps == [
        (10.0, 4.0, "wait layers.0/mlp.linear_fc1/0 mb0", 3.5),
        (18.0, 4.0, "host: Optimizer.step", 0.0),
    ]


def test_the_figures_of_a_step(analysis: Analysis):
    (step,) = analysis.steps
    assert (step.step, step.duration_ms, step.d2h_ms, step.h2d_ms) == (7, 30.0, 4.0, 3.5)
    assert step.compute_busy_ms == 4 + 4 + 2 + 4 + 1
    assert step.stalled_ms == 3.505
    assert step.peak_memory_bytes == 300


def test_the_prediction_is_time_times_speed_over_bytes(analysis: Analysis):
    # Out: from the end of F0 (5) to the end of F1 (8.995) at 2 MiB/ms, of 8 MiB. In: from the start of B1 (9) to
    # the start of B0 (15), of which compute worked 2 ms and waited for the rest: 2 ms for 3.5 ms of copying.
    assert analysis.predicted["out"] == pytest.approx(3.995 / 4, abs=1e-12)
    assert analysis.predicted["in"] == pytest.approx(2 / 3.5, abs=1e-12)


def test_a_wait_that_the_host_enqueued_late_is_not_charged_with_the_hosts_time(tmp_path: Path):
    made = by_hand()
    made.ranges = [
        (name, 12 * MS, 12 * MS + US, thread) if name.startswith("wait") else (name, start, end, thread)
        for name, start, end, thread in made.ranges
    ]
    made.launches = [
        (number, 13 * MS, 13 * MS + US, thread) if start == 10_500 * US else (number, start, end, thread)
        for number, start, end, thread in made.launches
    ]
    stalls = analyse(read_trace(made.write(tmp_path, "kineto"))).stalls
    assert stalls[-1].ms == 2.5


def test_communication_hides_nothing(tmp_path: Path):
    made = by_hand()
    made.run("kernel", 10_410 * US, 11 * MS, 14_500 * US, stream=9, name="ncclDevKernel_AllReduce")
    assert analyse(read_trace(made.write(tmp_path, "nsys"))).links["in"].hidden_share == 0.0
    made.run("kernel", 10_420 * US, 11 * MS, 14_500 * US, stream=9, name="gemm")
    (tmp_path / "trace.sqlite").unlink()
    assert analyse(read_trace(made.write(tmp_path, "nsys"))).links["in"].hidden_share == 1.0


def test_in_the_emulation_a_wait_inside_an_operator_is_no_compute(tmp_path: Path):
    made = Made(emulated=True)
    made.range("step 1", 0, 20 * MS)
    made.run("kernel", 0, 0, 2 * MS)
    made.range("swap_out layers.0 mb0 1 MiB", 2 * MS, 3 * MS)
    made.range("copy_out layers.0/mlp/0 mb0 1048576", 2 * MS, 3 * MS)
    made.run("DtoH", 2 * MS + US, 4 * MS, 8 * MS, 111, num_bytes=MIB)
    made.run("kernel", 3 * MS, 3 * MS, 9 * MS)  # an operator around the release, its own computing after it
    made.range("release layers.0/mlp/0 mb0", 5 * MS, 8 * MS)
    made.run("kernel", 10 * MS, 10 * MS, 11 * MS)
    analysis = analyse(read_trace(made.write(tmp_path, "kineto")))
    assert analysis.is_clean
    assert analysis.links["out"].hidden_share == 0.25
    assert [(stall.name, stall.ms) for stall in analysis.stalls] == [("release layers.0/mlp/0 mb0", 3.0)]
    assert analysis.steps[0].compute_busy_ms == 2 + 2 + 1 + 1


def test_sets_of_time_agree_with_counting():
    draw = random.Random(3)
    for _ in range(50):
        first, second = (np.array(sorted(draw.sample(range(60), 2 * draw.randint(0, 6)))) for _ in range(2))
        a, b = (intervals.union(edges[::2], edges[1::2]) for edges in (first, second))
        in_a, in_b = ({t for s, e in some for t in range(s, e)} for some in (a, b))
        assert intervals.total(a) == len(in_a)
        assert intervals.covered(a[:, 0], a[:, 1], b).sum() == len(in_a & in_b)
        left = intervals.subtract(a, b)
        assert {t for s, e in left for t in range(s, e)} == in_a - in_b
        assert (left[1:, 0] > left[:-1, 1]).all()
        assert intervals.total(intervals.clip(a, 10, 30)) == len(in_a & set(range(10, 30)))


def test_short_gaps_are_closed():
    starts, ends = np.array([0, 15, 40]), np.array([10, 31, 50])
    assert intervals.union(starts, ends, 9).tolist() == [[0, 31], [40, 50]]
    assert intervals.union(starts, ends, 10).tolist() == [[0, 50]]
    assert intervals.union(starts, ends).tolist() == [[0, 10], [15, 31], [40, 50]]
