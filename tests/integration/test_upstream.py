"""What Megatron 0.19.2 cannot do without TransformerEngine, swapping or not: the known limits of the pages."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.harness import Trainer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed"
)


@pytest.mark.upstream_cannot
@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 2,
                     "sequence parallel not supported by torch LayerNorm", id="sequence-parallel"),
        pytest.param("--context-parallel-size 2", 2, "the local spec's attention does not support it",
                     id="context-parallel"),
        pytest.param("--recompute-granularity selective --recompute-modules layernorm", 1, "FP8GlobalStateManager",
                     id="recompute-layernorm"),
    ],
)  # fmt: skip
def test_fails_without_swapping(trainer: Trainer, flags: str, ranks: int, message: str) -> None:
    run = trainer.failing(f"{flags} --swap-layers none", ranks=ranks)
    assert message in run.output, run.tail
