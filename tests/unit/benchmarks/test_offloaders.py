"""Offloading by other libraries, as far as it runs without a GPU and without them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks import any_model, offloaders

TINY = "--layers 3 --tokens 16 --hidden-size 32 --vocab-size 64 --steps 2"
MODULE = """
import torchao
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TiedLinear
from torchtune.utils import get_logger
from contextlib import nullcontext as OffloadActivations
log = get_logger("DEBUG")
"""


@pytest.mark.parametrize("library", offloaders.LIBRARIES)
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=f"^{library} is not installed: pip install"):
        offloaders.Offloader(library, torch.nn.Linear(1, 1))


def test_one_file_of_torchtune_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchtune" / "training"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise AssertionError\n")
    (folder / "_activation_offloading.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    with offloaders.Offloader("torchtune", torch.nn.Linear(1, 1)).forward:
        assert {name for name in sys.modules if "torchtune" in name} == {name for name in before if "torchtune" in name}


@pytest.mark.slow
def test_offloaded_checkpoints_change_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.modeling_utils as loaded

    packed: list[int] = []

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        """Takes the place of ``save_on_cpu``, which cannot pin without a GPU."""

        def __init__(self, pin_memory: bool, device_type: str) -> None:
            super().__init__(lambda tensor: packed.append(tensor.nbytes) or tensor.clone(), lambda tensor: tensor)

    monkeypatch.setattr(loaded, "save_on_cpu", Counted)
    measured = partial(map, lambda method: any_model.measure(any_model.parser().parse_args([*TINY.split(), *method])))
    nothing, offload = measured([("--method", "nothing"), ("--method", "offload")])
    assert nothing["losses"] == offload["losses"]
    assert packed
