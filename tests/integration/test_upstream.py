"""What Megatron 0.19.2 cannot do without TransformerEngine, swapping or not: the known limits of the pages."""

import importlib.util

import pytest

from tests.integration.harness import Trainer
from tests.integration.rows import UPSTREAM_CANNOT


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
@pytest.mark.nightly
@pytest.mark.parametrize(("flags", "ranks", "message"), UPSTREAM_CANNOT)
def test_fails_without_swapping(trainer: Trainer, flags: str, ranks: int, message: str) -> None:
    run = trainer.failing(f"{flags} --swap-layers none", ranks=ranks)
    assert message in run.output, run.tail
