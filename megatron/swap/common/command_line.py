"""Parsers of command lines that tell a mistake in a paragraph: what was given, and the nearest flag or its help."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

DASHES = "-‐‑‒–—−"
"""A flag that was copied from a page may begin with any of them."""
MOST_UNKNOWN = 4
"""Unknown flags that an error names; more are counted."""


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


def is_flag(word: str) -> bool:
    """Whether ``word`` of a command line is meant as a flag, such as ``--name`` or ``–name``, not ``-1``."""
    return word[:1] in DASHES and plain_name(word)[:1].isalpha()


def nearest_flag(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the flag of ``known`` that ``word`` probably stands for, or ``None``.

    Args:
        word: as it was given, such as ``--swap_layer``.
        known: names with their dashes, such as ``--swap-layers``.
        cutoff: least similarity, 0 to 1, of a name that does not begin with ``word``.
    """
    names = {plain_name(flag): flag for flag in known}
    wanted = plain_name(word)
    begun = [name for name in names if name.startswith(wanted)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(
        wanted, begun or names, n=1, cutoff=0.6 if begun else cutoff
    )
    return names[found[0]] if found else None


def plain_name(flag: str) -> str:
    """Return ``flag`` without dashes in front, in small letters and with ``-`` between its words."""
    return flag.strip(DASHES).replace("_", "-").lower()
