"""Steps an optimizer whose state rests in host memory: it passes through the device in buckets.

The optimizer is the one that trains without us: for each bucket it is handed slices of its parameters and of their
state, as if they were parameters of their own, and steps those. Update rules that look at each element alone come out
equal to the bit; for others a bucket holds whole tensors.

What overlaps: the next buckets come in while compute steps one, and the last ones go out. Where there is room
(``step_overlap.py``) the first come in before the step, in the order of the one before, and the last stay behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron.swap.devices.base import Mark
from megatron.swap.resting import MAIN, Home, Member, Piece, Span
from megatron.swap.state_mover import Bucket, Coming, StateMover, as_bytes
from megatron.swap.types import SwapError, UsageError

NUM_BUFFERS = 3
"""One comes in, one is stepped, one goes out: there is always room for so many."""

Updated = Callable[[torch.Tensor, int, int, torch.Tensor], None]
"""A parameter, and the elements of it (from, to) whose new values are in a tensor on the device."""


class StateSwap:
    """Swaps the state of one optimizer: ``step`` here takes the place of its own.

    Args:
        optimizer: complete, with all of its parameters.
        mover: copies.
        born: parameters that rest already, with their members.
        rests: whether the state of another parameter is to rest.
        bucket_bytes: most bytes of a bucket on the device.
        is_elementwise: whether the optimizer may step slices of its parameters.
        on_updated: told of new values while they are on the device, the parameters' that do not rest included.
        room_bytes: most that buckets may hold on the device in a step, where three may in any case, and that those on
            their way home may still hold when it ends.

    Attributes:
        members: of all parameters whose state rests, or did.

    Raises:
        UsageError: a group has tensors for settings: each bucket would change them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: StateMover,
        born: dict[torch.Tensor, Member],
        rests: Callable[[torch.Tensor], bool],
        bucket_bytes: int,
        is_elementwise: bool,
        on_updated: Updated = lambda *_: None,
        room_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._optimizer = optimizer
        self._inner_step = optimizer.step
        self._mover = mover
        self._bucket_bytes = bucket_bytes
        self._is_elementwise = is_elementwise
        self._on_updated = on_updated
        self._room_bytes = room_bytes
        self._order: list[list[Piece]] = []
        self._next: deque[list[Piece]] | None = None  # of a step that has begun, or is to come
        self._coming: deque[Coming] = deque()
        self._loaded: deque[Bucket] = deque()
        self._members: dict[torch.Tensor, Member] = {}
        self._staying: dict[torch.Tensor, Member] = {}
        self.members: list[Member] = []
        self._updates: list[tuple[Mark, Mark]] = []
        self._shown = False
        for number, group in enumerate(optimizer.param_groups):
            tensors = [name for name, value in group.items() if isinstance(value, torch.Tensor)]
            if tensors:
                raise UsageError(
                    f"--swap-optimizer: the optimizer keeps {', '.join(tensors)} in tensors (CUDA graphs?), and would "
                    "advance them once a bucket. Leave --optimizer-cuda-graph out."
                )
            for param in group["params"]:
                if param in born:
                    self._members[param] = born[param]
                    born[param].group = number
                elif rests(param):
                    self._members[param] = Member(param, number)
        self.members += self._members.values()
        if is_elementwise:  # room for all, or an error before training
            members = self._members.values()
            mover.make_homes([(member, *kept) for member in members for kept in self._state_of_one(member).items()])

    def _state_of_one(self, member: Member) -> dict[str, torch.dtype]:
        """What the optimizer keeps for each element of a parameter like this: one of ours is stepped."""
        one = torch.zeros(2, dtype=member.param.dtype, device=member.param.device)
        one.grad = one.decoupled_grad = torch.zeros_like(one)  # type: ignore[attr-defined]
        self._step_of([[one] if i == member.group else [] for i in range(len(self._optimizer.param_groups))])
        state = self._optimizer.state.pop(one, {})
        return {name: value.dtype for name, value in state.items() if _is_as_large(value, one)}

    @property
    def num_resting(self) -> int:
        """Parameters whose state rests."""
        return len(self._members)

    @property
    def resting_bytes(self) -> int:
        """What rests of them, as far as it is known: of optimizers that take whole parameters after the first step."""
        return sum(home.num_bytes for home in self.homes())

    # ------------------------------------------------------------------ stepping

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """What ``optimizer.step`` does, for all of its parameters. Where it fails some are a step ahead."""
        if closure is not None:
            raise SwapError("an optimizer whose state is swapped takes no closure: it would run once a bucket.")
        self.hide()
        self._updates = []
        order = list(self._buckets())
        if order != self._order:
            self.forget()
            self._order = order
        groups = self._optimizer.param_groups
        try:
            advanced = self._step_all()
        finally:  # of a step that failed
            self.forget()
        self._mover.release(self._room_bytes())
        for group, values in zip(groups, advanced, strict=True):
            group.update(values)

    def _step_all(self) -> list[dict[str, Any]]:
        """Returns the settings of each group as the step has left them."""
        groups = self._optimizer.param_groups
        self._load(self._room_in_step())  # before what stays is stepped: the link works meanwhile
        stays = [[param for param in group["params"] if param not in self._members] for group in groups]
        advanced = self._step_of(stays)
        for params in stays:
            for param in params:
                self._on_updated(param, 0, param.numel(), param.detach())
        while self._loaded:
            advanced = self._step_bucket(self._loaded.popleft())
            room_bytes = self._room_in_step()
            self._mover.release(max(0, room_bytes - self._mover.loaded_bytes))  # a first step makes state
            self._load(room_bytes)
        return advanced

    def _room_in_step(self) -> int:
        return max(self._room_bytes(), NUM_BUFFERS * self._bucket_bytes)

    def load_ahead(self, room_bytes: int) -> None:
        """Bring in the first buckets of the step to come, as far as they hold no more than that and wait for no disk.

        They are those of the last step: if others have gradients then, they were brought in vain.
        """
        if not self._shown:
            self._load(room_bytes, is_ahead=True)

    @property
    def is_loaded(self) -> bool:
        """Whether all of the step to come is on the device, or on its way there."""
        return self._next is not None and not self._next and not self._coming

    def update_ms(self) -> float:
        """What the optimizer's own kernels took in the last step, for what rests; only after ``synchronize``."""
        return sum(ended.elapsed_ms_since(began) for began, ended in self._updates)

    def forget(self) -> None:
        """What was brought in ahead is not wanted, or no longer what is at home."""
        while self._loaded:
            self._mover.put_back(self._loaded.popleft())
        self._coming.clear()
        self._next = None

    def _load(self, room_bytes: int, *, is_ahead: bool = False) -> None:
        """Bring in the next buckets, while there is room for them and for one that goes out. What goes out has to be
        gone where they need its memory."""
        if self._next is None:
            self._next = deque(self._order)
        while self._next or self._coming:
            while self._next and len(self._coming) < self._mover.num_ahead:
                self._coming.append(self._mover.fetch(self._next.popleft()))
            coming = self._coming[0]
            wanted_bytes = coming.num_bytes + self._mover.loaded_bytes
            if wanted_bytes > room_bytes - self._bucket_bytes and (self._loaded or is_ahead):
                return
            if is_ahead and not coming.is_at_hand:
                return
            self._mover.release(max(0, room_bytes - wanted_bytes))
            bucket = self._mover.bring_in(coming, is_ahead=is_ahead)
            if bucket is None:
                return
            self._coming.popleft()
            self._loaded.append(bucket)

    def _buckets(self) -> Iterator[list[Piece]]:
        """Pieces that have a gradient, as many at once as a buffer holds."""
        bucket: list[Piece] = []
        bucket_bytes = 0
        for member in self._members.values():
            if _gradient(member.param) is None:
                continue
            for piece in self._pieces(member):
                piece_bytes = piece.num_bytes
                if bucket and bucket_bytes + piece_bytes > self._bucket_bytes:
                    yield bucket
                    bucket, bucket_bytes = [], 0
                bucket.append(piece)
                bucket_bytes += piece_bytes
        if bucket:
            yield bucket

    def _pieces(self, member: Member) -> list[Piece]:
        num_elements = member.param.numel()
        if not member.pieces:
            longest = num_elements
            if self._is_elementwise and member.homes:
                aligned = member.num_aligned
                longest = max(self._bucket_bytes // member.element_bytes // aligned, 1) * aligned
            bounds = [*range(0, num_elements, longest), num_elements]
            member.pieces = [Piece(member, start, stop) for start, stop in pairwise(bounds)]
        return member.pieces

    def _step_bucket(self, bucket: Bucket) -> list[dict[str, Any]]:
        """Step it and send it home. Returns the settings of each group as the step has left them."""
        self._mover.arrive(bucket)
        state = self._optimizer.state
        params: list[list[torch.Tensor]] = [[] for _ in self._optimizer.param_groups]
        pieces: list[tuple[Piece, torch.Tensor]] = []
        for piece, tensors in bucket.tensors.items():
            member = piece.member
            values = tensors.pop(MAIN) if MAIN in tensors else piece.part(member.param)
            param = values
            if not self._is_elementwise:
                param = values.view(member.param.shape)
                vars(param).update(vars(member.param))  # Muon looks up how it is split, and among which ranks
            _give_gradient(param, piece, member.param)
            if piece.has_state:
                state[param] = {name: tensor.view(param.shape) for name, tensor in tensors.items()} | piece.state
            params[member.group].append(param)
            pieces.append((piece, param))
        began = self._mover.mark()
        try:
            advanced = self._step_of(params)
        except BaseException:
            for _, param in pieces:
                state.pop(param, None)
            self._mover.put_back(bucket)
            raise
        self._updates.append((began, self._mover.mark()))
        moves: list[tuple[Span, torch.Tensor]] = []
        for piece, param in pieces:
            member = piece.member
            self._on_updated(member.param, piece.start, piece.stop, param)
            piece.has_state, piece.state = True, {}
            large = {MAIN: param} if MAIN in member.homes else {}
            for name, value in state.pop(param, {}).items():
                if _is_as_large(value, param):
                    large[name] = value
                else:
                    piece.state[name] = value
            for name, value in large.items():
                moves.append((piece.span(self._mover.home(member, name, value.dtype)), as_bytes(value)))
            self._tell_state(member)
        self._mover.take_out(moves, bucket)
        return advanced

    def _step_of(self, params: Sequence[list[torch.Tensor]]) -> list[dict[str, Any]]:
        """One call of the optimizer's own step: every group as it was, with these parameters alone.

        A group without any takes part: its counter of steps goes on (TransformerEngine's is in the group).
        """
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": mine} for group, mine in zip(groups, params, strict=True)]
        try:
            self._inner_step()
            return [
                {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
            ]
        finally:
            optimizer.param_groups = groups

    def _tell_state(self, member: Member) -> None:
        """The optimizer's state has an entry for the parameter itself, as without us."""
        state = {name: home.tensor for name, home in member.homes.items() if name != MAIN}
        self._optimizer.state[member.param] = state | member.pieces[0].state

    # ----------------------------------------------------------- what may change

    def let_rest(self, wanted: Collection[torch.Tensor]) -> None:
        """From now on the state of those parameters rests that are wanted, of all whose state once did. Between steps;
        what stays takes device memory, and keeps its place at home."""
        if all((member.param in wanted) == (member.param in self._members) for member in self.members):
            return
        self.hide()
        self.forget()
        self._order = []
        for member in self.members:  # first what makes room
            if member.param in wanted and member.param in self._staying:
                self._rest(member)
        self._mover.release()
        for member in self.members:
            if member.param not in wanted and member.param in self._members:
                self._stay(member)

    def _stay(self, member: Member) -> None:
        self._pieces(member)
        for name, values in self._mover.bring_whole(member).items():
            home = member.homes[name]
            home.tensor.data = values.view(home.shape)
        self._staying[member.param] = self._members.pop(member.param)

    def _rest(self, member: Member) -> None:
        state = self._optimizer.state.get(member.param, {})
        large = {name: value for name, value in state.items() if _is_as_large(value, member.param)}
        values = large | ({MAIN: member.param} if MAIN in member.homes else {})
        moves = []
        for name, value in values.items():
            home, source = self._mover.home(member, name, value.dtype), as_bytes(value)
            spans = (piece.span(home) for piece in member.pieces)
            moves += [((home, start, stop), source[start:stop]) for _, start, stop in spans]
        self._mover.take_out(moves)  # at once: slices of a tensor are one storage
        for name in values:
            member.homes[name].hide()
        self._members[member.param] = self._staying.pop(member.param)
        if state:
            self._keep_small(member, {name: value for name, value in state.items() if name not in large})

    def _keep_small(self, member: Member, small: dict[str, Any]) -> None:
        """The optimizer has state of ``member``; this is what of it does not rest."""
        for piece in self._pieces(member):
            piece.has_state = True
            piece.state = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in small.items()
            }
        self._tell_state(member)

    @property
    def staying_bytes(self) -> int:
        """Device memory of the state that rested once, and stays now."""
        return sum(home.num_bytes for member in self._staying.values() for home in member.homes.values())

    # --------------------------------------------------------------- checkpoints

    def show(self) -> None:
        """Everything that rests is a tensor in host memory, until the next step: to be read, or to be loaded into."""
        self.forget()
        self._mover.synchronize()
        for home in self.homes():
            home.show()
        self._shown = True

    def hide(self) -> None:
        """Host memory is ours again."""
        if self._shown:
            for home in self.homes():
                home.hide()
        self._shown = False

    def make_state(self) -> None:
        """As ``show``, and the optimizer has state for what was never stepped: what is loaded goes there."""
        self.show()
        for member in self._members.values():
            if member.param not in self._optimizer.state:
                state = {name: home.tensor for name, home in member.homes.items() if name != MAIN}
                if state:
                    self._optimizer.state[member.param] = state

    def loaded(self) -> None:
        """The optimizer's state was replaced (``load_state_dict``): what is as large as its parameter goes home."""
        for member in self._members.values():
            state = self._optimizer.state.get(member.param, {})
            small = {}
            for name, value in state.items():
                if _is_as_large(value, member.param):
                    home = self._mover.home(member, name, value.dtype)
                    if value is not home.tensor:
                        home.show()
                        home.tensor.copy_(value)
                else:
                    small[name] = value
            if state:
                self._keep_small(member, small)
        self.show()

    def homes(self) -> Iterator[Home]:
        """Of all that rests now."""
        for member in self._members.values():
            yield from member.homes.values()


def _is_as_large(value: Any, param: torch.Tensor) -> bool:
    """Whether ``value``, of a parameter's state, has a number for each of its elements."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Megatron's precision-aware optimizer gives it another name, since it has another type."""
    decoupled: torch.Tensor | None = vars(param).get("decoupled_grad")
    return param.grad if decoupled is None else decoupled


def _give_gradient(param: torch.Tensor, piece: Piece, of: torch.Tensor) -> None:
    gradient = _gradient(of)
    assert gradient is not None
    part = piece.part(gradient).view(param.shape)
    if vars(of).get("decoupled_grad") is None:
        param.grad = part
    else:
        param.decoupled_grad = part  # type: ignore[attr-defined]
