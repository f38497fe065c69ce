"""Report to Megatron's argument checks the GPU generation that has the fewest requirements."""

from __future__ import annotations

from collections.abc import Callable

from megatron.swap.patches.registry import Patch

_BLACKWELL = 10  # from this generation on Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS


def _build(original: Callable[[], int]) -> Callable[[], int]:
    def get_device_arch_version() -> int:
        return _BLACKWELL

    return get_device_arch_version


# Imported by name into the module that checks the arguments.
PATCHES = (
    Patch(
        module="megatron.training.arguments",
        attribute="get_device_arch_version",
        build=_build,
        reason="asks CUDA for the properties of device 0, which raises; tensor parallelism needs it",
        sources={"megatron-core 0.18.2": "b7e375abfdb1f4f5b5c237090bd1df62a0fdcc1db8326564391c6d38899a09b6"},
    ),
)
