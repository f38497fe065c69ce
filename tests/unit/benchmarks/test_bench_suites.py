"""Suites and methods: the committed files are valid to the last flag, wrong ones are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import ROOT
from benchmarks.suites.methods import KINDS, Method, MethodError, parse_method
from benchmarks.suites.suite import SuiteError, find_suite, load_suite, suite_names

SMALL = """
description = "x"
device = "cpu"
warm_up = 2
timed = 3
rounds = 2
time_limit_s = 60
flags = "--transformer-impl local --micro-batch-size 2"
[cases.one]
flags = "--num-layers 4"
micro_batches = 3
[cases.two]
flags = "--num-layers 8"
micro_batches = 1
rounds = 5
without = ["all"]
[cases.two.methods]
first = "ours --swap-layers 0"
[methods]
none = "none"
all = "ours --swap-layers all"
"""
# Megatron's own parser and config, told that this is an H200 with TransformerEngine.
PARSE = """
import functools, inspect, os, sys, torch
inspect.getsource = functools.cache(inspect.getsource)  # Megatron reads its settings' docstrings for each command
from argparse import ArgumentParser
torch.cuda.get_device_capability = lambda *_: (9, 0)
from megatron.swap.trainer.prepare import prepare
prepare()
import megatron.core.utils
from packaging.version import Version
megatron.core.utils._te_version = Version("2.20.2")
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.global_vars import destroy_global_vars
from megatron.swap.common.flags import add_swap_flags
from megatron.swap.trainer.command_line import swap_config
from benchmarks.suites.budgets import Memory
from benchmarks.suites.suite import find_suite, load_suite, suite_names
memory = Memory(static_gib=59.0, activations_gib=35.0)
options = add_swap_flags(ArgumentParser()).format_help()
num, refused = 0, []
for name in suite_names():
    seen = set()
    for case in load_suite(find_suite(name)).cases:
        for method in case.methods:
            if (method.name, method.text) in seen and method.name != "none" and not method.searches:
                continue
            seen.add((method.name, method.text))
            if method.plan_file is not None:
                continue  # a plan is of a model: tests/unit/benchmarks/test_predictions.py
            if method.searches and "--swap-memory-gib" not in options:
                continue  # the flags of automatic plans are still to come
            request = case.request(method, memory)
            destroy_global_vars()
            destroy_num_microbatches_calculator()
            sys.argv = ["pretrain_gpt_swap.py", *request.flags]
            if method.searches:
                sys.argv += ["--swap-memory-gib", "1"]  # what this machine has is not what the suite is for
            if "--no-rope-fusion" not in request.flags:
                sys.argv.append("--no-rope-fusion")  # asks for TransformerEngine's kernel itself
            os.environ.update(request.env)
            num += 1
            try:
                args = parse_and_validate_args(extra_args_provider=add_swap_flags)
                gpt_config_from_args(args)
                swap_config(args)
            except (Exception, SystemExit) as error:
                refused.append(f"{name} {case.name} {method.name}: {type(error).__name__}: {error}")
print("\\n".join(refused))
print(f"{num} parsed, {len(refused)} refused")
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


def test_ours_are_these_and_every_kind_of_method_is_in_one() -> None:
    assert suite_names() == [
        "h200-dense", "h200-fp8", "h200-fusion", "h200-guard", "h200-long-context", "h200-loss", "h200-moe",
        "h200-optimizer",
        "h200-planner", "quick", "quick-planner",
    ]  # fmt: skip
    suites = [load_suite(find_suite(name)) for name in suite_names()]
    kinds = {
        part.split()[0]
        for suite in suites for case in suite.cases for method in case.methods for part in method.text.split(" + ")
    }  # fmt: skip
    assert kinds == set(KINDS)
    for suite in suites:
        for case in suite.cases:
            assert case.methods[0].name == "none", "the reference runs first"


@pytest.mark.slow
def test_megatron_takes_the_flags_of_every_method() -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, **rank, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
             "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *refused, count = done.stdout.strip().splitlines()
    assert count.endswith(" parsed, 0 refused"), "\n".join([*refused, count])
    assert int(count.split()[0]) >= 70


def test_a_suite_is_its_cases_and_methods(tmp_path: Path) -> None:
    suite = load_suite(written(tmp_path, SMALL))
    one, two = suite.cases
    assert [method.name for method in one.methods] == ["none", "all"]
    assert [method.name for method in two.methods] == ["none", "first"]
    assert (one.rounds, two.rounds) == (2, 5)
    request = one.request(one.methods[1])
    assert " ".join(request.flags) == (
        "--transformer-impl local --micro-batch-size 2 --num-layers 4 --global-batch-size 6 --train-iters 5 "
        "--swap-layers all"
    )
    assert request.num_warm_up == 2
    assert not request.has_phases
    assert one.request(one.methods[0]).has_phases


def test_a_choice(tmp_path: Path) -> None:
    suite = load_suite(written(tmp_path, SMALL))
    chosen = suite.chosen(["two"], ["first"], 1)
    assert [(case.name, case.rounds, case.methods[0].name) for case in chosen.cases] == [("two", 1, "first")]
    assert len(chosen.cases[0].methods) == 1
    without = suite.chosen([], ["all"], None)
    assert [case.name for case in without.cases] == ["one"], "a case without methods is left out"
    with pytest.raises(SuiteError, match="--case three: there is none of that name; there are one, two"):
        suite.chosen(["three"], [], None)
    with pytest.raises(SuiteError, match="--method first: there is none of that name; there are none, all"):
        suite.chosen(["one"], ["first"], None)
    with pytest.raises(SuiteError, match=r"no such suite; there are h200-dense, .*quick"):
        find_suite("slow")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("warm_up = 2\n", "", "small.toml: key 'warm_up' is missing"),
        ("warm_up = 2", "warm_up = 1", "warm_up = 1; at least 2"),
        ("rounds = 5", "round = 5", r"\[cases\]: \[two\]: unknown key 'round'; allowed: .*rounds"),
        ("timed = 3", "timed = '3'", "timed = '3'; expected: int"),
        ("micro_batches = 3\n", "", r"\[one\]: key 'micro_batches' is missing"),
        ("--num-layers 4", "", r"\[one\]: the flags have no --num-layers"),
        ('device = "cpu"', 'device = "tpu"', "device = 'tpu'; allowed: cpu or gpu"),
        ('none = "none"', 'none = "nothing"', "method 'none': 'nothing' is no kind of method; known: none, full-rec"),
        ('none = "none"', "none = 1", "method 'none' is 1, not a string"),
        ('without = ["all"]', 'without = ["al"]', r"without al: there is none of that name; there are none, all"),
        ("description", "descriptoin", "key 'description' is missing"),
        ('device = "cpu"', 'device = "cpu', "not TOML"),
        ("[cases.one]", "[cases.one]\nextra = 1", "unknown key 'extra'"),
    ],
)
def test_a_wrong_suite_is_told(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert before in SMALL
    with pytest.raises(SuiteError, match=said):
        load_suite(written(tmp_path, SMALL.replace(before, after, 1)))


def parsed(text: str, **changed: object) -> Method:
    return parse_method("m", text, **{"num_layers": 6, "has_te": True, "on_gpu": True, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("none", ""),
        ("full-recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        ("selective-recompute mlp", "--recompute-granularity selective --recompute-modules mlp"),
        ("layer-offload all-but-one", "--cpu-offloading-num-layers 5"),
        ("layer-offload half", "--cpu-offloading-num-layers 3"),
        ("layer-offload 2", "--cpu-offloading-num-layers 2"),
        ("save-on-cpu", ""),
        ("optimizer-cpu-offload 0.5", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --num-workers 0"),
        (
            "optimizer-cpu-offload 1 overlap",
            "--optimizer-cpu-offload --optimizer-offload-fraction 1 --overlap-cpu-optimizer-d2h-h2d --num-workers 0",
        ),
        (
            "optimizer-cpu-offload 0.5 unpinned",
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --no-pin-cpu-grads --num-workers 0",
        ),
        ("unfused-gradients", "--no-gradient-accumulation-fusion"),
        ("ours --swap-optimizer 0.5", "--swap-optimizer 0.5"),
        (
            "ours --swap-layers 0-3 --swap-modules mlp + selective-recompute mlp",
            "--swap-layers 0-3 --swap-modules mlp --recompute-granularity selective --recompute-modules mlp",
        ),
    ],
)
def test_methods(text: str, flags: str) -> None:
    assert " ".join(parsed(text).piece.flags) == flags
    assert parsed(text).is_ours == text.startswith("ours")


def test_what_methods_need() -> None:
    both = parsed("fine-grained-offload core_attn attn_proj + selective-recompute mlp").piece
    assert both.env == {"NVTE_CPU_OFFLOAD_V1": "1"}
    assert parsed("torchtune-offload").piece.requires == ("torchtune.training",)
    assert parsed("save-on-cpu").piece.wrap == "benchmarks.suites.baselines:save_on_cpu"


@pytest.mark.parametrize(
    ("text", "changed", "said"),
    [
        ("fine-grained-offload core_attn", {"has_te": False}, "needs --transformer-impl transformer_engine"),
        ("torchtune-offload", {"on_gpu": False}, "needs a GPU"),
        ("selective-recompute mpl", {}, "out of core_attn, mlp.*given: mpl"),
        ("selective-recompute", {}, "given: none"),
        ("layer-offload most", {}, "a number of layers, or all-but-one or half"),
        ("optimizer-cpu-offload", {}, "a fraction of the optimizer state, above 0 and at most 1.*given: nothing"),
        ("optimizer-cpu-offload half", {}, "given: half"),
        ("optimizer-cpu-offload 0", {}, "given: 0"),
        ("optimizer-cpu-offload 0.5 often", {}, "the words overlap, unpinned; given: 0.5 often"),
        ("optimizer-cpu-offload 0.5 overlap overlap", {}, "given: 0.5 overlap overlap"),
        ("unfused-gradients all", {}, "unfused-gradients takes no arguments; given: all"),
        ("none --swap-layers all", {}, "none takes no arguments"),
        ("ours", {}, "ours takes --swap-layers"),
        ("ours --swap-layers all --recompute-granularity full", {}, "Add recomputation as a separate part"),
        ("none + ours --swap-layers all", {}, "none \\+ ours cannot be combined"),
        ("save-on-cpu + torchtune-offload", {}, "cannot be combined"),
        ("", {}, "'' is no kind of method"),
    ],
)
def test_wrong_methods_are_told(text: str, changed: dict[str, object], said: str) -> None:
    with pytest.raises(MethodError, match=said):
        parsed(text, **changed)


@pytest.mark.parametrize("flag", ["--num-layers", "--micro-batch-size"])
def test_a_flag_that_is_no_number_is_named(tmp_path: Path, flag: str) -> None:
    text = find_suite("quick").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(rf"{flag} \d+", f"{flag} six", text, count=1))
    with pytest.raises(SuiteError, match=rf"mine\.toml.*{flag} six: a whole number from 1 on is expected"):
        load_suite(path)


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_round_is_refused(rounds: int) -> None:
    with pytest.raises(SuiteError, match=f"--rounds {rounds}: at least 1"):
        load_suite(find_suite("quick")).chosen([], [], rounds)
