"""The trainer on a host whose memory another process takes once training was allowed.

``--left-mib 4 0.5``, as last flags: 4 MiB are left when host memory is reserved first, 0.5 MiB from then on.

The reading of the available memory stands for that process, or for a limit of the cgroup: both are read there.
"""

import sys

import pretrain_gpt_swap as program
from megatron.swap.run import build

if __name__ == "__main__":
    later_mib, left_mib = float(sys.argv.pop()), [float(sys.argv.pop())]
    assert sys.argv.pop() == "--left-mib"
    build.available_host_bytes = lambda: int((left_mib.pop() if left_mib else later_mib) * 2**20)
    program.prepare(sys.argv)
    program.main()
