"""The contract of a tier, for every tier: a new one adds itself to ``TIERS``."""

import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron.swap.common.types import KIB, MIB, SwapError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.base import Tier
from megatron.swap.memory.tiers.disk import DiskTier
from megatron.swap.memory.tiers.host import HostTier
from tests.engine import HeldEvent

LIMIT_BYTES = 4 * MIB


def host_tier() -> Tier:
    return HostTier(HostPool(limit=LIMIT_BYTES, slab_bytes=MIB, pinned=False, poison=True))


def disk_tier() -> Tier:
    """Return a disk tier with buffers smaller than most storages."""
    return DiskTier(DiskFile(tempfile.gettempdir(), LIMIT_BYTES), 32 * KIB, pinned=False)


TIERS: dict[str, Callable[[], Tier]] = {"host": host_tier, "disk": disk_tier}
LIMIT_FLAGS = {HostTier: "--swap-host-gib", DiskTier: "--swap-disk-gib"}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    made = TIERS[request.param]()
    yield made
    made.close()
    if isinstance(made, DiskTier):
        made._disk.close()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice(longest_delay_s=0.001)
    yield made
    made.close()


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def there_and_back(tier: Tier, device: EmulatedDevice, sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Offload all ``sources``, then reload them in reverse order, as the manager does."""
    out_stream, in_stream = device.copy_stream("out"), device.copy_stream("in")
    slots = [tier.reserve(source.numel()) for source in sources]
    for slot, source in zip(slots, sources, strict=True):
        tier.write(device, out_stream, slot, source)
    device.wait(in_stream, device.record(out_stream))
    targets = [device.allocate(source.numel()) for source in sources]
    for slot, target in reversed(list(zip(slots, targets, strict=True))):
        tier.read(device, in_stream, slot, target)
    device.wait(device.current_stream(), device.record(in_stream))
    for slot in slots:
        slot.free()
    return targets


def test_slots_do_not_touch_each_other(tier: Tier, device: EmulatedDevice):
    sizes = (5000, 1, 70_000, 4095, 4096, 4097, MIB + 1)
    sources = [some_bytes(num_bytes, seed) for seed, num_bytes in enumerate(sizes)]
    for _ in range(3):  # the second time around the memory is used again, in another order
        sources.reverse()
        for target, source in zip(there_and_back(tier, device, sources), sources, strict=True):
            assert torch.equal(target, source)
    assert tier.stats().leased_bytes == 0


def test_write_and_read_only_enqueue(tier: Tier, device: EmulatedDevice):
    stream = device.copy_stream("both")
    source, target = some_bytes(4 * KIB), device.allocate(4 * KIB)
    held = HeldEvent()
    device.wait(stream, held)
    slot = tier.reserve(4 * KIB)
    tier.write(device, stream, slot, source)
    tier.read(device, stream, slot, target)
    assert bool((target == 0xFF).all()), "a copy ran while its stream was held back"
    held.open()
    device.wait(device.current_stream(), device.record(stream))
    assert torch.equal(target, source)
    slot.free()


def test_the_figures_are_exact(tier: Tier):
    assert tier.stats().leased_bytes == 0
    slots = [tier.reserve(64 * KIB) for _ in range(4)]
    assert tier.stats().leased_bytes == 256 * KIB
    slots[1].free()
    slots[2].free()
    stats = tier.stats()
    assert (stats.leased_bytes, stats.leased_peak_bytes) == (128 * KIB, 256 * KIB)
    assert stats.reserved_bytes >= stats.leased_peak_bytes
    for slot in (slots[0], slots[3]):
        slot.free()
    assert tier.stats().leased_bytes == 0


def test_a_full_tier_says_so_and_nothing_has_changed(tier: Tier):
    slots = [tier.reserve(MIB) for _ in range(LIMIT_BYTES // MIB)]
    before = tier.stats()
    with pytest.raises(SwapError, match=rf"limit.*{LIMIT_FLAGS[type(tier)]}"):
        tier.reserve(4 * KIB)
    assert tier.stats() == before
    slots[0].free()
    tier.reserve(MIB).free()
    for slot in slots[1:]:
        slot.free()
