"""The trainer in a memory cgroup of its own, whose limit is reached when activations are offloaded first.

``--cgroup FOLDER --left-mib 24``, as last flags: FOLDER is an empty cgroup with a memory controller (version 1 or 2).
When host memory is asked for, the limit becomes what is in use, and 24 MiB. The kernel enforces it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pretrain_gpt_swap as program
from megatron.swap.run import build

USED, LIMIT = (("memory.usage_in_bytes", "memory.current"), ("memory.limit_in_bytes", "memory.max"))


def file_of(cgroup: Path, names: tuple[str, str]) -> Path:
    return next(path for path in (cgroup / name for name in names) if path.exists())


if __name__ == "__main__":
    left_bytes = int(float(sys.argv.pop()) * 2**20)
    assert sys.argv.pop() == "--left-mib"
    folder = Path(sys.argv.pop())
    assert sys.argv.pop() == "--cgroup"
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    available_host_bytes = build.available_host_bytes

    def limited() -> int:
        used_bytes = int(file_of(folder, USED).read_text())
        file_of(folder, LIMIT).write_text(str(used_bytes + left_bytes))
        return available_host_bytes()

    build.available_host_bytes = limited
    program.prepare(sys.argv)
    program.main()
