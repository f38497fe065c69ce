"""The composition root of a Megatron run: builds the parts from the settings, installs them, reports, removes them.

Owns `SwapSession` and `prepare`. May import every package but `cli`, `integrations` and `dry`. `SwapSession` is
imported at its first use, because `prepare` runs before Megatron is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.swap.session.session import SwapSession

__all__ = ["SwapSession"]


def __getattr__(name: str) -> Any:
    if name == "SwapSession":
        from megatron.swap.session.session import SwapSession

        return SwapSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
