"""Fixtures of the tests that run the real trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Trainer, Zygote
from tests.sizes import IS_SHORT

SHORT = {
    "test_auto.py": ["test_below_a_budget[llama-0.6]", "test_a_budget_that_cannot_be_met_says_the_smallest"],
    "test_bad_input.py": [
        "test_known_module_that_this_model_lacks",
        "test_unswapped_runs_need_no_patch_for_swapping",
        "test_upstream_of_another_source",
    ],
    "test_goldens.py": ["test_flags", "test_import_paths", "TestAPlantedDifferenceIsFound"],
    "test_guard.py": [
        "test_a_run_that_has_too_little_memory_trains_to_the_bit[llama-mixed]",
        "test_a_run_that_has_enough_is_not_touched",
    ],
    "test_ledger.py": ["test_nothing_is_swapped", "test_saved_in_its_last_step"],
    "test_loss_chunks.py": [
        "test_one_chunk_is_equal_to_the_bit[tp2]",
        "test_sequence_parallelism",
    ],
    "test_mistakes.py": [
        "test_help_begins_with_our_flags",
        "test_of_a_training_command[--hidden-size 66]",
        "test_of_a_training_command[--swap-layer all]",
        "test_of_a_training_command[--swap-plan /dev/zero]",
        "test_of_an_own_script[forgotten]",
        "test_of_an_own_script[out of range]",
    ],
    "test_optimizer.py": [
        "test_a_checkpoint_goes_on_with_another_fraction[1-0--torch]",
        "test_a_disk_that_fails_leaves_the_last_checkpoint[writes]",
        "test_other_rules[--optimizer muon]",
        "test_rules_that_are_not_known_are_refused",
        "test_together_with_activations",
    ],
    "test_output.py": ["test_lines_and_tables", "test_none_installs_nothing", "test_quiet"],
    "test_packed.py": ["test_equal_to_the_bit[all-kinds]"],
    "test_parallel.py": [
        "test_equal_to_the_bit[dp2-distributed-optimizer]",
        "test_equal_to_the_bit[tp2-dropout]",
        "test_equal_to_the_bit[pp2-vpp2]",
    ],
    "test_plans.py": [
        "TestRefusedBeforeTheModelIsBuilt",
        "test_every_byte_is_where_the_plan_says",
        "test_keep_swap_and_recompute_in_one_layer[bf16-dropout]",
        "test_whole_layers_run_again[fp32]",
    ],
    "test_recompute.py": [
        "test_inputs_of_recomputed_segments_are_swapped[uniform-1]",
        "test_selective[core_attn-dropout]",
    ],
    "test_recompute_sites.py": [
        "test_swapped_and_recomputed[llama]",
        "test_the_peak_falls_by_what_is_not_held[all]",
    ],
    "test_recording.py": ["test_no_plan_holds_more_than_was_predicted", "test_what_is_made_from_what"],
    "test_resume.py": ["test_resumed_with_swapping[dropout]"],
    "test_training.py": [
        "test_activations_on_disk_where_host_memory_is_short[--0.0073]",
        "test_equal_to_the_bit[dropout-bf16]",
        "test_equal_to_the_bit[fp32]",
        "test_equal_to_the_bit[llama]",
        "test_equal_to_the_bit[moe]",
        "test_the_comparison_sees_a_small_difference",
    ],
}
"""What the short run takes of these tests: each mechanism once. The others start hundreds of trainers."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what is not in ``SHORT``.

    Raises:
        pytest.UsageError: a test of ``SHORT`` is not in its file. Seen in the full run, too, unless tests were named.
    """
    taken = {f"{file}::{name}" for file, names in SHORT.items() for name in names}
    found: set[str] = set()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            test = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
            of_class = "::".join(test.split("::")[:2])
            if not taken & {test, of_class}:
                item.add_marker("slow")
            found |= {test, of_class}
    files = {test.partition("::")[0] for test in (taken if IS_SHORT else found)}
    missing = {test for test in taken - found if test.partition("::")[0] in files}
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/integration/conftest.py names tests that are not there: {missing}")


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pytest workers of this session."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "unswapped"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks trainers for all tests of this worker."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def trainer(zygote: Zygote, tmp_path: Path, shared_runs: Path) -> Trainer:
    """Runs training. All tests share the runs without swapping."""
    return Trainer(zygote, tmp_path, shared_runs)
