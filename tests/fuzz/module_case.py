"""Random ``nn.Module``s and training loops around them, with and without ``swap.activations``, compared to the bit.

A layer is one of ``LAYERS``, a step of the loop one of ``STEPS``: each uses autograd in a way that swapping must not
change. Where plain PyTorch raises an error (a saved tensor was changed in place), swapping must raise one too.
"""

import contextlib
import copy
import functools
import gc
import random
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from megatron import swap
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.swap.engine import offload
from tests.fuzz.records import Record, difference

WIDTH = 16
Layer = Callable[[random.Random], nn.Module]


class Lambda(nn.Module):
    """A layer around one linear: ``function(linear, hidden)``."""

    def __init__(self, function: Callable[[nn.Linear, torch.Tensor], Any], out: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, out), function

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.function(self.linear, hidden)


def mlp(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + functional.gelu(linear(hidden)) @ linear.weight


def in_place(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    out = linear(hidden).add_(hidden).relu_()
    return hidden + out.mul(1.5).mul_(0.9).sigmoid_()


def views(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Parts of one storage, with offsets and strides, that meet themselves again."""
    query, key, value = linear(hidden).view(-1, 3, WIDTH).unbind(1)
    flat = query.t().contiguous().view(-1)[WIDTH:]
    return hidden + (query * key).softmax(-1) * value + flat.view(WIDTH, -1)[:, 0] * key[::2].sum(0)


def attention(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    heads = linear(hidden).view(-1, 3, 2, WIDTH // 2).permute(1, 2, 0, 3)
    out = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], dropout_p=0.1, is_causal=True)
    return hidden + out.transpose(0, 1).reshape(-1, WIDTH)


def expanded(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    mean = linear(hidden).mean(0, keepdim=True).expand_as(hidden)
    return hidden * mean.exp().clamp(max=2)


def gathered(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    out = linear(hidden)
    order = out.detach().sum(1).argsort()
    values, places = out.topk(4, dim=1)
    return hidden.index_select(0, order) + torch.zeros_like(hidden).scatter(1, places, values.tanh())


def complex_numbers(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(linear(hidden))
    return hidden + torch.fft.irfft(spectrum * spectrum.conj().resolve_conj(), n=WIDTH).tanh()


def double_precision(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + (linear(hidden).double().cumsum(0) / 8).sin().to(hidden.dtype)


def empty_parts(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    out = linear(hidden)
    return hidden + torch.cat([out[:0].exp(), out.tanh(), out[:0].sin()]) + out.sum().sigmoid()


def masked(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    out = linear(hidden)
    return torch.where(out > 0, out, hidden).masked_fill(hidden > 2, 1.0) + functional.dropout(hidden, 0.3)


def same_twice(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """One tensor is saved by many functions, through aliases and views of it."""
    out = linear(hidden)
    alias, flat = out.detach().requires_grad_(False), out.view(-1)
    return hidden + out * out + out * alias + (flat * flat.flip(0)).view_as(out)


class Cubic(torch.autograd.Function):
    """Saves its input, a view of it, its output, and something that is no tensor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        out = value * value * value * factor
        ctx.save_for_backward(value, value[1:], out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        value, tail, out = ctx.saved_tensors
        extra = torch.cat([torch.zeros_like(value[:1]), tail * 0]) + out * 0
        return grad * 3 * ctx.factor * value * value + extra, None


def custom_function(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + Cubic.apply(linear(hidden).tanh(), 0.5)


def in_checkpoint(use_reentrant: bool, linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    inner = lambda value: functional.dropout(mlp(linear, value), 0.2)  # noqa: E731
    return checkpoint(inner, linear(hidden), use_reentrant=use_reentrant) + hidden


def with_hooks(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    out = linear(hidden).tanh()
    if out.requires_grad:
        out.register_hook(lambda grad: grad * 0.5)
    return hidden + out * out


def without_grad_inside(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = linear(hidden).abs().mean().clamp(min=0.1)
    return hidden + linear(hidden / scale).sigmoid()


def many_outputs(linear: nn.Linear, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    out = linear(hidden)
    return hidden + out.tanh(), {"all": [(out, out.view(-1)[::3])], "count": 3}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.cell(hidden.unsqueeze(1))[0].squeeze(1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.norm(self.conv(hidden.unsqueeze(1))), inplace=True)
        return hidden + functional.max_pool1d(out, 2).flatten(1)


def of(function: Callable[..., Any], out: int = WIDTH) -> Layer:
    return lambda _: Lambda(function, out)


def encoder_layer(choose: random.Random) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=choose.choice([0.0, 0.2]), norm_first=choose.random() < 0.5)


LAYERS: dict[str, Layer] = {
    "mlp": of(mlp), "in place": of(in_place), "views": of(views, 3 * WIDTH), "attention": of(attention, 3 * WIDTH),
    "expanded": of(expanded), "gathered": of(gathered), "complex": of(complex_numbers), "double": of(double_precision),
    "empty": of(empty_parts), "masked": of(masked), "same twice": of(same_twice), "custom": of(custom_function),
    "checkpoint": of(functools.partial(in_checkpoint, False)),
    "reentrant": of(functools.partial(in_checkpoint, True)),
    "hooks": of(with_hooks), "no grad": of(without_grad_inside), "outputs": of(many_outputs),
    "gru": lambda _: Recurrent(), "conv": lambda _: Images(), "encoder": encoder_layer,
    "linear": lambda _: nn.Linear(WIDTH, WIDTH), "norm": lambda _: nn.LayerNorm(WIDTH),
}  # fmt: skip


class Planned(Exception):
    """A forward or backward ends with it, on purpose."""


class Model(nn.Module):
    """Layers in a row. Some stand at several places, some are frozen, some share their weights."""

    def __init__(self, layers: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(layers), order
        self.failing: int | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        extra = hidden.new_zeros(())
        for number in self.order:
            if number == self.failing:
                raise Planned
            hidden = self.layers[number](hidden)
            if isinstance(hidden, tuple):
                hidden, more = hidden
                extra = extra + more["all"][0][1].square().mean()
        return functional.layer_norm(hidden, (WIDTH,)) + extra


Run = Callable[[Model, torch.Tensor, random.Random], Any]
"""A step, forward and backward: returns what is to be compared beside the gradients."""


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() * output.float().cos()).mean()


def plain(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    (loss := loss_of(model(batch))).backward()
    return loss


def input_gradient(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    batch.requires_grad_()
    return plain(model, batch, choose), batch.grad


def several_forwards(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    losses = [loss_of(model(part)) for part in batch.split(choose.choice([3, 4, 6]))]
    order = list(losses)
    choose.shuffle(order)
    for loss in order:
        loss.backward()
    return losses


def one_backward(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    loss = loss_of(model(batch)) + loss_of(model(batch * 0.5))
    loss.backward()
    return loss


def retained(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    loss = loss_of(model(batch))
    for _ in range(choose.randint(1, 2)):
        loss.backward(retain_graph=True)
    if choose.random() < 0.5:
        model(batch)  # a graph between the two backwards
    loss.backward()
    return loss


def double_backward(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    batch.requires_grad_()
    loss = loss_of(model(batch))
    (grad,) = torch.autograd.grad(loss, batch, create_graph=True)
    (loss + grad.square().sum()).backward()
    return loss, grad


def part_of_the_graph(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    some = choose.sample(trained, max(1, len(trained) // 2))
    return torch.autograd.grad(loss_of(model(batch)), some, allow_unused=True)


def evaluated(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    model.eval()
    with choose.choice([torch.no_grad, torch.inference_mode])():
        seen = loss_of(model(batch)).clone()
    model.train()
    with torch.no_grad():
        other = loss_of(model(batch))  # in train mode: batch norm's statistics change
    return seen, other, plain(model, batch, choose)


def evaluated_between(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    loss = loss_of(model(batch))
    with torch.no_grad():
        other = loss_of(model(batch * 2))
    if not any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        loss.backward()
    return loss, other


def thrown_away(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    away = model(batch)
    seen = loss_of(away).detach()
    if choose.random() < 0.5:
        del away
    return seen, plain(model, batch, choose)


def failing_forward(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    model.failing = choose.choice(model.order)
    with contextlib.suppress(Planned):
        model(batch)
    model.failing = None
    return plain(model, batch, choose)


def failing_backward(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    def fail(_: torch.Tensor) -> None:
        raise Planned

    layer = model.layers[choose.choice(model.order)]
    params = [param for param in layer.parameters() if param.requires_grad]
    handle = params[0].register_hook(fail) if params else None
    with contextlib.suppress(Planned):
        plain(model, batch, choose)
    if handle is not None:
        handle.remove()
    model.zero_grad()
    return plain(model, batch, choose)


def changed_in_place(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    """What autograd saved is changed before backward: plain PyTorch refuses where it is needed."""
    kept: list[torch.Tensor] = []
    layer = model.layers[choose.choice(model.order)]
    handle = layer.register_forward_hook(lambda _, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    loss = loss_of(model(batch))
    handle.remove()
    with torch.no_grad():
        kept[0].mul_(0.5)
    loss.backward()
    return loss


def mixed_precision(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(batch))
    loss.backward()
    return loss


def in_a_thread(model: Model, batch: torch.Tensor, choose: random.Random) -> Any:
    with ThreadPoolExecutor(1) as threads:
        loss = loss_of(model(batch))
        threads.submit(loss.backward).result()
    return loss


STEPS: dict[str, Run] = {
    run.__name__: run
    for run in (
        plain, plain, plain, input_gradient, several_forwards, one_backward, retained, double_backward, evaluated,
        part_of_the_graph, evaluated_between, thrown_away, failing_forward, failing_backward, changed_in_place,
        mixed_precision, in_a_thread,
    )
}  # fmt: skip


class Case:
    """A model, a loop, and options of ``swap.activations``."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(f"modules {seed}")
        self.seed = seed
        self.names = [choose.choice(list(LAYERS)) for _ in range(choose.randint(4, 8))]
        self.order = list(range(len(self.names)))
        if choose.random() < 0.25:
            self.order.insert(choose.randrange(len(self.order)), choose.randrange(len(self.names)))
        self.frozen = [number for number in self.order if choose.random() < 0.08]
        self.is_tied = choose.random() < 0.2
        self.steps = [choose.choice(list(STEPS)) for _ in range(choose.randint(2, 5))] + ["plain"]
        self.rows = [choose.choice([8, 12, 12, 24]) for _ in self.steps]
        self.optimizer = choose.choice(["AdamW", "SGD"])
        self.commit_bytes = choose.choice([1, 1, 2048, 1 << 24])
        """Copies start as soon as so many bytes are pending; tiny layers never have the product's 16 MiB."""
        self.options: dict[str, Any] = {
            "layers": choose.choice(["all", "all", "every:2", f"0-{choose.randint(1, 2)}"]),
            "min_mib": choose.choice([0, 0, 0.0005, 0.001]),
            "prefetch_gib": choose.choice([None, None, 1e-7, 1e-6, 1e-5]),
            # A GRU's kernels write to parts of a storage without telling autograd, so checksums would differ.
            "verify": choose.random() < 0.2 and "gru" not in self.names,
            "cpu_delay_ms": choose.choice([0, 0.1, 0.5, 1]),
        }

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        choose = random.Random(self.seed)
        layers = [LAYERS[name](choose) for name in self.names]
        alike = [layer for layer in layers if isinstance(layer, Lambda) and layer.linear.out_features == WIDTH]
        if self.is_tied and len(alike) > 1:
            alike[-1].linear.weight = alike[0].linear.weight
        for number in self.frozen:
            layers[number].requires_grad_(False)
        return Model(layers, self.order)

    def train(self, model: Model) -> Record:
        record = Record()
        torch.manual_seed(self.seed + 1)
        choose = random.Random(self.seed + 1)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = getattr(torch.optim, self.optimizer)(trained, lr=1e-3)
        for number, (name, num_rows) in enumerate(zip(self.steps, self.rows, strict=True)):
            state = choose.getstate()
            batch = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            try:
                record.note(name, STEPS[name](model, batch, choose))
            except RuntimeError as error:  # as plain PyTorch: it is compared too
                if isinstance(error, swap.SwapError) and "in place" not in str(error):
                    raise
                record.note(name, "an error")
                model.zero_grad()
                torch.manual_seed(number)  # the error may come in another place
                model.failing = None
            choose.setstate(state)
            choose.random()
            record.note("gradients", {path: param.grad for path, param in model.named_parameters()})
            optimizer.step()
        record.note("state", model.state_dict())
        record.note("optimizer", optimizer.state_dict()["state"])
        return record


def run_seed(seed: int) -> dict[str, Any]:
    """Return the row of a case."""
    case = Case(seed)
    row: dict[str, Any] = {"case": vars(case), "features": [*case.names, *case.steps], "figures": {}}
    model = case.model()
    twin = copy.deepcopy(model)
    try:
        expected = case.train(twin)
    except Exception as error:
        return row | {"outcome": "skipped", "error": f"{type(error).__name__}: {error}"}
    try:
        with (
            mock.patch.object(offload, "COMMIT_BYTES", case.commit_bytes),
            swap.activations(model, **case.options) as swapped,
        ):
            found = case.train(model)
            gc.collect()
            stats = swapped.stats()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return row | {"outcome": "failed", "error": text, "trace": traceback.format_exc()}
    row["figures"] = {
        "offloaded_bytes": stats.out_bytes, "reloaded_bytes": stats.in_bytes, "kept_bytes": stats.stayed_bytes,
        "late": stats.num_late,
    }  # fmt: skip
    if line := difference(expected, found):
        return row | {"outcome": "different", "error": line}
    if stats.held_bytes:
        return row | {"outcome": "failed", "error": f"{stats.held_bytes} bytes of host memory are still leased"}
    return row | {"outcome": "equal"}
