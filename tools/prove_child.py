"""One run of pretrain_gpt_swap.py with a stopwatch: phases of a micro-batch, step times, peaks, weights."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NUM_WARM_UP = 3


def versions() -> dict[str, Any]:
    """What a row needs to be believed: versions, machine, commit."""
    from importlib import metadata

    import torch

    found: dict[str, str | None] = {}
    names = ("torch", "megatron-core", "transformer-engine", "numpy")
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = git.stdout.strip() if git.returncode == 0 else ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    machine = {"gpu": gpu, "num_gpus": torch.cuda.device_count(), "cores": os.cpu_count(), "cuda": torch.version.cuda}
    found["python"] = platform.python_version()
    return {"versions": found, "machine": machine, "commit": os.environ.get("SWAP_COMMIT", commit)}


class Stopwatch:
    """Times on the device between marks of a micro-batch, and on the host between steps."""

    def __init__(self) -> None:
        self.marks: dict[str, list[Any]] = {"start": [], "first": [], "forward": [], "backward": []}
        self.step_ends: list[float] = []
        self.chunks: list[Any] = []

    def attach(self, chunks: Any) -> Any:
        import torch

        self.chunks = list(chunks)
        if not torch.cuda.is_available() or len(self.chunks) != 1:
            return chunks
        layer = self.chunks[0].decoder.layers[0]
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(lambda *_: self._mark("first"))
        self.chunks[0].register_forward_hook(lambda *_: self._mark("forward"))
        return chunks

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        self._mark("start")
        hidden = kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._mark("backward"))

    def _mark(self, name: str) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks[name].append(event)

    def phases(self) -> dict[str, float]:
        """Medians in milliseconds over the micro-batches after the warm-up."""
        pairs = {
            "first_layer_forward_ms": ("start", "first"),
            "forward_ms": ("start", "forward"),
            "backward_ms": ("forward", "backward"),
        }
        result = {}
        for name, (begin, end) in pairs.items():
            times = [a.elapsed_time(b) for a, b in zip(self.marks[begin], self.marks[end], strict=False)]
            if times:
                result[name] = statistics.median(times[len(times) // 4 :])
        return result


def trace_bytes(path: Path) -> dict[str, int]:
    """Bytes that a Kineto trace says were copied between device and host in large pieces."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    totals = {"trace_d2h_bytes": 0, "trace_h2d_bytes": 0, "trace_d2h_copies": 0, "trace_h2d_copies": 0}
    for event in events:
        if event.get("cat") == "gpu_memcpy" and event["args"].get("bytes", 0) >= 256 << 10:
            for key, tag in (("d2h", "DtoH"), ("h2d", "HtoD")):
                if tag in event["name"]:
                    totals[f"trace_{key}_bytes"] += event["args"]["bytes"]
                    totals[f"trace_{key}_copies"] += 1
    return totals


def weights_hash(chunks: list[Any]) -> str:
    """SHA-256 over all parameters of all ranks."""
    import torch

    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", required=True)
    parser.add_argument("--profile-step", type=int, default=0, help="trace this step (1-based); 0: none")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    flags = options.flags[1:] if options.flags[:1] == ["--"] else options.flags
    with tempfile.TemporaryDirectory() as folder:
        summary_path = Path(folder) / "summary.json"
        is_first = os.environ.get("RANK", "0") == "0"
        flags += ["--swap-summary", str(summary_path)]
        if options.profile_step:
            flags += [
                "--profile", "--use-pytorch-profiler", "--profile-step-start", str(options.profile_step - 1),
                "--profile-step-end", str(options.profile_step), "--tensorboard-dir", f"{folder}/tensorboard",
            ]  # fmt: skip
        sys.argv = ["pretrain_gpt_swap.py", *flags]
        import torch

        import pretrain_gpt_swap
        from megatron.swap.session import SwapSession

        watch = Stopwatch()
        install, on_iteration = SwapSession.install, SwapSession._on_iteration

        def install_and_watch(args: Any, model_config: Any = None) -> Any:
            session = install(args, model_config)
            model_config.pre_wrap_hooks.append(watch.attach)
            return session

        def on_iteration_and_watch(self: Any, *args: Any) -> None:
            on_iteration(self, *args)
            watch.step_ends.append(time.perf_counter())

        SwapSession.install = install_and_watch  # type: ignore[method-assign, assignment]
        SwapSession._on_iteration = on_iteration_and_watch  # type: ignore[method-assign, assignment]
        start = time.perf_counter()
        pretrain_gpt_swap.main()
        digest = weights_hash(watch.chunks)
        if not is_first:
            return
        summary = json.loads(summary_path.read_text())
        steps_ms = [1e3 * (b - a) for a, b in zip(watch.step_ends, watch.step_ends[1:], strict=False)]
        counted = steps_ms[NUM_WARM_UP - 1 :]
        if options.profile_step:
            counted = counted[:-1]  # the traced one
        result = {
            "step_ms_median": statistics.median(counted) if counted else None,
            "step_ms_all": counted,
            "first_step_ms": 1e3 * (watch.step_ends[0] - start),
            "device_peak_gib": (summary["device_peak_bytes"] or 0) / 2**30,
            "device_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0,
            "host_peak_gib": summary["host_leased_peak_bytes"] / 2**30,
            "host_booked_gib": summary["host_booked_bytes"] / 2**30,
            "saved_peak_gib": (summary["saved_peak_bytes"] or 0) / 2**30,
            "swapped_out_bytes": summary["swapped_out_bytes"],
            "swapped_in_bytes": summary["swapped_in_bytes"],
            "layer_out_bytes": {str(e["layer"]): e["swapped_out_bytes"] for e in summary["layers"]},
            "swapped_layers": summary["swapped_layers"],
            "wait_ms": summary["wait_ms"],
            "num_late": summary["num_late"],
            "stayed_bytes": summary["stayed_bytes"],
            "num_params": sum(p.numel() for chunk in watch.chunks for p in chunk.parameters()),
            "losses": summary["losses"],
            "loss_hex": summary["losses"][-1] if summary["losses"] else None,
            "grad_norms": summary["grad_norms"],
            "weights_sha256": digest,
            **watch.phases(),
        }
        for trace in Path(folder).rglob("rank-0.json.gz"):
            result.update(trace_bytes(trace))
        Path(options.result).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
