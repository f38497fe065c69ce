"""A transformers model from its config file, without weights, and a training step of it, both on the meta device.

Names of code and files stay out of the config: the file comes from anybody.
"""

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.printable import in_one_line
from megatron.swap.common.records import read_text
from megatron.swap.common.types import UsageError
from megatron.swap.dry.autocast import DryAutocast

CHECKPOINT_CALL = "model.gradient_checkpointing_enable()"
META = torch.device("meta")
MOST_MODULES = 100_000  # of a model: 61 layers of 257 experts with five modules each have 78,000
# `Trainer` asks for the loss's value in each step, so the GPU waits for the host, which clips gradients, updates the
# weights and begins the next step. For 399 weights on an H200's host: 114 ms between backward and forward, with kernels
# of 94 ms (docs/results/h200-trainer.json).
IDLE_MS = 0.05
# Keys that are left out, at any depth: the code that builds the model, the question that transformers would ask, and
# the type of its results.
NOT_OF_THE_MODEL = ("auto_map", "trust_remote_code", "return_dict")
IMPLEMENTATIONS = {  # ends of keys, with the values that need no code beside transformers and torch
    "attn_implementation": (None, "eager", "sdpa"),
    "experts_implementation": (None, "eager", "grouped_mm", "batched_mm"),
}
QUANTIZED = ("quantization_config", "compression_config")
COUNTS = re.compile("layer|expert|head|label|block")  # in the names of keys with a number of parts
MOST_PARTS = 100_000


@dataclass(frozen=True)
class Training:
    seq_length: int
    micro_batch_size: int = 1
    weights: Literal["bf16", "mixed"] = "bf16"  # "mixed": in single precision, under autocast to bf16
    # "adamw": torch's, with its defaults. "adamw-fused": with fused=True, behind clipping, as in `Trainer`. "none":
    # forward and backward alone.
    optimizer: Literal["adamw", "adamw-fused", "none"] = "adamw"
    # Tokens whose logits exist at a time; backward computes them again. None for all, by the model's own loss.
    loss_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_length", "micro_batch_size", "loss_chunk_tokens"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UsageError(f"--{name.replace('_', '-')} {given}: must be at least 1.")

    def idle_ms(self, model: nn.Module) -> float:
        """Return the milliseconds that the GPU waits for the host between the steps of ``Trainer``."""
        return IDLE_MS * len(list(model.parameters())) if self.optimizer == "adamw-fused" else 0.0

    @property
    def tokens(self) -> int:
        return self.seq_length * self.micro_batch_size


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a model in ``path``, a config.json or its folder, or raise a ``UsageError``."""
    try:
        file = path / "config.json" if path.is_dir() else path
        found = json.loads(read_text(file), parse_constant=_constant)
        if not isinstance(found["model_type"], str):
            raise TypeError(f"model_type is {found['model_type']!r}, not a name")
        return {key: _checked(path, key, value) for key, value in found.items() if key not in NOT_OF_THE_MODEL}
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--hf {path}: is no config.json of transformers ({in_one_line(error)}). Give the file, which "
            "model.config.save_pretrained(FOLDER) writes, or its folder."
        ) from error


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)  # Infinity, which transformers writes for some models


def _checked(path: Path, key: str, value: Any) -> Any:
    """Return ``value`` without keys that are not of the model."""
    if key in QUANTIZED and value is not None:
        raise UsageError(
            f"--hf {path}: {key}: quantized weights are not planned, --weights says which are. Remove the key."
        )
    for name, known in IMPLEMENTATIONS.items():
        if key.removesuffix("_internal").endswith(name):
            given = value.values() if isinstance(value, Mapping) else (value,)
            if wrong := [one for one in given if not isinstance(one, str | None) or one not in known]:
                allowed = ", ".join(one for one in known if one is not None)
                raise UsageError(
                    f"--hf {path}: {key} {wrong[0]!r}: is not planned, and nothing is downloaded. Give one of "
                    f"{allowed}, or remove the key."
                )
    if isinstance(value, int) and value > MOST_PARTS and COUNTS.search(key):
        raise UsageError(f"--hf {path}: {key} {value:.4g}: must be at most {MOST_PARTS}.")
    if isinstance(value, Mapping):
        return {name: _checked(path, name, part) for name, part in value.items() if name not in NOT_OF_THE_MODEL}
    if isinstance(value, list):
        return [_checked(path, key, part) for part in value]
    return value


def model_of(path: Path, training: Training) -> Any:
    """Return the causal language model of a config.json or its folder, without weights, or raise a ``UsageError``."""
    found = read_config(path)
    try:
        import transformers
    except Exception as error:  # a broken package may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise UsageError(
                "--hf: transformers builds the model, and is missing: pip install transformers."
            ) from error
        raise UsageError(
            f"--hf: transformers builds the model, and cannot be imported ({in_one_line(error)}). Install what it "
            "lacks, or another version."
        ) from error
    kind = found["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(f"--hf {path}: model_type {kind!r} is not in transformers {transformers.__version__}, and "
                         "code of other places is not run. Install a version that has it.")  # fmt: skip
    try:
        config_class = transformers.CONFIG_MAPPING[kind]
        is_causal = config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        config = config_class.from_dict(found) if is_causal else None
    except Exception as error:  # as below
        raise UsageError(f"--hf {path}: the config is invalid ({in_one_line(error)}). Correct it.") from error
    if config is None:
        raise UsageError(
            f"--hf {path}: {kind} is no causal language model (AutoModelForCausalLM). Only those are planned without a "
            "GPU. Train it with swap.activations(model, memory_gib=…), which measures its steps."
        )
    dtype = torch.bfloat16 if training.weights == "bf16" else torch.float32
    try:
        longest = vars(config.get_text_config()).get("max_position_embeddings")
        if longest is not None and training.seq_length > longest:
            raise UsageError(f"--seq-length {training.seq_length}: the config has max_position_embeddings {longest}. "
                             "Give at most that many tokens, or raise it in the config.")  # fmt: skip
        with META, _of_bounded_size(path):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        vars(model.config)["pad_token_id"] = None  # no token is padding; some models would look at the tokens
    except UsageError:
        raise
    except Exception as error:  # a model may refuse its config with anything
        raise UsageError(
            f"--hf {path}: transformers cannot build the model ({in_one_line(error)}). Correct the config."
        ) from error
    return model


@contextmanager
def alone() -> Iterator[None]:
    """Return a context in which transformers, if it is imported there, downloads nothing and prints nothing."""
    settings = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0", "TRANSFORMERS_VERBOSITY": "critical"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # if it was imported before
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _of_bounded_size(path: Path) -> Iterator[None]:
    """Return a context in which a model of more than ``MOST_MODULES`` modules is refused as it is built."""
    num_modules = 0

    def count(module: nn.Module, name: str, part: nn.Module | None) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > MOST_MODULES:
            raise UsageError(f"--hf {path}: the model has more than {MOST_MODULES} modules. Give a smaller one.")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def swapped_part(model: Any, training: Training) -> tuple[nn.Module, str]:
    """Return the module to give to ``swap.activations``, and its name in a script that calls the model ``model``."""
    if training.loss_chunk_tokens is None:
        return model, "model"
    # With a loss in chunks the script calls the model without its head.
    return model.base_model, f"model.{model.base_model_prefix}"


def step_of(model: Any, training: Training) -> Callable[[], None]:
    """Begin a training and return its step, or raise a ``UsageError`` if the loss in chunks has no output layer."""
    tokens = torch.empty((training.micro_batch_size, training.seq_length), dtype=torch.long, device=META)
    chunk, head = training.loss_chunk_tokens, model.get_output_embeddings()
    if chunk is not None and head is None:
        raise UsageError(f"--loss-chunk-tokens {chunk}: {type(model).__name__} has no output layer. Leave it out.")
    model.zero_grad(set_to_none=True)
    parameters = list(model.parameters())
    update: Callable[[], object] | None = None
    if training.optimizer == "adamw":
        update = torch.optim.AdamW(parameters, foreach=True).step  # which torch chooses on a GPU
    elif training.optimizer == "adamw-fused":
        update = _fused_adamw(parameters)
    autocast = DryAutocast() if training.weights == "mixed" else None

    def forward() -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss and, unless it is computed in chunks, the logits."""
        if chunk is None:
            output = model(input_ids=tokens, labels=tokens, use_cache=False)
            return output.loss, output.logits
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return _loss_in_chunks(head, hidden.flatten(0, 1), tokens.flatten(), chunk), None

    def backward() -> None:
        if autocast is None:
            forward()[0].backward()
            return
        with autocast.entered():
            with autocast.forward():
                loss, logits = forward()
            if logits is not None:
                logits = logits.float()  # accelerate converts a model's results
                del logits
            loss.backward()

    def step() -> None:
        backward()
        if update is not None:
            update()
        # The end of a step frees the gradients, as zero_grad() does by default. Without an optimizer they stay.
        model.zero_grad(set_to_none=update is not None)

    return step


def _fused_adamw(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Return the step of torch's AdamW with ``fused``, behind clipping. Torch refuses both on the meta device."""
    states: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def update() -> None:
        trained = [one for one in parameters if one.grad is not None]
        gradients = [one.grad for one in trained if one.grad is not None]
        _clip(gradients)
        for one in trained:
            if one not in states:  # the first step makes the state, among the gradients
                states[one] = torch.zeros((), device=META), torch.zeros_like(one), torch.zeros_like(one)
        steps, first, second = (list(each) for each in zip(*(states[one] for one in trained), strict=True))
        weights: list[torch.Tensor] = list(trained)
        torch._fused_adamw_(
            weights, gradients, first, second, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return update


def _clip(gradients: list[torch.Tensor]) -> None:
    """Scale ``gradients`` by their norm, as ``torch.nn.utils.clip_grad_norm_`` does on a GPU."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2)))
    torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))


def _loss_in_chunks(head: nn.Module, hidden: torch.Tensor, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the sum of the losses of all chunks, whose logits are computed again in backward."""

    def part(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(states).float(), labels, reduction="sum")

    pairs = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    return torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in pairs]).sum()  # type: ignore[misc]


@contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """Return a context in which ``model`` checkpoints its layers, as ``CHECKPOINT_CALL`` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the function has a new name in version 6
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()
