"""Drop the lines that Megatron prints at start-up without information for the user.

Only known lines are dropped, each by its beginning. All others are printed, among them every iteration's line and all
errors. Call ``hush()`` before anything of Megatron is imported, because Megatron warns while it is imported;
apply ``QUIET_PATCHES`` with the other patches.
"""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

# Beginnings of printed lines that repeat the settings, or tell the time.
_PRINTED = (
    "using world size: ",
    "Number of virtual stages per pipeline stage: ",
    "using torch.",
    "accumulate and all-reduce gradients in fp32",
    "setting global batch size to ",
    "> setting tensorboard ...",
    "> initializing torch distributed ...",
    "> initialized tensor model parallel with size ",
    "> initialized gtp weight remat with size ",
    "> initialized pipeline model parallel with size ",
    "> setting random seeds to ",
    "> compiling dataset index builder ...",
    ">>> done with dataset index builder.",
    "time to initialize megatron (seconds): ",
    "[after ",
    "[before ",
    "> building train, validation, and test datasets ...",
    " > datasets target sizes (minimum size):",
    "    train:      ",
    "    validation: ",
    "    test:       ",
    "done with setup ...",
    "training ...",
    "Overwriting rerun_state_machine.current_iteration from -1 to 0",
    "WARNING: one_logger package is required",
)

_FEATURE = "a start with few lines"

# Modules that print them. `print_rank_0` and `print_rank_last` print in common_utils, whichever module calls them.
_PRINTING_MODULES = (
    "megatron.training.arguments",
    "megatron.training.utils.common_utils",
    "megatron.training.initialize",
    "megatron.training.training",
    "megatron.training.global_vars",
)

# Warnings about optional packages. Their absence is a choice; the user guide says what they would change.
_WARNINGS = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"Only transformer-engine>=1.7.0 supports MoE experts",
    r"MimoModelConfig is experimental",
    r"The pynvml package is deprecated",
    r"Please specify --split when using --data-path",
    r"\s*It is recommended to use a ModelConfig",
    r"Detected a Jax installation but could not find",
    # Megatron's, with or without swapping: it names no device to its process groups, and builds DDP on a side stream.
    r"barrier\(\): using the device under current context",
    r"The AccumulateGrad node's stream does not match",
)

# Advice about a flag that orders CUDA's queues, which means nothing without CUDA.
_WARNINGS_WITHOUT_CUDA = (r"When using async grad allreduce it is recommended",)

# Loggers, and beginnings of the lines that they log.
_LOGGED = {
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    "megatron.core.rerun_state_machine": (
        "RerunStateMachine initialized",
        "Setting RerunStateMachine mode",  # around every evaluation
        "Result validation enabled",
    ),
    "megatron.core.models.gpt.gpt_model": ("GPTModel IS DEPRECATED",),
    "megatron.core.datasets.gpt_dataset": ("Unable to save",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCore's async save is deprecated",),
    "megatron.core.timers": tuple(
        f"(min, max) time across ranks (ms):\n    {name}"
        for name in (
            "model-and-optimizer-setup",
            "startup-",
            "evaluate",
            "save-checkpoint",
            "load-checkpoint",
        )
    ),
}


def hush() -> Callable[[], None]:
    """Drop known warnings and Megatron's informational log, except its timers.

    Returns:
        a function that undoes it.
    """
    old_filters = warnings.filters[:]
    for message in _WARNINGS if torch.cuda.is_available() else _WARNINGS + _WARNINGS_WITHOUT_CUDA:
        warnings.filterwarnings("ignore", message=message)
    filters = []
    for name, beginnings in _LOGGED.items():
        log_filter = _dropping(beginnings)
        logging.getLogger(name).addFilter(log_filter)
        filters.append((logging.getLogger(name), log_filter))
    core, timers = logging.getLogger("megatron.core"), logging.getLogger("megatron.core.timers")
    old_levels = core.level, timers.level
    core.setLevel(logging.WARNING)
    timers.setLevel(logging.INFO)

    def undo() -> None:
        warnings.filters[:] = old_filters  # type: ignore[index]
        for logger, log_filter in filters:
            logger.removeFilter(log_filter)
        core.setLevel(old_levels[0])
        timers.setLevel(old_levels[1])

    return undo


def _dropping(beginnings: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(beginnings)


def _print(original: Callable[..., None]) -> Callable[..., None]:
    def print_(*values: Any, **options: Any) -> None:
        if not (values and isinstance(values[0], str) and values[0].startswith(_PRINTED)):
            builtins.print(*values, **options)

    return print_


def _nothing(original: Callable[..., Any]) -> Callable[..., None]:
    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    return nothing


QUIET_PATCHES = (
    Patch(
        module="megatron.training.arguments",
        attribute="_print_args",
        build=_nothing,
        reason="prints some 900 lines, one for each argument of Megatron",
        sources={"megatron-core 0.18.2": "1930963d3725fcf51e3abf4c8cb726437ee9dcaed81e43ea1e86067cdaf1e99b"},
        feature=_FEATURE,
    ),
    Patch(
        module="megatron.training.training",
        attribute="report_theoretical_memory",
        build=_nothing,
        reason="estimates memory by formulas that know nothing of swapping, twice",
        sources={"megatron-core 0.18.2": "8f498c2b52a6fb610848b5f4e5d6e6a78b8026e9cda8746250077d7410de38cd"},
        feature=_FEATURE,
    ),
    # A module's own `print` hides the builtin there: the narrowest place to drop a printed line.
    *(
        Patch(
            module=module,
            attribute="print",
            build=_print,
            reason="prints start-up lines that tell a user nothing",
            sources={"megatron-core 0.18.2": None},
            feature=_FEATURE,
        )
        for module in _PRINTING_MODULES
    ),
)
