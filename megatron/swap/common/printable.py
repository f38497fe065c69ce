"""Text of files and errors as a terminal may show it."""

import textwrap

MOST_CHARACTERS = 300


def printable(text: str) -> str:
    """Return ``text`` with all characters escaped that a terminal obeys or cannot show, line ends too."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def in_one_line(error: BaseException) -> str:
    """Return the kind of ``error`` and the beginning of its text, which may go on with a trace of C++."""
    text = textwrap.shorten(str(error), MOST_CHARACTERS, placeholder=" …")
    return printable(f"{type(error).__name__}: {text}")
