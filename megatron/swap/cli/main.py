"""`megatron-swap COMMAND …`: each command is a module of this room with a `main`."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit status; what is wrong is said in one line.

    Args:
        arguments: the command line behind the program's name; `None`: that of this process.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-swap",
        description="Plan a swapping run, or check an environment. `megatron-swap COMMAND --help` says more.",
    )
    parser.add_argument(
        "command", choices=["plan", "doctor"],
        help="plan: what to keep, swap and recompute. doctor: can this Python train, and what is missing?",
    )  # fmt: skip
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own")
    options = parser.parse_args(arguments)
    # Loaded by need: where the planner's scipy is missing, doctor must still say so.
    if options.command == "plan":
        from megatron.swap.cli.plan import main as command
    else:
        from megatron.swap.cli.doctor import main as command
    return command(options.arguments)


if __name__ == "__main__":
    sys.exit(main())
