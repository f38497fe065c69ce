"""The solver against brute force; budgets, host memory, bounds, speed."""

import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.swap.common.plan import LAYER_SECTION, Infeasible
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.shape import shape_profile
from megatron.swap.planner.profile import GAPS_GIB, LayerClass, NonLayer, OffloadedState, Pipeline, Profile, Section
from megatron.swap.planner.program import Program, bound_windows
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import curve, empty_plan, smallest_budget, solve
from tests.sizes import sized
from tests.unit.planner.cases import all_choices, linear_cost, model, profile, random_profile, site, to_plan

NEAR_MS = 0.02
"""Upper bound of the cost of tie-breaks."""


def random_budget(of: Profile, seed: int) -> float:
    full = of.non_layer.peak_gib + sum(len(entry.layers) * entry.saved_mib for entry in of.layers) / 1024
    return full * random.Random(seed).uniform(0.2, 1.1)


@pytest.mark.parametrize("block", [8, 0, 1, 3, 5][: sized(3, 2, 5)])
def test_the_program_finds_what_brute_force_finds(block: int) -> None:
    """Small cases, 20 a block: the same optimum of the same model, and feasible exactly where something fits."""
    for seed in range(block * 20, block * 20 + 20):
        of = random_profile(seed)
        budget = random_budget(of, seed)
        host = float("inf") if of.host_gib is None else of.host_gib
        costs = [linear_cost(of, choices) for choices in all_choices(of)]
        best = min((step for step, peak, leased in costs if peak <= budget and leased <= host), default=None)
        answer = Program(of).solve(budget, of.host_gib, bound_windows(of))
        assert (answer is None) == (best is None), seed
        if answer is not None and best is not None:
            assert answer.step_ms == pytest.approx(best, abs=NEAR_MS), seed
            assert answer.bound_ms <= best + 1e-6, seed


@pytest.mark.parametrize("seed", range(500, 500 + sized(5, 2, 10)))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    """Simulate every plan. None within the budget is faster than the bound, and the found plan is near the best."""
    of = random_profile(seed, most_sites=2)
    budget = random_budget(of, seed)
    host = float("inf") if of.host_gib is None else of.host_gib
    simulated = [simulate(of, to_plan(of, choices)) for choices in all_choices(of)]
    fitting = [one.step_ms for one in simulated if one.peak_gib <= budget and one.host_gib <= host]
    if not fitting:
        with pytest.raises(Infeasible) as refusal:
            solve(of, budget)
        assert refusal.value.smallest_gib > budget
        return
    solution = solve(of, budget)
    assert solution.lower_bound_ms <= min(fitting) + 1e-6
    # It may be faster than all of them, because it also chooses the prefetch window.
    assert solution.lower_bound_ms - 1e-6 <= solution.prediction.step_ms <= 1.06 * min(fitting)
    assert solution.prediction.peak_gib <= budget
    assert solution.prediction.host_gib <= host + 1e-6


def test_a_reserve_for_fragmentation_is_left_free() -> None:
    """Fragmentation of one largest tensor is expected. 1.25 more are left free; a third of that if nothing else fits.

    The smallest budget includes that third.
    """
    of = replace(random_profile(7, most_layers=5), allocator_gib=1e-3)
    largest_gib = max(one.mib for entry in of.layers for one in entry.sites) / 1024
    least_gib = 1.25 * largest_gib / 3
    kept = simulate(of, empty_plan(of)).peak_gib
    assert kept == pytest.approx(simulate(replace(of, allocator_gib=0.0), empty_plan(of)).peak_gib + largest_gib)
    smallest = smallest_budget(of)
    assert smallest < kept + least_gib
    for budget in (smallest + 1e-6, (smallest + kept + least_gib) / 2, kept + 0.99 * least_gib):
        solution = solve(of, budget)
        assert solution.plan.budget_gib == budget
        assert all(one.peak_gib <= budget - least_gib + 1e-9 for one in solution.predictions)
    assert solve(of, kept + least_gib + 1e-9).prediction.peak_gib == kept
    with pytest.raises(Infeasible) as refusal:
        solve(of, smallest - 0.01 * largest_gib)
    assert smallest <= refusal.value.smallest_gib <= 1.01 * smallest


def test_without_a_measurement_the_whole_reserve_is_left_free() -> None:
    """No run corrects a plan that was made before the first one, so it reserves at most its budget."""
    of = replace(random_profile(7, most_layers=5), allocator_gib=None)
    largest_gib = max(one.mib for entry in of.layers for one in entry.sites) / 1024
    assert (of.fragments_gib, of.reserve_gib) == (largest_gib, 1.25 * largest_gib)
    offloaded = replace(of, offloaded_state=OffloadedState(40.0, 0.5, 0.0))
    assert offloaded.reserve_gib == pytest.approx(1.25 * (largest_gib + GAPS_GIB))
    smallest, kept = smallest_budget(of), simulate(of, empty_plan(of)).peak_gib
    assert smallest < kept + of.reserve_gib
    for part in (0.001, 0.5, 0.9, 1.1):
        budget = smallest + part * (kept + of.reserve_gib - smallest)
        allocated_gib = solve(of, budget).prediction.peak_gib - largest_gib
        assert allocated_gib + 2.25 * largest_gib <= budget + 1e-9
    with pytest.raises(Infeasible):
        solve(of, smallest - 0.01 * largest_gib)


@given(seed=st.integers(1000, 3000), more=st.floats(0, 1))
@settings(max_examples=sized(10, 5), deadline=None)
def test_predictions_are_those_of_the_plans(seed: int, more: float) -> None:
    of = random_profile(seed, most_layers=5, most_sites=4)
    smallest = smallest_budget(of)
    solution = solve(of, smallest + more * max(0.0, simulate(of, empty_plan(of)).peak_gib - smallest) + 1e-6)
    for plan, prediction in zip(solution.plans, solution.predictions, strict=True):
        assert simulate(of, plan) == prediction
        assert plan.predicted is not None
        assert plan.predicted.step_ms == prediction.step_ms >= solution.lower_bound_ms
    assert len({str(plan.classes) for plan in solution.plans}) == len(solution.plans)
    steps = [prediction.step_ms for prediction in solution.predictions]
    assert [round(step, 3) for step in steps] == sorted(round(step, 3) for step in steps)


def test_the_program_counts_the_live_micro_batches_of_a_pipeline() -> None:
    entry = LayerClass((0,), 2, 4, (site("a/0", 400, 1, 1, is_ineligible=True),))
    of = profile([entry], micro_batches=8, pipeline=Pipeline(4, 0))
    assert [bool(Program(of).solve(4 * mib / 1024, None, bound_windows(of))) for mib in (399, 401)] == [False, True]


def test_a_plan_that_fits_host_memory_nearly_reaches_the_bound() -> None:
    found = solve(of := replace(random_profile(644, 6, 4), num_micro_batches=16), random_budget(of, 644))
    assert found.prediction.step_ms <= 1.03 * found.lower_bound_ms


def test_more_memory_is_never_slower() -> None:
    of = random_profile(11, most_layers=6, most_sites=4)
    points = curve(of, 8)
    steps = [point.prediction.step_ms for point in points]
    assert steps == sorted(steps, reverse=True)
    assert len(points) == 8
    assert steps[-1] == simulate(of, empty_plan(of)).step_ms
    assert all(point.prediction.peak_gib <= (point.plan.budget_gib or 0) for point in points)


def six_layers() -> Profile:
    """Six layers save 100 MiB each in 2 ms of forward. Copying takes 1 ms, recomputing 1 ms. The loss takes 100 MiB."""
    entry = LayerClass(tuple(range(6)), 2.0, 4.0, (site("a/0", 50, 0.5, 2, 3, recompute_ms=0.5),
                                                   site("b/0", 50, 1.5, 0, 1, recompute_ms=0.5)))  # fmt: skip
    return profile([entry], non_layer=NonLayer(0, 0, 0, 0, 100 / 1024))


def test_plans_of_least_device_memory_are_within_host_memory_too() -> None:
    """Without the limit the inputs of all layers that are recomputed whole are offloaded."""
    sites = (site("in/0", 100, 0.1, 3, 4), site("a/0", 300, 1, 2, 3))
    entry = LayerClass(tuple(range(6)), 2.0, 4.0, sites, (Section(LAYER_SECTION, ("a/0",), ("in/0",), 1.0),))
    of = profile([entry], host_gib=50 / 1024)
    assert smallest_budget(replace(of, host_gib=None)) < smallest_budget(of) - 0.1
    assert solve(of, smallest_budget(of)).prediction.host_gib <= 50 / 1024


def test_the_earliest_layers_swap() -> None:
    solution = solve(six_layers(), 500 / 1024)
    swapped = [entry for entry in solution.plan.classes if "swap" in {s.action for s in entry.sites.values()}]
    assert [entry.numbers() for entry in swapped] == [(0, 1)]
    assert solution.prediction.step_ms == simulate(six_layers(), empty_plan(six_layers())).step_ms


@pytest.mark.parametrize("seed", range(600, 600 + sized(3, 3, 6)))
def test_the_smallest_budget_as_it_is_written_is_enough(seed: int) -> None:
    """The value is rounded up, and a plan is found for it again."""
    of = random_profile(seed)
    with pytest.raises(Infeasible) as refusal:
        solve(of, 0.5 * smallest_budget(of))
    written = re.match(r"no plan stays below .* found feasible is ([\d.]+) GiB", str(refusal.value))
    assert written, refusal.value
    smallest = float(written[1])
    assert smallest == refusal.value.smallest_gib
    assert solve(of, smallest).prediction.peak_gib <= smallest
    # So it is in a run that measures some bytes more or less than the run that printed the message.
    again = replace(of, static_gib=of.static_gib + 0.001 * smallest)
    assert solve(again, smallest).prediction.peak_gib <= smallest


def test_a_pipeline_rank_is_planned_within_its_budget() -> None:
    shape = model(16, hidden_size=2048, ffn_hidden_size=5504, num_attention_heads=16, num_query_groups=16,
                  seq_length=4096, pipeline_parallel=4, num_virtual_stages=2)  # fmt: skip
    of = shape_profile(shape, find_gpu("h200"), 8, pipeline_rank=3)
    unswapped = simulate(of, empty_plan(of))
    budget = of.static_gib + 0.7 * (unswapped.peak_gib - of.static_gib)
    solution = solve(of, budget)
    assert solution.prediction.peak_gib <= budget
    assert unswapped.step_ms <= solution.lower_bound_ms + 1e-6 <= solution.prediction.step_ms + 1e-5


def test_96_layers_are_counted_not_listed() -> None:
    """There are as many unknowns as for 16 layers, so the search takes a second or two."""
    sizes = {"hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "num_query_groups": 32,
             "seq_length": 4096, "micro_batch_size": 4}  # fmt: skip
    few, many = (shape_profile(model(num, **sizes), find_gpu("h200"), 8) for num in (16, 96))
    assert len(Program(few).columns) == len(Program(many).columns)
    budget = many.static_gib + 0.3 * (simulate(many, empty_plan(many)).peak_gib - many.static_gib)
    solution = solve(many, budget)
    assert solution.prediction.peak_gib <= budget
    assert solution.prediction.step_ms < 1.007 * solution.lower_bound_ms  # the bound ignores the last layer's time


SCRIPT = """
import ctypes, os, sys
from megatron.swap.planner.solver_output import without_solver_lines
libc = ctypes.CDLL(None)
libc.printf(b"of C, before\\n")
for _ in range(2):
    with without_solver_lines():
        libc.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\\n")
        libc.puts(b"of C")
        print("of Python", flush=True)
        os.system("echo of a child")
print("after")
"""


def test_unasked_lines_are_dropped_and_others_appear() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert sorted(lines) == sorted(["of C, before", *2 * ["of Python", "of a child", "of C"], "after"])
