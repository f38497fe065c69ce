"""The entry point `megatron-swap COMMAND …`. Each command is a module of this package with a `main`."""

import argparse
import sys

from megatron.swap.common.flags import CommandLine


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments`` (None: those of this process) name, and return its exit status."""
    parser = CommandLine(
        prog="megatron-swap",
        description="Plan a swapping run, or check an environment. See `megatron-swap COMMAND --help`.",
    )
    parser.add_argument(
        "command", choices=["plan", "doctor"],
        help="plan: what to keep, swap and recompute. doctor: whether this Python can train, and what is missing",
    )  # fmt: skip
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    options = parser.parse_args(arguments)
    if options.command == "plan":  # imported here, because doctor must run without the planner's scipy
        try:
            from megatron.swap.cli.plan import main as command
        except ModuleNotFoundError as error:
            parser.error(f"plan needs {error.name}, which is missing: see `megatron-swap doctor`")
    else:
        from megatron.swap.cli.doctor import main as command
    return command(options.arguments)


if __name__ == "__main__":
    sys.exit(main())
