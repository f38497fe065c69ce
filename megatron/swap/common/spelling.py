"""The caller's names of settings in messages, which are written for the command line: ``--swap-host-gib``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.swap.common.types import SwapError

_FLAG = re.compile(r"--swap-([a-z0-9]+(?:-[a-z0-9]+)*)")
_BEFORE_VALUE = re.compile(
    _FLAG.pattern + r" (?=[-+.\d'\"/]|(?:all|none|every:\d+|auto|manual|inf|nan|None|True|False)\b|\S+: must be)"
)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.;:]) (?=[A-Z])")


class Spelling:
    """Turns the flags in a message into the arguments of a call: ``host_gib`` is written ``host_gib=``.

    ``others``: text for other settings, with ``{}`` for the name. None: sentences that advise others are left out.
    """

    def __init__(self, *arguments: str, others: str | None = None) -> None:
        self.arguments = frozenset(arguments)
        self._others = others

    def __call__(self, text: str) -> str:
        if "--swap-" not in text:
            return text
        if self._others is None:
            first, *more = _BETWEEN_SENTENCES.split(text)
            known = [one for one in more if self.arguments >= {flag.replace("-", "_") for flag in _FLAG.findall(one)}]
            text = " ".join([first, *known])
        text = _BEFORE_VALUE.sub(lambda found: self._name(found[1], "="), text)
        return _FLAG.sub(lambda found: self._name(found[1], ""), text)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the flags in the messages of our errors."""
        try:
            yield
        except SwapError as error:
            error.args = tuple(self(one) if isinstance(one, str) else one for one in error.args)
            raise

    def _name(self, flag: str, before_value: str) -> str:
        name = flag.replace("-", "_")
        if name in self.arguments or self._others is None:
            return f"{name}="
        return self._others.format(name) + before_value


ACTIVATIONS = Spelling(
    "layers", "min_mib", "host_gib", "prefetch_gib", "verify", "oom_guard", "cpu_delay_ms", "memory_gib",
    "memory_fraction", "save_plan", "save_profile",
)  # fmt: skip
"""``swap.activations``, and ``swap.weights``, which has some of these arguments."""
INSTALL = Spelling("memory_gib", "layers", "plan", others='config["{}"]')  # ``swap.install``
