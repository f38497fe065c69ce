"""The command line: its parser, and the ``--swap-`` flags that the fields of ``Settings`` give."""

import argparse
import re
from itertools import groupby
from typing import Any, NoReturn

from megatron.swap.common.flag_names import is_flag, nearest_flag
from megatron.swap.common.settings import FLAGS, GROUPS, Settings, flag_of, is_switch

MOST_UNKNOWN = 4  # unknown flags that an error names; more are counted


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors are a paragraph, not the usage of all flags."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(self.unknown(rest))
        return found

    def error(self, message: str) -> NoReturn:
        """Print ``message``, with the help of the flag that it names, and end the program with exit status 2."""
        named = re.match(r"argument ([^\s:/]+)", message)
        action = next((one for one in self._actions if named and named[1] in (*one.option_strings, one.dest)), None)
        if action is None or not action.help:
            more = f"`{self.prog} --help` tells more." if message.startswith(("the following", "one of the")) else ""
        else:
            more = f"{named[1]}: {self._get_formatter()._expand_help(action)}" if named else ""
        self.exit(2, f"\nerror: {message}{'. ' if more else ''}{more}\n")

    def unknown(self, words: list[str]) -> str:
        """Return the error about ``words``, which belong to no flag."""
        known = [name for action in self._actions for name in action.option_strings]
        flags = [word.partition("=")[0] for word in words if is_flag(word)]
        if not flags:
            return f"{words[0]!r} belongs to no flag. Flags begin with --; a value with blanks needs quotes around it."
        lines = []
        for flag in flags[:MOST_UNKNOWN]:
            nearest = nearest_flag(flag, known)
            instead = f"the nearest is {nearest}." if nearest else f"`{self.prog} --help` lists all of them."
            lines.append(f"{flag} is not a flag: {instead}")
        if (num_more := len(flags) - MOST_UNKNOWN) > 0:
            lines.append(f"{num_more} more are no flags either.")
        return "\n".join(lines)


def add_swap_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``--swap-`` flags to Megatron's parser, or any other, and return it."""
    for group, names in groupby(FLAGS, lambda name: FLAGS[name].group):
        add = parser.add_argument_group(f"swap: {group}", GROUPS[group]).add_argument
        for name in names:
            flag = FLAGS[name]
            if is_switch(name):
                add(flag_of(name), nargs=0, action=_Switch, beside=flag.beside, default=False, help=flag.help)
            else:
                options: dict[str, Any] = {"type": flag.number} if flag.number is not None else {}
                options["default"] = flag.written or getattr(Settings, name)
                if flag.takes_several:
                    options |= {"nargs": "+", "default": []}
                add(flag_of(name), metavar=flag.metavar, choices=flag.choices or None, help=flag.help, **options)
    return parser


class _Switch(argparse.Action):
    """Sets its own name, and those ``beside`` it."""

    def __init__(self, *arguments: Any, beside: tuple[str, ...], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._names = (self.dest, *beside)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        for name in self._names:
            setattr(namespace, name, True)


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings of a command line with the flags of ``add_swap_flags``, or raise ``UsageError``."""
    return Settings.of({name: getattr(args, f"swap_{name}") for name in FLAGS}, of_trainer=True)
