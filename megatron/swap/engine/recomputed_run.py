"""Layers that run again in backward: a layer that computes something different does not train silently.

Before a layer runs again, its state is compared with its forward's. Replaced attributes, parameters, hooks and switches
are put back. A change in place is refused (``layer_state.py``, ``run_context.py``). While the layer runs again,
fingerprints of its results are compared with forward's, on the device, without a wait of the host. They show changes
that no comparison of attributes sees: globals, closures, iterators, custom kernels.

Megatron's checkpoint computes the result again, so the result is compared. PyTorch's checkpoint stops a layer once it
has all saved tensors. Then the saved tensors are compared from which no other is computed (``operators/compared.py``):
a difference in any other tensor shows in them. What the rest of the layer computes, its result, is compared in the
first backward, in which the layer also runs to its end.

All tensors would take 2 % of a step. So each forward compares one layer in all its saved tensors, in turn, and one
storage that is recomputed alone. A checkpoint may run its layer without gradients: in its turn the layer gets them,
because autograd would save nothing otherwise.

The first time that a layer runs again, it runs twice. If both runs differ by rounding, its kernels are not
deterministic (atomic additions of a GPU). Such a layer is compared within a tolerance, and a line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron.swap.common.types import Site, SwapError, UsageError
from megatron.swap.devices.base import Device, Event, bytes_of
from megatron.swap.devices.host_writes import write_to_host
from megatron.swap.engine.checksum import fingerprint
from megatron.swap.engine.layer_state import LayerState, put_back, set_back
from megatron.swap.engine.run_context import RunContext
from megatron.swap.engine.run_prints import Prints
from megatron.swap.profiling.saved_tensor_hooks import Hooks, HooksContext, innermost_hooks

NO_PURE_FUNCTION = (
    "It is no pure function: it reads what cannot be compared (a global, a closure, an iterator), or calls a function "
    "that was replaced."
)
WAY_OUT = (
    "Let it read what its arguments, parameters, buffers and attributes hold, and change none of these between forward "
    "and backward; or swap layers without a budget, which runs no layer again."
)


class RecomputedRunError(SwapError):
    """A layer that ran again in backward computed something else than in forward."""


@dataclass
class _Known:
    """The facts known of a run of a layer, over all steps."""

    index: int  # of its flag
    turn: int  # the forward in which all of it is compared, modulo the number of runs that take turns
    name: str  # of the layer or site, for messages
    num_runs: int = 0  # forwards so far
    is_tried: bool = False  # it has run twice in a backward
    is_exact: bool = True  # its kernels are deterministic, as far as is known
    saves_others: bool = False  # it saved another number of tensors than expected, so all are compared
    has_had_gradients: bool = False  # it has run with gradients in a forward that has none
    takes_gradient: bool = False  # it takes a gradient in its own forward, for which autograd needs the saved tensors
    changes_itself: bool = False  # a run with gradients changes the state that it reads


class Print(NamedTuple):
    """The fingerprint of a recomputed storage in forward."""

    known: _Known
    sums: torch.Tensor


@dataclass(frozen=True)
class Contexts:
    """Functions that make contexts."""

    unwatched: Callable[[], AbstractContextManager[Any]]  # operators in it do not count as the running layer's
    untouched: Callable[[], AbstractContextManager[Any]]  # saved tensors are kept


class RunChecks:
    """The comparisons of all layers of a model."""

    def __init__(self, device: Device) -> None:
        self.may_vary = device.torch_device.type != "cpu"  # kernels of the device may give other bits each time
        self._device = device
        self._known: dict[Hashable, _Known] = {}
        self._sites: dict[tuple[Site, int], _Known] = {}
        self._lines: list[str] = []
        self._flags = torch.empty(0, dtype=torch.int32, device=device.torch_device)  # by index: a comparison has failed
        self._on_host = self._flags
        self._written: Event | None = None  # flags of an earlier backward have arrived in ``_on_host``
        self._is_newer = False  # there were comparisons since

    def run(
        self, key: Hashable, name: str, state: LayerState, *, saved: Collection[int] | None = None,
        in_turn: Collection[int] | None = None, num_saved: int | None = None, sees_saved: bool,
        may_have_gradients: bool = False, is_well_known: bool = False, is_exact: bool = True,
        forked: Callable[[], AbstractContextManager[None]] | None, contexts: Contexts,
    ) -> CheckedRun:  # fmt: skip
        """Return a callable that runs a layer in forward and in backward.

        ==================  =======================================================================================
        ``key``             names the run among the runs of a forward; ``name`` is the layer's, for messages
        ``state``           the state that the layer reads
        ``saved``           numbers of the saved tensors that are compared in each run; None for all
        ``in_turn``         the same, when it is the run's turn
        ``num_saved``       tensors that the layer is expected to save
        ``sees_saved``      saved tensors are compared, not the result
        ``is_well_known``   no run with gradients can change the layer's state: allow gradients before one was seen
        ``is_exact``        no kernel of the layer is known to be non-deterministic
        ``forked``          makes a context that restores random states; None if the layer cannot run twice
        ==================  =======================================================================================

        ``may_have_gradients``: without ``sees_saved`` the layer may run with gradients in its turn in forward, unless a
        run with gradients is seen to change its state.
        """
        known, is_turn = self._turn(self._known, key, name)
        if known.is_exact and not is_exact:
            self.is_not_deterministic(known)
        places = None if known.saves_others else in_turn if is_turn else saved
        sees_all = may_have_gradients and (is_turn if known.is_tried else is_well_known)
        sees_all &= not (known.takes_gradient or known.changes_itself)
        return CheckedRun(self, known, state, places, num_saved, sees_saved, sees_all, forked, contexts)

    def print_in_turn(self, site: Site, number: int, storage: torch.UntypedStorage) -> Print | None:
        """Return the fingerprint of ``storage``, which function ``number`` of a site's chain makes, in its turn."""
        known, is_turn = self._turn(self._sites, (site, number), site)
        if not is_turn or storage.device.type == "meta":
            return None
        with torch.no_grad():
            return Print(known, fingerprint(bytes_of(storage)))

    def check_in_turn(self, first: Print, storage: torch.UntypedStorage) -> None:
        """Compare ``storage`` with the one that ``first`` was made from."""
        with torch.no_grad():
            self.flag(first.known, (fingerprint(bytes_of(storage)) != first.sums).any())

    def _turn(self, of: dict[Any, _Known], key: Hashable, name: str | Site) -> tuple[_Known, bool]:
        """Return the facts known of ``key``, and whether it is its turn among the keys in ``of``."""
        known = of.get(key)
        if known is None:
            known = of[key] = _Known(len(self._known) + len(self._sites), len(of), str(name))
        is_turn = known.num_runs % len(of) == known.turn  # another one in each forward
        known.num_runs += 1
        return known, is_turn

    def take_lines(self) -> list[str]:
        """Return the lines to say since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def is_not_deterministic(self, known: _Known) -> None:
        """Compare within a tolerance from now on, and say so."""
        known.is_exact = False
        self._lines.append(
            f"{known.name}: two runs with the same inputs differ, because its kernels are not deterministic (atomic "
            "additions, for example): it is compared within a tolerance, and gradients vary as without swapping"
        )

    def flag(self, known: _Known, differs: torch.Tensor | None) -> None:
        """Note on the device that a comparison has failed, if it has."""
        if differs is None:
            return
        if known.index >= len(self._flags):
            num_more = max(256, len(self._flags), known.index + 1 - len(self._flags))
            self._flags = torch.cat([self._flags, self._flags.new_zeros(num_more)])
        self._flags[known.index].logical_or_(differs)
        self._is_newer = True

    def before_step(self) -> None:
        """Raise a ``RecomputedRunError`` if a flag is set, of this backward or the last, that has arrived here."""
        if not self._is_newer:
            return
        self._finish()
        self._write()
        if self._written is not None and self._device.has_passed(self._written):
            self._finish()

    def read(self) -> None:
        """Raise a ``RecomputedRunError`` if a flag of any backward so far is set. Waits for the device."""
        self._finish()
        if self._is_newer:
            self._write()
            self._finish()

    def _write(self) -> None:
        # Now, ahead of the optimizer's kernels. A kernel of its own writes, since copies wait for what is offloaded.
        self._on_host = write_to_host(self._flags) if self._flags.is_cuda else self._flags.clone()
        self._written, self._is_newer = self._device.record(self._device.current_stream()), False

    def _finish(self) -> None:
        written, self._written = self._written, None
        if written is None:
            return
        self._device.finish(written)  # the host reads ``_on_host``
        if self._on_host.any():
            flags = self._on_host.tolist()
            names = [known.name for known in (*self._known.values(), *self._sites.values()) if flags[known.index]]
            raise RecomputedRunError(
                f"{', '.join(names)} ran again in backward and computed something else than in forward, so the last "
                f"gradients are wrong. {NO_PURE_FUNCTION} {WAY_OUT}"
            )


@dataclass
class CheckedRun:
    """One run of a layer: in forward, and again in backward. Arguments as for ``RunChecks.run``, which makes it."""

    checks: RunChecks
    known: _Known
    state: LayerState
    saved: Collection[int] | None
    num_saved: int | None
    sees_saved: bool
    sees_all: bool  # saved tensors are compared, and the result
    forked: Callable[[], AbstractContextManager[None]] | None
    contexts: Contexts
    context: RunContext = field(default_factory=RunContext.now)
    first: Prints | None = None
    result: Prints | None = None  # of forward, if the first backward is to compare results beside saved tensors
    is_over: bool = False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer by ``function``: its forward, in every call.

        In a second run, raises a ``UsageError`` if the layer's state was changed in place, and a ``RecomputedRunError``
        if the layer is known to compute something different.
        """
        known, body = self.known, partial(function, *args, **kwargs)
        if self.first is None:
            self.first = self._prints(is_exact=known.is_exact, is_loose=not (known.is_tried and known.is_exact))
            result = (self._printed_without_graph if self.sees_all else self._printed)(self.first, body)
            if self.sees_saved and not known.is_tried and self.forked is not None:
                self.result = self._printed_result(result)
            self.is_over = True
            known.saves_others |= self.num_saved is not None and len(self.first.kinds) != self.num_saved
            return result
        if not self.is_over:  # a gradient is taken within the layer's forward
            return body()
        changes = self.state.changes()
        if stuck := [change.where for change in changes if change.old is None]:
            raise UsageError(f"{known.name} runs again in backward, but {stuck[0]} changed since forward. {WAY_OUT}")
        with self.context.restored():
            trial, is_first = None, not known.is_tried
            if is_first and self.forked is not None:
                with put_back(changes):
                    trial = self._trial(self.forked, body)
            with put_back(changes):
                result = self._again(self.first, trial, body)
                if is_first:
                    known.changes_itself = bool(self.state.changes())
                return result

    def _prints(self, *, is_exact: bool, is_loose: bool) -> Prints:
        return Prints(
            self.saved, self.contexts.unwatched, is_exact=is_exact, is_loose=is_loose, has_workspaces=not self.sees_all
        )

    def _trial(self, forked: Callable[[], AbstractContextManager[None]], body: Callable[[], Any]) -> Prints:
        """Run once more than needed: two runs in a backward show whether kernels are deterministic.

        This run goes to the layer's end, so results are compared too. Waits for the device, this once.
        """
        trial = self._prints(is_exact=True, is_loose=False)
        # Gradients are for who takes one in the layer's forward. The graph is gone before the second run begins.
        has_gradients = self.sees_saved or self.sees_all
        with forked(), self.contexts.untouched() if has_gradients else torch.no_grad():
            result = self._printed(trial, body)
            if self.result is not None:
                self._compare_results(self.result, self._printed_result(result))
        return trial

    def _printed_result(self, result: Any) -> Prints:
        prints = Prints(None, self.contexts.unwatched, is_exact=True, is_loose=True, has_workspaces=False)
        _add_result(prints, result)
        return prints

    def _compare_results(self, first: Prints, again: Prints) -> None:
        known = self.known
        if first.kinds != again.kinds:
            raise self._error("gave another result than")
        if not _is_true(again.differ(first)):
            return
        is_rounded = (self.checks.may_vary or not known.is_exact) and not _is_true(again.are_far(first))
        if not is_rounded:
            raise self._error()
        if known.is_exact:
            self.checks.is_not_deterministic(known)

    def _again(self, first: Prints, trial: Prints | None, body: Callable[[], Any]) -> Any:
        again = self._prints(is_exact=first.is_exact, is_loose=first.is_loose)
        try:
            result = self._printed(again, body)
        except Exception:  # a checkpoint ends a run this way, once it has all saved tensors
            if len(again.kinds) == len(first.kinds):
                self._compare(first, again, trial)
                self._put_back_rest()
            raise
        self._compare(first, again, trial)
        return result

    def _put_back_rest(self) -> None:
        """Put back the state that the layer's own rest would put back, where the checkpoint ends the layer early."""
        rest = self.state.changes()
        if stuck := [change.where for change in rest if change.old is None]:
            raise UsageError(
                f"{self.known.name} changes {stuck[0]} for the time of its forward, and it is stopped before its end "
                "where it runs again in backward. Let it put that back in a finally, or swap layers without a budget."
            )
        set_back(rest)

    def _printed(self, prints: Prints, body: Callable[[], Any]) -> Any:
        with seeing_saved(prints.add) if self.sees_saved or self.sees_all else nullcontext():
            result = body()
        if not self.sees_saved:
            _add_result(prints, result)
        return result

    def _printed_without_graph(self, prints: Prints, body: Callable[[], Any]) -> Any:
        """Run the layer with gradients, in a context that has none: each saved tensor is seen, and dropped."""
        held: list[torch.Tensor | None] = []
        # The first time tensors are held until the layer's end, to learn whether the layer itself takes a gradient.
        holds, self.known.has_had_gradients = not self.known.has_had_gradients, True

        def pack(tensor: torch.Tensor) -> int:
            prints.add(tensor)
            held.append((tensor if tensor.is_leaf else tensor.detach()) if holds else None)
            return len(held) - 1

        def unpack(place: int) -> torch.Tensor:
            if place < len(held) and (tensor := held[place]) is not None:
                self.known.takes_gradient = True
                return tensor
            raise UsageError(
                f"{self.known.name} is recomputed whole, and gives autograd more than its result (an attribute that "
                "the loss reads), or takes a gradient in its own forward now and then. Return it in the result, swap "
                "the layer, or leave it out (--swap-layers)."
            )

        with torch.enable_grad(), HooksContext(Hooks(pack, unpack), has_around=True):
            result = body()
            _add_result(prints, result)
        held.clear()
        return tuple(map(_detached, result)) if isinstance(result, tuple) else _detached(result)

    def _compare(self, first: Prints, again: Prints, trial: Prints | None) -> None:
        known, checks = self.known, self.checks
        if first.kinds != again.kinds or (trial is not None and trial.kinds != first.kinds):
            raise self._error("ran other operators than")
        if not known.is_tried:
            self._try(first, again, trial)
        elif known.is_exact and first.is_exact:
            checks.flag(known, again.differ(first))
        else:
            checks.flag(known, again.are_far(first))

    def _try(self, first: Prints, again: Prints, trial: Prints | None) -> None:
        """Compare the first run in a backward with forward, and with a second run. Waits for the device, this once."""
        known = self.known
        known.is_tried = True
        if not known.is_exact:
            if _is_true(again.are_far(first)):
                raise self._error()
            return
        is_other = _is_true(again.differ(first))
        has_varied = is_other if trial is None else _is_true(again.differ(trial))
        if has_varied and self.checks.may_vary and not _is_true(again.are_far(first)):
            self.checks.is_not_deterministic(known)
        elif is_other:
            raise self._error()

    def _error(self, did: str = "computed something else than") -> RecomputedRunError:
        return RecomputedRunError(
            f"{self.known.name} ran again in backward and {did} in forward. {NO_PURE_FUNCTION} {WAY_OUT}"
        )


def _is_true(flag: torch.Tensor | None) -> bool:
    return flag is not None and bool(flag)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _add_result(prints: Prints, result: Any) -> None:
    for one in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(one, torch.Tensor):
            prints.add(one)


@contextmanager
def seeing_saved(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Return a context in which ``see`` gets each tensor that autograd saves, before the hooks that are active now."""
    hooks = innermost_hooks()
    if hooks is None:
        raise SwapError("no hooks for saved tensors are active.")
    pack = hooks.pack

    def seen(tensor: torch.Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    with HooksContext(Hooks(seen, hooks.unpack), has_around=True):
        yield

