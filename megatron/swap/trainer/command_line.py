"""The command line of a training program: help that works, mistakes in a paragraph, no run that forgets to swap."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.swap.common.failures import report_errors
from megatron.swap.common.flag_names import is_flag, plain_name
from megatron.swap.common.flags import CommandLine, add_swap_flags, settings_of
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import check_settings
from megatron.swap.patches import registry, setup_model_and_optimizer, train
from megatron.swap.patches.registry import PatchError
from megatron.swap.trainer.checks import check_flags


def add_swap_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``--swap-…`` flags: Megatron's ``extra_args_provider``.

    The parser's help begins with these flags, ``--help-swap`` prints them alone, and its errors are a paragraph.
    Parsing the program's command line has two more effects. A script that asks for swapping and trains without
    ``SwapSession.install``, which ``swap.pretrain`` calls, ends with an error before the model is built. An uncaught
    error of this package is printed without a traceback, unless ``--swap-log-level debug`` is given.

    Args:
        parser: Megatron's, or any other.

    Returns:
        The same parser, as Megatron wants it.
    """
    # In place, because a script may keep the parser that it has passed. Its class may be one of the script.
    parser.__class__ = type("TrainingCommandLine", (_TrainingCommandLine, type(parser)), {})
    if parser.formatter_class is argparse.HelpFormatter:
        parser.formatter_class = _HelpFormatter
    parser.usage = parser.usage or "%(prog)s [--swap-… flags] [Megatron's flags]"  # its flags alone are 750 lines
    theirs = list(parser._action_groups)
    add_swap_flags(parser)
    ours = [group for group in parser._action_groups if group not in theirs]
    parser._action_groups[:] = [*ours, *theirs]
    parser.add_argument("--help-swap", action=_HelpSwap, groups=ours, help="show the --swap-… flags alone and exit")
    return parser


def swap_config(args: argparse.Namespace) -> Settings:
    """Return the checked settings of Megatron's parsed arguments.

    Raises a ``UsageError`` for a malformed or impossible value, a plan for another model, or a Megatron flag that is
    incompatible with swapping.
    """
    settings = settings_of(args)
    check_settings(MegatronFacts.of(vars(args)), settings)
    return settings


class _TrainingCommandLine(CommandLine):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        # Ours are nobody else's, so a program that ignores unknown flags must not ignore these.
        if ours := [word for word in rest if is_flag(word) and plain_name(word).startswith("swap-")]:
            self.error(self.unknown(ours))
        if args is None:  # the command line of this program
            try:
                check_flags(found)
            except UsageError as error:
                self.error(str(error))
            report_errors(() if found.swap_log_level == "debug" else (SwapError, PatchError))
            _require_session()
        return found, rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # type: ignore[misc]
        except KeyError as error:  # Megatron looks names up in an Enum, and argparse expects other errors
            raise argparse.ArgumentError(action, f"invalid value: {arg_string!r}") from error


class _HelpFormatter(argparse.HelpFormatter):
    """Prints help texts with a bare ``%`` too, which argparse takes for a placeholder: upstream has some."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


class _HelpSwap(argparse.Action):
    """Prints the help of ``groups``, and ends the program as ``--help`` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, groups: Sequence[Any], **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **options)
        self._groups = groups

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        formatter = parser._get_formatter()
        for group in self._groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        print(formatter.format_help(), end="")
        parser.exit()


def _require_session() -> None:
    """Make training fail at its beginning if the flags ask for swapping and no session was installed."""
    is_megatron_here = setup_model_and_optimizer.MODULE in sys.modules
    if is_megatron_here and not registry.is_patched(setup_model_and_optimizer.SYMBOL):
        applied = registry.apply((), [setup_model_and_optimizer.setup_model_and_optimizer_patch(_check_session)])
        registry.say_left_out(applied)


def _check_session() -> None:
    from megatron.training import get_args

    args = get_args()
    if registry.is_patched(train.SYMBOL) or "swap_layers" not in args or not swap_config(args).does_anything:
        return
    given = " ".join(word for word in sys.argv[1:] if word.startswith("--swap-"))
    raise UsageError(
        f"{given}: this script has not called SwapSession.install, so it would train unswapped. Train by "
        "swap.pretrain(args, ...) in place of Megatron's pretrain, or add swap.SwapSession.install(args, model_config) "
        "before it, or drop the --swap- flags."
    )
