"""Problem: in layer-wise order, boundary values of all microbatches and stages fill the device.

    compute   0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 0B0 0B1 0B2   x: sent from stage 0 to 1, g: its gradient
    leaves        x0  x1  x2          x0  x1  x2  g0  g1  g2
    comes             x0  x1  x2  x0  x1  x2         g0  g1  g2

    wrap     a stage passes on a value or a gradient: its message slot holds a handle
    receive  a value that another rank has sent is copied out of its message, which may be received into again
    pack     autograd saves a handle of a received value, for the stage that recomputes
    OFFLOAD  launches the copies of what a compute action has left and no near one needs
    FETCH    launches the copies of what the next compute action but one needs
    take     the next stage, or the backward, gets the tensor in its present memory

A storage moves once, however many stages wait for it. So the device holds what is computed, what has just
left and what is about to come, whatever the number of stages and microbatches. The row of actions and the
boundaries say who needs what (`touched`); a stage references edges of its graph instead of tensors
(stage/stage.py, `bare`). Recompute is the other half: a stage that saves activations holds them on the
device. Storages below SMALL_BYTES stay, and those of which a value is the smaller part. Bytes and strides
come back unchanged, so results are bit-equal. ZeRO-Infinity (arXiv 2104.07857, sec. 5.1.2), L2L (arXiv
2002.05645).

Oracle: tests/unit/run/moves/test_boundary_values.py on fake streams, where leaving out any order is detected;
tests/parity/test_value_offload.py against the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Self, final
from weakref import WeakValueDictionary

from torch import Tensor

from outsize.ir.schedule import COMPUTE, FETCH, Action, Kind, Schedule
from outsize.run.host.copy_lane import Bundle, CopyLane, Handle, OffloadedStorage
from outsize.run.moves.base import Moves, PassedValues, Receiver
from outsize.run.moves.base import ValueKey as Key
from outsize.run.moves.copies import WithCopies
from outsize.run.stage.cut import Cut
from outsize.run.stage.stage import Saving, identity
from outsize.run.transport.base import Pending
from outsize.run.transport.wire_layout import copied
from outsize.schedules.offload import computed, with_value_copies


@final
class OffloadedValue(Bundle):
    """Holds one storage that stages pass on."""

    def __init__(self, memory: OffloadedStorage) -> None:
        super().__init__()
        self.memory = memory

    def memories(self) -> list[OffloadedStorage]:
        """Returns the one storage."""
        return [self.memory]


@final
class ValueHandle(Pending):
    """Takes the place of a tensor in a message slot or a graph; `wait` returns the tensor on the device."""

    def __init__(self, take: Callable[[], Tensor | None]) -> None:
        self._take = take

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        return self._take()

    def release(self) -> None:
        """Does nothing: a value is freed with its last handle."""


@final
class ReceivedValue(Pending):
    """Takes the place of a message in its slot: `wait` copies the value out of it and lets the message go,
    `release` lets the value go.
    """

    def __init__(self, own: Callable[[Tensor], Pending], message: Pending) -> None:
        self._own, self._message = own, message
        self._value: Pending | None = None

    def ready(self) -> bool:
        return self._message.ready()

    def wait(self) -> Tensor | None:
        tensor = self._message.wait()
        if tensor is not None:
            self._value = self._own(tensor)
        self._message.release()
        return None if self._value is None else self._value.wait()

    def release(self) -> None:
        self._value = None


@final
class BoundaryValues(PassedValues):
    """Passes values between the stages of one device, and holds those of others; without a lane all of them
    stay there.

    `copy_weight_view` copies values that are views of a weight that moves.
    """

    def __init__(
        self, lane: CopyLane | None = None, copy_weight_view: Callable[[Any], Any] = identity
    ) -> None:
        self.lane, self.copy_weight_view = lane, copy_weight_view
        self._at = WeakValueDictionary[Key, OffloadedValue]()
        self._in = WeakValueDictionary[int, OffloadedValue]()  # The key identifies a storage.

    @property
    def offloads(self) -> bool:
        """Returns whether anything moves."""
        return self.lane is not None

    @property
    def saving(self) -> Saving | None:
        return self.begin if self.offloads else None

    def pends(self, giver: int, taker: int) -> bool:
        return self.offloads

    def receiver(self, key: Key) -> Receiver:
        return partial(ReceivedValue, partial(self._received, key)) if self.offloads else identity

    def wrapper(self, key: Key, giver: int, *, is_sent: bool) -> Callable[[Any], Any]:
        return partial(self.wrap, key) if self.offloads and not is_sent else self.copy_weight_view

    def output(self, value: Any) -> Any:
        return self.copy_weight_view(value)

    def wrap(self, key: Key, tensor: Tensor | None) -> Pending:
        """Returns the handle that goes into a message slot."""
        tensor = self.copy_weight_view(tensor)
        value = None if tensor is None else self._of(tensor)
        if tensor is None or value is None:
            return ValueHandle(lambda: tensor)
        self._at[key] = value
        return self._handle(value, tensor)

    def _received(self, key: Key, tensor: Tensor) -> Pending:
        return self.wrap(key, copied(tensor))

    def begin(self, microbatch: int, staying: Sequence[Tensor]) -> Self:
        """Begins a forward; what autograd saves of it goes through `pack`."""
        return self

    def pack(self, tensor: Tensor) -> Tensor | ValueHandle:
        """Returns a handle for a value of this object, and other tensors unchanged."""
        value = self._known(tensor)
        return tensor if value is None else self._handle(value, tensor)

    def unpack(self, packed: Tensor | ValueHandle) -> Tensor | None:
        """Returns the tensor on the device."""
        return packed.wait() if isinstance(packed, ValueHandle) else packed

    def keep(self, tensors: Iterable[Any]) -> None:
        """Ends the forward."""

    def combined_with(self, moves: Moves, cuts: Sequence[Cut]) -> Moves:
        return moves if self.lane is None else WithCopies(moves, _ValueCopies(self, self.lane, cuts))

    def forget(self) -> None:
        if self.lane is not None:
            self.lane.forget()

    def values_at(self, keys: Iterable[Key]) -> list[OffloadedValue]:
        """Returns the distinct values under these keys."""
        values = (self._at.get(key) for key in keys)
        return list({id(value): value for value in values if value is not None}.values())

    def _handle(self, value: OffloadedValue, tensor: Tensor) -> ValueHandle:
        return ValueHandle(partial(self._take, value, Handle.of(value.memory, tensor)))

    def _take(self, value: OffloadedValue, handle: Handle) -> Tensor:
        if value.memory.here is None and self.lane is not None:
            self.lane.arrive(value)
        tensor = handle.tensor()
        self._in[_storage(tensor)] = value
        return tensor

    def _of(self, tensor: Tensor) -> OffloadedValue | None:
        """Returns the value of a tensor's storage, new or known; None where the storage stays on
        the device.
        """
        if self.lane is None or not self.lane.takes(tensor):
            return None
        if tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
            return None
        value = self._known(tensor)
        if value is None:
            value = self._in[_storage(tensor)] = OffloadedValue(OffloadedStorage(tensor))
        return value

    def _known(self, tensor: Tensor) -> OffloadedValue | None:
        """Returns the value whose memory this storage is now; ids of freed storages may be in use again."""
        place = _storage(tensor)
        value = self._in.get(place)
        here = None if value is None else value.memory.here
        return value if here is not None and _storage(here) == place else None


@final
class _ValueCopies:
    """Performs the copies of the values of microbatches whose programs are `cuts[microbatch]`."""

    def __init__(self, values: BoundaryValues, lane: CopyLane, cuts: Sequence[Cut]) -> None:
        self._values, self._lane, self._cuts = values, lane, cuts

    def scheduled(self, schedule: Schedule) -> Schedule:
        return with_value_copies(schedule)

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        own = self._keys(computed(row[at]))
        if row[at].kind in FETCH:
            return partial(self._fetch, own)
        coming = [action for action in islice(row, at, None) if action.kind in COMPUTE][:2]
        here, near = self._keys(*coming[:1]), self._keys(*coming)

        def leave() -> None:
            # The arrival is first, so that the copies may go into the buffers that it came from.
            self._arrive(here)
            staying = {id(value) for value in self._values.values_at(near)}
            leaving = (value for value in self._values.values_at(own) if id(value) not in staying)
            self._lane.send(*leaving)

        return leave

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return partial(self._arrive, self._keys(row[at]))

    def _fetch(self, keys: Iterable[Key]) -> None:
        for value in self._values.values_at(keys):
            self._lane.fetch(value)

    def _arrive(self, keys: Iterable[Key]) -> None:
        for value in self._values.values_at(keys):
            self._lane.arrive(value)

    def _keys(self, *actions: Action) -> frozenset[Key]:
        return frozenset(key for action in actions for key in touched(action, self._cuts[action.microbatch]))


def touched(action: Action, cut: Cut) -> Iterator[Key]:
    """Yields what an action reads and passes on; a backward recomputes from what its forward received."""
    program, stage, mb = cut.programs[action.stage], action.stage, action.microbatch
    yield from ((b.key, stage, mb, False) for b in program.received)
    if action.kind is Kind.F:
        yield from ((b.key, taker, mb, False) for b in program.sent for taker in b.consumers)
    else:
        yield from ((b.key, stage, mb, True) for b in (*program.received, *program.sent))
        yield from ((b.key, b.previous(stage), mb, True) for b in program.received)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
