"""Offloading of activations by other libraries, as contexts around forward and backward of a step.

- `offload`: transformers' `offload=True`. Layers are checkpointed, and checkpoints are copied to pinned host memory on
  the compute stream.
- `trl`: TRL's `OffloadActivations`, around forward and backward, as its `SFTTrainer` has it.
- `torchtune`: torchtune's `OffloadActivations`, around forward, as its recipes have it.
- `trl+checkpointing`, `torchtune+checkpointing`: the same, and layers are checkpointed. Checkpoints are offloaded.

TRL and torchtune need a GPU. The package torchtune needs ten others and an old torchao, so one file of it is run alone.
"""

import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.training_loop import CHECKPOINT

OFFLOAD = "offload"
WITH_CHECKPOINTING = "+checkpointing"
LIBRARIES = ("trl", "torchtune")
METHODS = (OFFLOAD, *LIBRARIES, *(library + WITH_CHECKPOINTING for library in LIBRARIES))


class Offloader:
    """Contexts of one method, around the forward of each step and around the whole step."""

    def __init__(self, method: str, model: Any) -> None:
        self.forward: AbstractContextManager[Any] = nullcontext()
        self.step: AbstractContextManager[Any] = nullcontext()
        library = method.removesuffix(WITH_CHECKPOINTING)
        if library == OFFLOAD:
            model.gradient_checkpointing_enable(CHECKPOINT, offload=True)
        elif method != library:
            model.gradient_checkpointing_enable(CHECKPOINT)
        if library == "trl":
            self.step = _trl(model)
        elif library == "torchtune":
            self.forward = torchtune_module().OffloadActivations()


def _trl(model: Any) -> AbstractContextManager[Any]:
    _find("trl")
    from accelerate import PartialState  # type: ignore[import-untyped]
    from trl.models.activation_offloading import OffloadActivations  # type: ignore[import-not-found]

    PartialState()  # TRL says through accelerate's log that host memory runs out, and that log needs it
    context = OffloadActivations()
    context.update_model_params(model)  # weights that autograd saves as views stay on the GPU
    return context  # type: ignore[no-any-return]


def torchtune_module() -> ModuleType:
    """Return torchtune's module of offloading, with empty classes for those of torchao and of its own models."""
    path = _find("torchtune") / "training" / "_activation_offloading.py"
    absent = {"torchao": (), "torchao.dtypes": (), "torchao.dtypes.nf4tensor": ("NF4Tensor",), "torchtune": (),
              "torchtune.modules": ("TiedLinear",), "torchtune.utils": ("get_logger",)}  # fmt: skip
    before = {name: sys.modules.get(name) for name in absent}
    try:
        for name, contents in absent.items():
            sys.modules[name] = ModuleType(name)
            for content in contents:
                setattr(sys.modules[name], content, type(content, (), {"__init__": lambda self, *_: None}))
        spec = importlib.util.spec_from_file_location("torchtune_activation_offloading", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, there in before.items():
            if there is None:
                del sys.modules[name]
            else:
                sys.modules[name] = there
    return module


def _find(library: str) -> Path:
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{library} is not installed: pip install --no-deps {library}, or put its unpacked wheel on PYTHONPATH."
        )
    return Path(spec.submodule_search_locations[0])
