"""Profiles: files, arithmetic from shapes and flags, what-ifs, and the command line over all of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.cli.plan import main
from megatron.swap.common.plan import PlanClass, SitePlan, load_plan, save_plan
from megatron.swap.common.types import GIB, MIB, UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import GPUS, find_gpu
from megatron.swap.forecast.kernels import recompute_inputs
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.forecast.shape import WORKSPACE_GIB, params_of_rank, shape_profile
from megatron.swap.forecast.states import States
from megatron.swap.forecast.what_if import with_tokens
from megatron.swap.planner.profile import LayerClass, Section, save_profile, sha256
from tests.unit.planner.cases import model, random_profile, site

FLAGS = (
    "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 "
    "--micro-batch-size 4 --global-batch-size 8 --bf16 --swiglu --untie-embeddings-and-output-weights "
    "--vocab-size 31999 --train-iters 7 --lr 1e-4 --max-position-embeddings 4096"
)


@pytest.mark.parametrize("seed", range(3))
def test_a_profile_round_trips_exactly(seed: int, tmp_path: Path) -> None:
    of = random_profile(seed)
    save_profile(of, tmp_path / "profile.json")
    again = load_profile(tmp_path / "profile.json")
    assert again == of
    assert sha256(again) == sha256(of) != sha256(replace(of, static_gib=1.0))
    assert sha256(replace(of, hook_ms=0.5)) == sha256(of)


REFUSED: tuple[tuple[tuple[str | int, ...], object, str], ...] = (
    (("num_micro_batches",), 0, "num_micro_batches 0 must be at least 1"),
    (("link", "d2h_gb_s"), 0, "link: d2h_gb_s: 0 is given"),
    (("layers", 0, "sites", 0, "done_at_ms"), 0.0, "done_at_ms at least needed_at_ms"),
    (("layers", 0, "sites", 0, "recompute_ms"), "none", 'recompute_ms: "none" is given'),
    (("layers", 0, "sites", 0, "recompute_ms"), 1e308, r"recompute_ms: 1e\+308 is given"),
    (("layers", 0, "forward_ms"), -1.0, r"layers\[0\]: forward_ms: -1.0 is given"),
    (("outside", "sites"), [{"site": "loss/0", "mib": -1.0, "idle_ms": 0.0}], "mib: -1.0 is given"),
    (("pipeline", "rank"), 3, "rank 3 of 1: must be 0 to size - 1"),
    (("pipeline", "chunks"), [[7]], "must hold the layers of this rank"),
)


def test_a_file_without_sites_outside_the_layers_is_read_and_errors_name_the_key(tmp_path: Path) -> None:
    """Older profiles have no such sites."""
    path, of = tmp_path / "profile.json", random_profile(1)
    save_profile(of, path)
    saved = path.read_text()
    older = json.loads(saved)
    del older["outside"]["sites"]
    path.write_text(json.dumps(older))
    assert load_profile(path) == of
    for keys, value, message in REFUSED:
        document: Any = json.loads(saved)
        where = document
        for key in keys[:-1]:
            where = where[key]
        where[keys[-1]] = value
        path.write_text(json.dumps(document))
        with pytest.raises(UsageError, match=message):
            load_profile(path)


def test_sections_are_nested_or_disjoint() -> None:
    sites = tuple(site(name, 1, 0, 0) for name in ("a/0", "b/0", "c/0"))
    LayerClass((0,), 1, 2, sites, (Section("x", ("a/0",), (), 1), Section("y", ("a/0", "b/0"), (), 1)))
    with pytest.raises(UsageError, match="sections x and y overlap"):
        LayerClass((0,), 1, 2, sites, (Section("x", ("a/0", "c/0"), (), 1), Section("y", ("a/0", "b/0"), (), 1)))
    with pytest.raises(UsageError, match=r"section x: \['d/0'\] are not sites"):
        LayerClass((0,), 1, 2, sites, (Section("x", ("d/0",), (), 1),))
    with pytest.raises(UsageError, match=r"b/0: \['d/0'\] in recompute_needs are not sites"):
        LayerClass((0,), 1, 2, (sites[0], replace(sites[1], recompute_needs=("a/0", "d/0"))))


def _device_bytes(states: States) -> float:
    """Return the device bytes of one parameter."""
    return 2 + states.gradient_bytes + states.state_bytes * (1 - states.offload_fraction) / states.num_shards


class TestShapes:
    def test_sizes_are_those_of_traces(self) -> None:
        of = shape_profile(read_flags(FLAGS.split()).model, find_gpu("h200"), 2)
        sizes = {one.site: one.mib for one in of.layers[1].sites}
        context = "self_attention.core_attention.fused_attention"
        assert sizes == {
            "self_attention.linear_qkv/0": 128, "self_attention.linear_qkv/1": 128, f"{context}/0": 128,
            f"{context}/1": 128, f"{context}/2": 128, f"{context}/3": 128, f"{context}/6": 2, "mlp.linear_fc1/0": 128,
            "mlp.linear_fc1/1": 128, "mlp/0": 688, "mlp.linear_fc2/0": 344,
        }  # fmt: skip
        assert [one.site for one in of.layers[0].sites if one.is_ineligible] == ["self_attention.linear_qkv/0"]
        assert of.num_micro_batches == 2

    def test_which_sites_can_be_recomputed(self) -> None:
        shape = read_flags(FLAGS.split()).model
        of = shape_profile(shape, find_gpu("h200"), 2).layers[1]
        recomputable = {one.site: one for one in of.sites if one.recompute_ms is not None}
        assert {name: one.recompute_needs for name, one in recomputable.items()} == recompute_inputs(shape)
        matmul_ms = 4 * 4096 * 4 * 4096 * 11008 / 681e9
        assert 0.6 < recomputable["mlp/0"].recompute_ms / matmul_ms < 1.2
        assert [part.name for part in of.sections] == ["qkv", "residual", "layer"]
        behind = of.sections[1]
        assert behind.frees == ("mlp.linear_fc1/0",)
        assert behind.needs == ("self_attention.linear_qkv/0", "self_attention.core_attention.fused_attention/3")
        assert 0.6 < behind.recompute_ms / (2 * 4 * 4096 * 4096 * 4096 / 681e9) < 1.3
        drawn = shape_profile(shape, find_gpu("h200"), 2, has_dropout=True)
        sharded = shape_profile(replace(shape, tensor_parallel=2, sequence_parallel=True), find_gpu("h200"), 2)
        sections = [[part.name for part in one.layers[1].sections] for one in (drawn, sharded)]
        assert sections == [["qkv", "layer"], ["layer"]]

    @pytest.mark.parametrize(
        ("flags", "states"),
        [
            ("", States()),
            ("--swap-optimizer 0.25", States(offload_fraction=0.25)),
            ("--grad-reduce-in-bf16", States(gradient_bytes=2, copied_gradient_bytes=4)),
            ("--use-precision-aware-optimizer --main-grads-dtype bf16", States(gradient_bytes=2, state_bytes=10)),
        ],
    )
    def test_storage_of_optimizer_state(self, flags: str, states: States) -> None:
        training = read_flags(f"{FLAGS} {flags}".split())
        assert training.states == states
        kept = shape_profile(training.model, find_gpu("h200"), 2, tied=training.tied, states=states)
        params = params_of_rank(training.model, training.tied)
        assert kept.static_gib == pytest.approx(params * _device_bytes(states) / GIB + WORKSPACE_GIB)
        without = shape_profile(training.model, find_gpu("h200"), 2, tied=training.tied)
        buckets_gib = 0.75 if states.offload_fraction else 0.0
        assert kept.optimizer_gib == pytest.approx(states.copied_gradient_bytes * params / GIB + buckets_gib)
        more_ms = kept.non_layer.optimizer_ms - without.non_layer.optimizer_ms
        assert more_ms == pytest.approx(states.offload_fraction * states.state_bytes * params / 49e6)

    def test_flags_mean_the_same_as_to_megatron(self) -> None:
        training = read_flags(f"{FLAGS} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
                              "--group-query-attention --num-query-groups 8".split(), num_gpus=4)  # fmt: skip
        shape = training.model
        assert (shape.padded_vocab_size, shape.num_query_groups, shape.sequence_parallel) == (32000, 8, True)
        assert (training.num_micro_batches, training.tied, training.states) == (1, False, States(num_shards=2))
        copies = [*FLAGS.split(), "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]
        assert read_flags(copies, num_gpus=2).states == States(num_shards=1)
        without = FLAGS.replace("--ffn-hidden-size 11008", "")
        assert read_flags(without.split()).model.ffn_hidden_size == 10880

    def test_saved_bytes_outside_layers_are_kept(self) -> None:
        shape = read_flags(FLAGS.split()).model
        non_layer = shape_profile(shape, find_gpu("h200"), 2).non_layer
        tokens = 4 * 4096
        sizes = {one.site: one.mib * MIB for one in non_layer.sites}
        assert sizes == {
            "embedding.word_embeddings/0": 8 * tokens, "decoder.final_layernorm/0": 2 * tokens * 4096,
            "output_layer/0": 2 * tokens * 4096, "loss/0": 2 * tokens * 32000,
        }  # fmt: skip
        assert sum(list(sizes.values())[1:]) == non_layer.kept_gib * GIB
        for rank, ends in ((0, ["embedding.word_embeddings/0"]), (1, []), (3, list(sizes)[1:])):
            stage = shape_profile(replace(shape, pipeline_parallel=4), find_gpu("h200"), 2, pipeline_rank=rank)
            assert [one.site for one in stage.non_layer.sites] == ends
        twice = with_tokens(shape_profile(shape, find_gpu("h200"), 2), seq_length=8192).non_layer
        for one, other in zip(non_layer.sites, twice.sites, strict=True):
            assert (other.site, other.mib, other.idle_ms) == (one.site, 2 * one.mib, 2 * one.idle_ms)

    def test_parallelism_divides(self) -> None:
        whole = shape_profile(read_flags(FLAGS.split()).model, find_gpu("h200"), 2)
        halves = replace(whole.model, tensor_parallel=2, sequence_parallel=True)
        half = shape_profile(halves, find_gpu("h200"), 2)
        assert half.layers[1].saved_mib == pytest.approx(whole.layers[1].saved_mib / 2)
        assert half.static_gib - 0.096 == pytest.approx((whole.static_gib - 0.096) / 2)
        stages = [shape_profile(replace(whole.model, pipeline_parallel=4), find_gpu("h200"), 8, pipeline_rank=rank)
                  for rank in range(4)]  # fmt: skip
        assert sum(stage.static_gib - 0.096 for stage in stages) == pytest.approx(whole.static_gib - 0.096, rel=1e-3)
        assert [stage.has_loss for stage in stages] == [False, False, False, True]
        assert [stage.chunks for stage in stages] == [((0, 1, 2, 3),), ((4, 5, 6, 7),), ((8, 9, 10, 11),),
                                                      ((12, 13, 14, 15),)]  # fmt: skip

    def test_wrong_names_and_flags(self) -> None:
        with pytest.raises(UsageError, match="--seq-length is missing"):
            read_flags(["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2"])
        with pytest.raises(UsageError, match="--global-batch-size 8: must be a multiple of 16"):
            read_flags(FLAGS.split(), num_gpus=4)
        with pytest.raises(UsageError, match=r"^--transformer-impl local: cannot"):
            shape_profile(model(transformer_impl="local"), find_gpu("h200"), 1)
        assert all(gpu.source for gpu in GPUS.values())


    def test_scaling_is_the_arithmetic_of_the_other_shape(self) -> None:
        old = shape_profile(read_flags(FLAGS.split()).model, find_gpu("h200"), 2)
        new = replace(old.model, seq_length=16384, micro_batch_size=1)
        scaled, made = with_tokens(old, 16384, 1), shape_profile(new, find_gpu("h200"), 2)
        assert scaled.model == new
        assert scaled.layers[1].saved_mib == made.layers[1].saved_mib
        assert scaled.layers[1].forward_ms == pytest.approx(made.layers[1].forward_ms)
        assert scaled.non_layer.peak_gib == pytest.approx(made.non_layer.peak_gib)


def test_a_plan_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    path = tmp_path / "plan.json"
    done = run("--gpu", "h200", "--memory-gib", "83", "--save", path, "--table", "--", *FLAGS.split())
    heading, table = run("--show", path).split("\n\n")
    assert table.strip() in done
    said = load_plan(path).predicted
    assert said is not None
    for words in ("16 layers of 4096", "4 x 4096", "83.00 GiB", f"{said.peak_gib:.2f} GiB", f"{said.step_ms:,.1f}"):
        assert words in heading
    by_hand = replace(load_plan(path), predicted=None, budget_gib=None, classes=(
        PlanClass("0-3", {"mlp/0": SitePlan("swap", 0.25)}), PlanClass("4", {}, ("layer",)), PlanClass("5", {}),
    ))  # fmt: skip
    save_plan(by_hand, path)
    lines = [" ".join(line.split()) for line in run("--show", path).splitlines()]
    assert {"0-3 mlp/0 0.25 swap", "4 (section layer) recompute recomputed as a whole", "5 (no sites) keep",
            "budget none"} <= {*lines}  # fmt: skip
