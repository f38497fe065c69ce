"""The trainer on a lazy device that logs its work: ``orders-RANK.log`` in the folder of the run."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import pretrain_gpt_swap as program
from megatron.swap.run.run_device import RunDevice
from tests.logged_device import LoggedDevice, logged

DEVICES: list[LoggedDevice] = []


def device(self: Any) -> LoggedDevice:
    DEVICES.append(logged(self.ranges))
    return DEVICES[-1]


if __name__ == "__main__":
    made = cached_property(device)
    made.__set_name__(RunDevice, "device")
    RunDevice.device = made  # type: ignore[assignment,method-assign]
    program.prepare(sys.argv)
    program.main()
    (made_one,) = DEVICES
    Path(f"orders-{os.environ['RANK']}.log").write_text("\n".join(made_one.whole_log()))
