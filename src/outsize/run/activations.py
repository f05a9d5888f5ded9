"""Problem: what autograd saves of microbatches that wait for their backward fills the device.

    compute   F0   F1   F2   F3   B0   B1   B2   B3
    leaves         0    1    2    3
    comes                    0    1    2    3

    pack      in a forward: each storage that autograd saves is noted once, however many tensors lie in it
    send      when the next action begins: copies to the host; the device's memory is let go behind them
    fetch     one action before the backward: copies into new memory
    unpack    in the backward: views of that memory, which is freed with the nodes of the graph, as ever

The device has what is at work and one microbatch on its way, in one direction at a time: before the next one
moves, compute is behind the copies of the last. A microbatch whose backward comes within two actions stays.
Parameters, buffers, what came in and what is sent stay, and so do storages below SMALL_BYTES. A storage is
copied as it is at the end of its stage's forward, whole, so views and strides are as they were: bit-equal.

Orders, on CUDA by events: no copy before the value is there, none into memory whose last use is not over, no
use before the copy, no letting go before it. On a CPU device and host are the same memory, and copies are
made all the same. Oracle: tests/unit/run/test_activations.py on fake streams, each order left out and found;
tests/parity/test_activation_offload.py against the plain loop.
vDNN (arXiv 1602.08124), Capuchin (ASPLOS 2020); torch.autograd.graph.save_on_cpu, which copies on the compute
stream, each tensor by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from outsize.ir.graph import SMALL_BYTES
from outsize.ir.plan import Plan
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.run.cut import Cut
from outsize.run.flat import aligned
from outsize.run.moves import Moves
from outsize.run.streams import Event, Streams, TorchStreams

_HOST: Final = "cpu"
_BACK: Final = frozenset({Kind.B, Kind.I})
Key = tuple[int, int]  # stage, microbatch


@final
class _Memory:
    """A storage that autograd saves, as flat bytes: on the device, on the host, or between them."""

    __slots__ = ("__weakref__", "away", "here")

    def __init__(self, here: Tensor) -> None:
        self.here: Tensor | None = here
        self.away: Tensor | None = None


@final
class _Handle(NamedTuple):
    """What the graph has in the place of a tensor. The memory lives as long as such handles do."""

    memory: _Memory
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@final
@dataclass(slots=True, eq=False)
class _Block:
    """A buffer of the host. `read`: the point behind which the last copy from it is over."""

    data: Tensor
    read: Event


@final
class Saved:
    """What autograd saves in one forward of a stage."""

    def __init__(self, lane: Lane, staying: Iterable[Tensor]) -> None:
        self._lane, self._staying = lane, {_place(t) for t in staying}
        self._memories = WeakValueDictionary[int, _Memory]()
        self.away: _Block | None = None  # where it is on the host
        self.coming: _Block | None = None  # from where it is on its way

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """A handle, or the tensor itself where it stays."""
        if not self._goes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]
            memory = self._memories[storage._cdata] = _Memory(flat)
        return _Handle(memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _Handle) -> Tensor:
        """The tensor, on the device."""
        if isinstance(packed, Tensor):
            return packed
        if packed.memory.here is None:
            self._lane.arrive(self)
        here = packed.memory.here
        assert here is not None
        empty = torch.empty(0, dtype=packed.dtype, device=here.device)
        return empty.set_(here.untyped_storage(), packed.offset, packed.shape, packed.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def keep(self, tensors: Iterable[Any]) -> None:
        """The forward is over; these are used elsewhere, so they stay."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._memories.pop(_place(tensor), None)

    def memories(self) -> list[_Memory]:
        """Those that the graph still has."""
        return list(self._memories.values())

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.device != self._lane.device or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._lane.least_bytes and storage._cdata not in self._staying


@final
class Lane:
    """Between a device and the host."""

    def __init__(self, streams: Streams, place: str, least_bytes: int = SMALL_BYTES) -> None:
        self.device, self.least_bytes = streams.device(place), least_bytes
        self._streams, self._place, self._compute = streams, place, streams.compute(place)
        here = streams.is_host(place)
        self._out = self._compute if here else streams.copies(place, _HOST)
        self._back = self._compute if here else streams.copies(_HOST, place)
        self._leaving: tuple[Event, list[Tensor]] | None = None
        self._spare: list[_Block] = []
        self.buffers: list[Tensor] = []  # of the host, those in use too

    def send(self, saved: Saved) -> None:
        """Launch the copies to the host."""
        memories = [(m, m.here) for m in saved.memories() if m.here is not None]
        if not memories:
            return
        self.settle()
        block = saved.away = self._take(sum(aligned(here.numel()) for _, here in memories))
        self._out.after(self._compute.record())
        first = 0
        for memory, here in memories:
            memory.away, memory.here = block.data[first : first + here.numel()], None
            self._out.copy(memory.away, here)
            first += aligned(here.numel())
        self._leaving = self._out.record(), [here for _, here in memories]
        if self._leaving[0].done():
            self.settle()

    def fetch(self, saved: Saved) -> None:
        """Launch the copies to the device, if it is away."""
        block = saved.away
        if block is None:
            return
        self.settle()
        coming = [(m, m.away) for m in saved.memories() if m.away is not None]
        for memory, away in coming:
            memory.here, memory.away = self._streams.empty(self._place, away.numel()), None
        self._back.after(self._compute.record())
        for memory, away in coming:
            assert memory.here is not None
            self._back.copy(memory.here, away)
        block.read = self._back.record()
        saved.away, saved.coming = None, block

    def arrive(self, saved: Saved) -> None:
        """What is launched on the device from now on may read it, and may write what it was copied from."""
        self.fetch(saved)
        if saved.coming is not None:
            self._compute.after(saved.coming.read)
            self._spare.append(saved.coming)
            saved.coming = None

    def settle(self) -> None:
        """The last one that was sent has left: its memory on the device may be used anew."""
        if self._leaving is not None:
            self._compute.after(self._leaving[0])
            self._leaving = None

    def _take(self, size_bytes: int) -> _Block:
        """A buffer of the host; a spare one that is too small goes, so there are no more than were in use."""
        fitting = [block for block in self._spare if block.data.numel() >= size_bytes]
        if fitting:
            best = min(fitting, key=lambda block: block.data.numel())
            self._spare.remove(best)
            return best
        if self._spare:
            small = self._spare.pop()
            small.read.wait()
            self.buffers = [data for data in self.buffers if data is not small.data]
        self.buffers.append(self._streams.host(size_bytes))
        return _Block(self.buffers[-1], self._compute.record())


@final
class Activations:
    """Of the stages of one process whose activations go to the host."""

    def __init__(self, stages: Iterable[int], lane: Callable[[torch.device], Lane] | None = None) -> None:
        self.stages, self._made = frozenset(stages), lane or _lane
        self.lanes: dict[torch.device, Lane] = {}
        self._saved: dict[Key, tuple[Lane, Saved]] = {}

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Of all stages of the plan that say so."""
        stages = range(len(plan.stages))
        return cls(stage for stage in stages if plan.recompute_of(stage) == "offload")

    def begin(self, stage: int, microbatch: int, staying: Sequence[Tensor]) -> Saved:
        """A forward begins. `staying`: weights, and what comes in."""
        device = max(staying, key=lambda tensor: tensor.nbytes).device if staying else torch.device(_HOST)
        if device not in self.lanes:
            self.lanes[device] = self._made(device)
        saved = Saved(self.lanes[device], staying)
        self._saved[stage, microbatch] = self.lanes[device], saved
        return saved

    def beside(self, moves: Moves) -> Moves:
        """With other moves of the same rank."""
        return _Beside(moves, self) if self.stages else moves

    def forget(self) -> None:
        """Drop what an unfinished step left behind."""
        for key in list(self._saved):
            self.arrive(key)
        for lane in self.lanes.values():
            lane.settle()

    def send(self, key: Key) -> None:
        """The microbatch waits for its backward."""
        if key in self._saved:
            lane, saved = self._saved[key]
            lane.send(saved)

    def fetch(self, key: Key) -> None:
        """Its backward is the next action."""
        if key in self._saved:
            lane, saved = self._saved[key]
            lane.fetch(saved)

    def arrive(self, key: Key) -> None:
        """Its backward begins."""
        if key in self._saved:
            lane, saved = self._saved.pop(key)
            lane.arrive(saved)


def _lane(device: torch.device) -> Lane:
    place = str(device)
    return Lane(TorchStreams((place,)), place)


@final
class _Beside(Moves):
    """Other moves of a rank, and those of its activations."""

    def __init__(self, moves: Moves, activations: Activations) -> None:
        self._moves, self._activations = moves, activations

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return self._moves.scheduled(schedule, cut)

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        return self._moves.action(row, at)

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """Whatever the others wait for; then what this action needs is there, what the last one left goes,
        and what the next one needs comes.
        """
        other = self._moves.arrival(row, at)
        steps = [*([other] if other is not None else []), *self._steps(row, at)]

        def run() -> None:
            for step in steps:
                step()

        return run if steps else None

    def _steps(self, row: Sequence[Action], at: int) -> list[Callable[[], None]]:
        moved, here = self._activations, row[at]
        before, after = _compute(row, range(at - 1, -1, -1)), _compute(row, range(at + 1, len(row)))
        near = {_key(a) for a in (here, after) if a is not None and a.kind in _BACK}
        found: list[Callable[[], None]] = []
        if here.kind in _BACK:  # first: what is sent may then go into the buffer that this one came from
            found.append(partial(moved.arrive, _key(here)))
        if before is not None and before.kind is Kind.F and _key(before) not in near:
            found.append(partial(moved.send, _key(before)))
        if after is not None and after.kind in _BACK:
            found.append(partial(moved.fetch, _key(after)))
        return found


def _compute(row: Sequence[Action], places: range) -> Action | None:
    """The first action of compute among these places of a row."""
    return next((row[n] for n in places if row[n].kind in COMPUTE), None)


def _key(action: Action) -> Key:
    return action.stage, action.microbatch


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
