"""Check whether an existing Python can train: `megatron-swap doctor`, as a file for `MEGATRON_SWAP_PYTHON`.

It runs the check by its path and imports nothing: `megatron.swap` may not be importable, and this Python may be old.
"""

import os
import runpy

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib is not in old Pythons)

if __name__ == "__main__":
    runpy.run_path(os.path.join(ROOT, "megatron", "swap", "cli", "doctor.py"), run_name="__main__")  # noqa: PTH118
