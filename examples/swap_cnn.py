"""A residual CNN whose activations are swapped: batch norm, ReLU in place, images with channels first and last.

    PYTHONPATH=. python examples/swap_cnn.py            # tiny: seconds, without a GPU too
    PYTHONPATH=. python examples/swap_cnn.py --large    # on a large GPU: time and memory as well

Images are random; nothing is downloaded. Runs on a GPU if there is one, else emulates it in RAM. Prints (figures differ
from machine to machine, the word `equal` does not):

    channels first: 8 blocks: 31 MiB out, 28 MiB in, 0 late, 5.4 ms waited, at most 10 MiB in host memory
    losses 1.8403 1.5424 1.7098: equal
    channels last: 8 blocks: 31 MiB out, 28 MiB in, 0 late, 10.5 ms waited, at most 10 MiB in host memory
    losses 1.8403 1.5424 1.7099: equal
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS: two runs on a GPU are equal

import torch
from megatron import swap
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_CLASSES = 4


@dataclass(frozen=True)
class Size:
    channels: int
    num_images: int
    width: int


TINY = Size(channels=16, num_images=8, width=32)
LARGE = Size(channels=128, num_images=64, width=128)


class Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.skip = nn.Conv2d(in_channels, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(images)))
        out = self.norm2(self.conv2(out))
        out += self.skip(images)
        return self.relu(out)


class ResidualNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stage1 = nn.Sequential(*(Block(channels, channels) for _ in range(4)))
        self.stage2 = nn.Sequential(Block(channels, wide, stride=2), *(Block(wide, wide) for _ in range(3)))
        self.head = nn.Linear(wide, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stage2(self.stage1(self.stem(images))).mean((2, 3)))


def net(size: Size, memory_format: torch.memory_format) -> ResidualNet:
    torch.manual_seed(0)
    return ResidualNet(size.channels).to(DEVICE, memory_format=memory_format)


def train(model: ResidualNet, size: Size, memory_format: torch.memory_format, num_steps: int = 3) -> list[float]:
    if size is LARGE:
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        images = torch.randn(size.num_images, 3, size.width, size.width, generator=generator)
        labels = torch.randint(NUM_CLASSES, (size.num_images,), generator=generator).to(DEVICE)
        images = images.to(DEVICE, memory_format=memory_format)
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds = time.perf_counter() - start  # last step: the first ones reserve memory and record the order
    if size is LARGE:
        print(f"{seconds * 1e3:.0f} ms a step, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the GPU")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="A residual CNN whose activations are swapped.")
    parser.add_argument("--large", action="store_true", help="larger images and blocks, on a large GPU")
    is_large = parser.parse_args().large
    if is_large and DEVICE == "cpu":
        parser.error("--large needs a GPU")
    size = LARGE if is_large else TINY
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    formats = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
    for name, memory_format in formats.items():
        plain = train(net(size, memory_format), size, memory_format)

        model = net(size, memory_format)
        # The stages are nn.Sequential: their blocks are the layers. min_mib: tiny images save little.
        with swap.activations(model, "all", min_mib=1.0 if is_large else 0.01) as swapped:
            losses = train(model, size, memory_format)

        print(f"{name}: {len(swapped.chosen)} blocks: {swapped.stats()}")
        print("losses", *(f"{loss:.4f}" for loss in losses), end=f": {'equal' if losses == plain else 'DIFFERENT'}\n")


if __name__ == "__main__":
    main()
