"""Problem: layer by layer, what all microbatches have at the ends of all stages fills the device.

    compute   0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 0B0 0B1 0B2      x: what stage 0 hands to 1, g: its gradient
    leaves        x0  x1  x2  x0  x1  x2  g0  g1  g2
    comes             x0  x1  x2  x0  x1  x2  g0  g1  g2

    lend      a stage hands a value or a gradient on: its cell has a handle
    pack      autograd keeps a handle of a value that came in, for the stage that computes anew
    send      behind the last action that needs it for now; fetch: one action before the next that does
    take      the next stage, or the backward: the tensor, in the memory that it has now

A storage moves once, however many stages wait for it. So the device has what is at work, what has just left
and what is about to come: neither more stages nor more microbatches make that more. The row of actions and
the boundaries say who needs what (`touched`); a stage keeps edges of its graph instead of tensors (stage.py,
`bare`). What is recomputed is the other half: a stage that keeps what it computes keeps it on the device.
Storages below SMALL_BYTES stay, and those of which a value is the smaller part. Bit-equal: bytes come back as
they left, with their strides. ZeRO-Infinity (arXiv 2104.07857, sec. 5.1.2), L2L (arXiv 2002.05645).
Oracle: tests/unit/run/test_values.py on fake streams, each order left out and found;
tests/parity/test_value_offload.py against the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self, final
from weakref import WeakValueDictionary

from torch import Tensor

from outsize.ir.schedule import Action, Kind
from outsize.run.beside import Beside, Move
from outsize.run.cells import as_it_is
from outsize.run.cut import Cut
from outsize.run.lane import Bundle, Handle, Lane, Memory
from outsize.run.moves import Moves
from outsize.run.transport import Pending

Key = tuple[int, int, int, bool]  # boundary, stage that takes it, microbatch; is it a gradient?


@final
class Value(Bundle):
    """One storage that stages hand on."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def memories(self) -> list[Memory]:
        """It alone."""
        return [self.memory]


@final
class Lent(Pending):
    """In a cell or a graph in the place of a tensor; what it takes is on the device."""

    def __init__(self, take: Callable[[], Tensor | None]) -> None:
        self._take = take

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        return self._take()

    def release(self) -> None:
        """Whoever has the last one of a value lets go of it."""


@final
class Values:
    """Of the stages of one device; without a lane all stay. `apart` has memory of its own for what is a view
    of a weight that goes.
    """

    def __init__(self, lane: Lane | None = None, apart: Callable[[Any], Any] = as_it_is) -> None:
        self.lane, self.apart = lane, apart
        self._at = WeakValueDictionary[Key, Value]()
        self._in = WeakValueDictionary[int, Value]()  # by storage

    @property
    def lends(self) -> bool:
        """Whether anything moves."""
        return self.lane is not None

    def lend(self, key: Key, tensor: Tensor | None) -> Pending:
        """What goes into a cell."""
        tensor = self.apart(tensor)
        value = None if tensor is None else self._of(tensor)
        if tensor is None or value is None:
            return Lent(lambda: tensor)
        self._at[key] = value
        return self._lent(value, tensor)

    def begin(self, microbatch: int, staying: Sequence[Tensor]) -> Self:
        """A forward begins: what autograd saves of it goes through `pack`."""
        return self

    def pack(self, tensor: Tensor) -> Tensor | Lent:
        """Of a value that was lent."""
        value = self._known(tensor)
        return tensor if value is None else self._lent(value, tensor)

    def unpack(self, packed: Tensor | Lent) -> Tensor | None:
        """The tensor, on the device."""
        return packed.wait() if isinstance(packed, Lent) else packed

    def keep(self, tensors: Iterable[Any]) -> None:
        """The forward is over."""

    def beside(self, moves: Moves, cuts: Sequence[Cut]) -> Moves:
        """With other moves of the same rank, of microbatches with these programs."""
        return moves if self.lane is None else Beside(moves, partial(self._steps, self.lane, cuts))

    def forget(self) -> None:
        """Drop what an unfinished step left behind."""
        if self.lane is not None:
            self.lane.forget()

    def _steps(
        self, lane: Lane, cuts: Sequence[Cut], before: Action | None, here: Action, after: Action | None
    ) -> list[Move]:
        needed, left, next_ = (_keys(action, cuts) for action in (here, before, after))

        def move() -> None:
            for value in self._found(needed):  # first: what is sent may then go into the buffers of these
                lane.arrive(value)
            near = {id(value) for value in self._found(needed | next_)}
            lane.send(*(value for value in self._found(left) if id(value) not in near))
            for value in self._found(next_):
                lane.fetch(value)

        return [move]

    def _found(self, keys: Iterable[Key]) -> list[Value]:
        """Each once."""
        found = (self._at.get(key) for key in keys)
        return list({id(value): value for value in found if value is not None}.values())

    def _lent(self, value: Value, tensor: Tensor) -> Lent:
        return Lent(partial(self._take, value, Handle.of(value.memory, tensor)))

    def _take(self, value: Value, handle: Handle) -> Tensor:
        if value.memory.here is None and self.lane is not None:
            self.lane.arrive(value)
        tensor = handle.tensor()
        self._in[_storage(tensor)] = value
        return tensor

    def _of(self, tensor: Tensor) -> Value | None:
        """A new one where nobody has lent the storage; None where it stays."""
        if self.lane is None or not self.lane.takes(tensor):
            return None
        if tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
            return None
        value = self._known(tensor)
        if value is None:
            value = self._in[_storage(tensor)] = Value(Memory(tensor))
        return value

    def _known(self, tensor: Tensor) -> Value | None:
        """Whose memory is this storage now; of storages that are gone others have the numbers."""
        place = _storage(tensor)
        value = self._in.get(place)
        here = None if value is None else value.memory.here
        return value if here is not None and _storage(here) == place else None


def touched(action: Action, cut: Cut) -> Iterator[Key]:
    """What an action reads, and what it hands on; a backward computes anew from what its forward received."""
    program, stage, mb = cut.programs[action.stage], action.stage, action.microbatch
    yield from ((b.key, stage, mb, False) for b in program.received)
    if action.kind is Kind.F:
        yield from ((b.key, taker, mb, False) for b in program.sent for taker in b.consumers)
    else:
        yield from ((b.key, stage, mb, True) for b in (*program.received, *program.sent))
        yield from ((b.key, b.previous(stage), mb, True) for b in program.received)


def _keys(action: Action | None, cuts: Sequence[Cut]) -> frozenset[Key]:
    return frozenset() if action is None else frozenset(touched(action, cuts[action.microbatch]))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
