"""Names of flags as people type them: other dashes, underscores, a letter that is wrong."""

import difflib
from collections.abc import Iterable

DASHES = "-‐‑‒–—−"  # a flag that was copied from a page may begin with any of them


def is_flag(word: str) -> bool:
    """Whether ``word`` of a command line is meant as a flag, such as ``--name`` or ``–name``, not ``-1``."""
    return word[:1] in DASHES and plain_name(word)[:1].isalpha()


def nearest_flag(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the flag of ``known`` that ``word`` probably stands for, at least as similar as ``cutoff``, or None."""
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
