"""Inference of a model of 32 or 70 billion weights with weights in host memory: ``swap.weights`` beside accelerate.

    python -m benchmarks.weights_inference --shape 32b --device-layers 0 --method swap
    python -m benchmarks.weights_inference --shape 32b --device-layers 0 --method accelerate

prints a line of JSON: tokens per second of the prompt (a forward that fills the cache of keys and values), tokens per
second of greedy decoding after it, the milliseconds of both, the most device memory allocated and reserved, the host
memory that ``swap.weights`` pins, and the tokens that were decoded first, which do not depend on the method.
``accelerate`` is its ``cpu_offload`` of the same layers, from pageable memory; for ``accelerate-pinned`` their weights
are pinned before. With ``--method device`` all layers are on the device. Random bf16 weights.

``--digests outputs`` adds a number for each layer's output in the last prompt and each decoding, made from its bits:
other bits give another number. ``--digests weights`` (``swap`` and ``device``) also adds a number for each layer's
weights, and ``wrong_weights``: calls, as pairs of call and layer, whose weights were others than at the end.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import batched
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from megatron import swap
from torch import nn

from benchmarks.large_model import SHAPES, build, fill
from benchmarks.training_loop import DEVICE, GIB, peaks, print_row, timed
from megatron.swap.engine.checksum import checksum

OUTPUTS, WEIGHTS = "outputs", "weights"
METHODS = SWAP, ACCELERATE, ACCELERATE_PINNED, ON_DEVICE = ("swap", "accelerate", "accelerate-pinned", "device")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=tuple(SHAPES), default="32b")
    options.add_argument("--layers", type=int, help="default: as the shape")
    options.add_argument("--device-layers", type=int, default=0, help="layers whose weights stay on the device")
    options.add_argument("--batch", type=int, default=8, help="sequences")
    options.add_argument("--tokens", type=int, default=2048, help="of the prompt of each sequence")
    options.add_argument("--decode", type=int, default=4, help="tokens to decode after it, for each sequence")
    options.add_argument("--steps", type=int, default=2, help="prompts to time, after another one")
    options.add_argument("--method", choices=METHODS, default=SWAP)
    options.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="transformers' implementation")
    options.add_argument("--digests", choices=(OUTPUTS, WEIGHTS), help="what to compare bit by bit")
    return options


def _checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return checksums of the bytes of ``tensors``, on their device. Nobody waits for them."""
    return torch.cat([checksum(tensor.reshape(-1).view(torch.uint8)) for tensor in tensors])


def _number(checksums: torch.Tensor) -> int:
    return zlib.crc32(checksums.cpu().numpy().tobytes())


class Digests:
    """Digests of the outputs of ``layers``, and of their weights, call by call.

    Make it behind ``swap.weights``, whose hooks are then around these: they find the weights on the device.
    """

    def __init__(self, layers: Iterable[nn.Module], kind: str) -> None:
        self._outputs: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._layers = list(layers)
        for layer in self._layers:
            if kind == WEIGHTS:
                layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._behind)

    def begin(self) -> None:
        """Forget the calls so far."""
        self._outputs.clear()
        self._weights.clear()

    def _before(self, layer: nn.Module, inputs: object) -> None:
        self._weights.append(_checksums(layer.parameters()))

    def _behind(self, layer: nn.Module, inputs: object, output: Any) -> None:
        self._outputs.append(_checksums([output if torch.is_tensor(output) else output[0]]))

    def fields(self) -> dict[str, Any]:
        """Return the fields of the row. Layers have their weights where they lie between calls."""
        fields: dict[str, Any] = {"outputs": self._by_call(self._outputs)}
        if self._weights:
            ends = [_number(_checksums(weight.to(DEVICE) for weight in layer.parameters())) for layer in self._layers]
            calls = [[one != end for one, end in zip(call, ends, strict=True)] for call in self._by_call(self._weights)]
            wrong = [(number, layer) for number, call in enumerate(calls) for layer in range(len(ends)) if call[layer]]
            fields |= {"weights": ends, "wrong_weights": wrong}
        return fields

    def _by_call(self, checksums: list[torch.Tensor]) -> list[list[int]]:
        return [[_number(one) for one in call] for call in batched(checksums, len(self._layers))]


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run prompts and decode, and return the row."""
    start = time.perf_counter()
    num_on_device = None if options.method == ON_DEVICE else options.device_layers
    model, host_layers = build(options.shape, options.layers, num_on_device, attention=options.attention)
    model.eval()
    with ExitStack() as stack:
        swapped = stack.enter_context(swap.weights(model, host_layers)) if options.method == SWAP else None
        if options.method == ACCELERATE_PINNED:
            for parameter in (parameter for layer in host_layers for parameter in layer.parameters()):
                parameter.data = torch.empty_like(parameter, pin_memory=True)
        fill(model)
        prompt = torch.randint(model.config.vocab_size, (options.batch, options.tokens), device=DEVICE)
        if options.method in (ACCELERATE, ACCELERATE_PINNED):
            for layer in host_layers:
                accelerate.cpu_offload(layer, execution_device=torch.device(DEVICE))
        digests = Digests(model.model.layers, options.digests) if options.digests else None
        setup_s = time.perf_counter() - start
        made: list[torch.Tensor] = []
        cache: Any = None

        def run(tokens: torch.Tensor) -> None:
            nonlocal cache
            outputs = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = outputs.past_key_values
            made.append(outputs.logits[:, -1:].argmax(-1))

        def prefill() -> None:
            nonlocal cache
            cache = None
            made.clear()
            if digests is not None:
                digests.begin()
            run(prompt)

        prefill()
        prefill_ms = timed(prefill, options.steps)
        run(made[-1])
        decode_ms = timed(lambda: run(made[-1]), options.decode)
        given = ("method", "attention", "shape", "batch", "tokens")
        row: dict[str, Any] = {name: getattr(options, name) for name in given}
        row |= {"layers": len(model.model.layers), "device_layers": len(model.model.layers) - len(host_layers)}
        row |= {"prefill_tokens_per_s": round(1e3 * options.batch * options.tokens / prefill_ms, 1)}
        row |= {"prefill_ms": round(prefill_ms, 1), "decode_tokens_per_s": round(1e3 * options.batch / decode_ms, 2)}
        row |= {"decode_ms": round(decode_ms, 1), **peaks(), "setup_s": round(setup_s, 1)}
        row["pinned_gib"] = round(swapped.stats.host_bytes / GIB, 3) if swapped is not None else 0.0
        row["decoded"] = torch.cat(made, 1)[0].tolist()
        row |= digests.fields() if digests is not None else {}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the row."""
    options = parser().parse_args(arguments)
    if options.digests == WEIGHTS and options.method in (ACCELERATE, ACCELERATE_PINNED):
        parser().error(f"--digests {WEIGHTS} goes with --method {SWAP} and {ON_DEVICE}, not with {options.method}")
    print_row(measure, options)


if __name__ == "__main__":
    main()
