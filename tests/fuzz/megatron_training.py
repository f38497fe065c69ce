"""Trains with Megatron's real trainer in this process, again and again.

``train`` calls ``pretrain`` as ``pretrain_gpt_swap.py`` does, with random text. ``run_program`` runs that program
itself. Between two trainings Megatron's global state is destroyed as upstream's in-process restart does it, and the
process groups are made anew.
"""

import contextlib
import functools
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch

import pretrain_gpt_swap as program

program.prepare(["--swap-log-level", "debug"])  # before Megatron is imported; output goes nowhere anyway

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding  # noqa: E402
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402
from megatron.core.transformer.moe import moe_logging  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402
from megatron.training import pretrain, training  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

from megatron.swap.arguments import add_swap_args  # noqa: E402
from megatron.swap.attention import sdpa_layer_spec  # noqa: E402
from megatron.swap.megatron_lm.optimizer_adapter import unchained  # noqa: E402
from megatron.swap.patches import registry  # noqa: E402
from megatron.swap.session import SwapSession  # noqa: E402
from tests.fuzz.records import Record  # noqa: E402

registry.source_hash = functools.cache(registry.source_hash)  # else a tenth of a training's time


@dataclass(frozen=True)
class Data:
    """Random text: tokens of the micro-batches in turn, if not the whole sequence, and whether documents are masked."""

    lengths: tuple[int, ...] = ()
    with_mask: bool = False


@dataclass
class Trained:
    record: Record = field(default_factory=Record)
    figures: dict[str, float] = field(default_factory=dict)


class RandomText(torch.utils.data.Dataset):
    """Samples that follow from their number alone."""

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, with_mask: bool) -> None:
        self._num_samples, self._seq_length, self._vocab_size = num_samples, seq_length, vocab_size
        self._with_mask = with_mask

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(number))
        length = self._seq_length
        text = torch.randint(self._vocab_size, (length + 1,), generator=generator)
        sample = {
            "tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(length),
            "loss_mask": (torch.rand(length, generator=generator) > 0.1).float(),
        }  # fmt: skip
        if self._with_mask:
            document = (torch.rand(length, generator=generator) < 0.2).cumsum(0)
            sees = (document[:, None] == document[None, :]).tril()
            sample["attention_mask"] = ~sees[None]
        return sample


class World:
    """The ranks that train together, this process among them. ``port``: where their store is served."""

    def __init__(self, rank: int, num_ranks: int, port: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store: Any = torch.distributed.HashStore()
        if num_ranks > 1:
            self._store = torch.distributed.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
        self._number = 0
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks)
        )

    @contextlib.contextmanager
    def process_group(self) -> Iterator[None]:
        self._number += 1
        store = torch.distributed.PrefixStore(f"run {self._number}", self._store)
        torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.num_ranks)
        try:
            yield
        finally:
            training.destroy_global_state()
            moe_logging._MOE_METRICS_TRACKER = None  # left over, and as long as the last model
            MTPLossLoggingHelper.tracker.clear()
            for cached in (RotaryEmbedding.forward, YarnRotaryEmbedding.forward):
                getattr(cached, "cache_clear", lambda: None)()  # it holds models, and they their process groups
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.collect()  # each group that lives on has three threads

    def gather(self, text: str, timeout_s: float = 600.0) -> list[str]:
        """Return the texts of all ranks, by rank; it needs no process group.

        Raises:
            torch.distributed.DistStoreError: a rank has not called this in time.
        """
        self._number += 1
        keys = [f"gather {self._number} {rank}" for rank in range(self.num_ranks)]
        self._store.set(keys[self.rank], text)
        self._store.wait(keys, timedelta(seconds=timeout_s))
        return [self._store.get(key).decode() for key in keys]


def train(world: World, flags: str, data: Data, *, spec: str = "sdpa") -> Trained:
    """Train once. ``spec``: core attention of the local spec: ``sdpa``, the product's, or ``local``, Megatron's own."""
    trained = Trained()
    sys.argv = ["fuzz", *shlex.split(flags)]
    batches = _cut(program.get_batch, data.lengths)
    with _trainer(world, trained) as sessions, mock.patch.object(program, "get_batch", batches):
        args = parse_and_validate_args(extra_args_provider=add_swap_args)
        model_config = gpt_config_from_args(args)
        if spec == "sdpa":
            model_config.transformer_layer_spec = sdpa_layer_spec(args.swap_deterministic, args.reset_attention_mask)
        sessions.append(SwapSession.install(args, model_config))
        container = pretrain_cfg_container_from_args(args, model_config)
        try:
            pretrain(container, _provider(args, data), ModelType.encoder_or_decoder, program.forward_step)
        except SystemExit as stop:  # as upstream ends at --exit-interval
            if stop.code:
                raise RuntimeError(f"training ended with exit status {stop.code}") from stop
    return trained


def run_program(world: World, argv: list[str]) -> Record:
    trained = Trained(Record(digests=True))
    sys.argv = ["pretrain_gpt_swap.py", *argv]
    with _trainer(world, trained) as sessions:
        install = SwapSession.install

        def noted(*arguments: Any, **options: Any) -> SwapSession:
            sessions.append(install(*arguments, **options))
            return sessions[-1]

        with mock.patch.object(SwapSession, "install", noted):
            program.main()
    return trained.record


@contextlib.contextmanager
def _trainer(world: World, trained: Trained) -> Iterator[list[SwapSession]]:
    """Return a context in which Megatron trains once. Its results go to ``trained``; it closes the yielded sessions."""
    sessions: list[SwapSession] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(world.process_group())
        stack.enter_context(mock.patch.object(training.ft_integration, "setup"))  # would parse the flags again
        stack.enter_context(_recorded(trained, sessions))
        try:
            yield sessions
        finally:
            while sessions:  # the cache of hashed functions holds the list, and a session its model
                sessions.pop().close()


def _provider(args: Any, data: Data) -> Callable[..., Any]:
    def provide(num_samples: list[int], vp_stage: int | None = None) -> list[RandomText]:
        return [RandomText(100_000, args.seq_length, args.vocab_size, data.with_mask) for _ in num_samples]

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def _cut(get_batch: Callable[..., list[Any]], lengths: tuple[int, ...]) -> Callable[..., list[Any]]:
    number = -1

    def cut(*arguments: Any) -> list[Any]:
        nonlocal number
        number += 1
        batch = get_batch(*arguments)
        if not lengths:
            return batch
        length = lengths[number % len(lengths)]
        return [value if value is None else value[:, :length].contiguous() for value in batch]

    return cut


@contextlib.contextmanager
def _recorded(trained: Trained, sessions: list[SwapSession]) -> Iterator[None]:
    """Note results of all steps and evaluations, and what is left in the end: parameters and optimizer state."""
    note = trained.record.note

    def wrap(name: str, wrapper: Callable[..., Any]) -> Any:
        original = getattr(training, name)
        return mock.patch.object(training, name, functools.wraps(original)(functools.partial(wrapper, original)))

    def train_step(original: Any, step: Any, iterator: Any, model: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        result = original(step, iterator, model, optimizer, *args, **kw)
        note("step", result)
        for number, chunk in enumerate(model):
            note(f"chunk {number} gradients", {
                name: param.main_grad if hasattr(param, "main_grad") else param.grad
                for name, param in chunk.named_parameters() if param.requires_grad
            })  # fmt: skip
        return result

    def evaluate(original: Any, *args: Any, **kw: Any) -> Any:
        result = original(*args, **kw)
        note("evaluation", result[0])
        return result

    def train(original: Any, step: Any, model: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        try:
            result = original(step, model, optimizer, *args, **kw)
        except SystemExit:
            note_end(model, optimizer)
            raise
        note_end(model, optimizer)
        return result

    def note_end(model: Any, optimizer: Any) -> None:
        note("random", [torch.get_rng_state(), get_cuda_rng_tracker().get_states()])
        for number, chunk in enumerate(model):
            note(f"chunk {number}", dict(chunk.named_parameters()))
        optimizer.state_dict()  # offloaded state comes back
        for number, one in enumerate(unchained(optimizer)):
            params = [param for group in one.optimizer.param_groups for param in group["params"]]
            note(f"optimizer {number}", [[param, one.optimizer.state.get(param)] for param in params])
        for chunk in model:
            getattr(chunk, "grad_accs", []).clear()  # a circle through C++, which Python does not collect
        for session in sessions:
            trained.figures.update(figures_of(session))

    with wrap("train_step", train_step), wrap("evaluate", evaluate), wrap("train", train):
        yield


def figures_of(session: SwapSession) -> dict[str, float]:
    report = session._report()
    moved = [step.moved for step in report.steps]
    return {
        "offloaded_bytes": sum(step.out_bytes for step in moved),
        "reloaded_bytes": sum(step.in_bytes for step in moved),
        "recomputed_bytes": sum(step.recomputed_bytes for step in moved),
        "disk_bytes": report.disk_leased_peak_bytes + report.optimizer_disk_bytes,
        "optimizer_bytes": report.optimizer_host_bytes + report.optimizer_disk_bytes,
        "saved_peak_bytes": report.saved_peak_bytes or 0,
        "device_peak_bytes": report.device_peak_bytes or 0,
        "rescues": sum(step.num_rescues for step in report.steps),
        "plans": 0 if session.auto is None else int(session.auto.summary()["stages"][-1]["stage"] == "stable"),
        "kept_bytes": report.stayed_bytes,
        "late": sum(step.num_late for step in moved),
    }
