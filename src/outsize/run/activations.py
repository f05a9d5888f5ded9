"""Problem: what autograd saves of microbatches that wait for their backward fills the device.

    compute   F0   F1   F2   F3   B0   B1   B2   B3
    leaves         0    1    2    3
    comes                    0    1    2    3

    pack      in a forward: each storage that autograd saves is noted once, however many tensors lie in it
    send      when the next action begins (lane.py)
    fetch     one action before the backward
    unpack    in the backward: views of memory which is freed with the nodes of the graph, as ever

The device has what is at work and one microbatch on its way, in one direction at a time: before the next one
moves, compute is behind the copies of the last. A microbatch whose backward comes within two actions stays.
Parameters, buffers, what came in and what is sent stay, and so do storages below SMALL_BYTES. A storage is
copied as it is at the end of its stage's forward, whole, so views and strides are as they were: bit-equal.

Oracle: tests/unit/run/test_activations.py on fake streams, each order left out and found;
tests/parity/test_activation_offload.py against the plain loop.
vDNN (arXiv 1602.08124), Capuchin (ASPLOS 2020); torch.autograd.graph.save_on_cpu, which copies on the compute
stream, each tensor by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Self, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from outsize.ir.plan import Plan
from outsize.ir.schedule import Action, Kind
from outsize.run.beside import Beside
from outsize.run.lane import Bundle, Handle, Lane, Memory
from outsize.run.moves import Moves
from outsize.run.streams import TorchStreams

_BACK: Final = frozenset({Kind.B, Kind.I})
Key = tuple[int, int]  # stage, microbatch


@final
class Saved(Bundle):
    """What autograd saves in one forward of a stage."""

    def __init__(self, lane: Lane, staying: Iterable[Tensor]) -> None:
        super().__init__()
        self._lane, self._staying = lane, {_place(t) for t in staying}
        self._memories = WeakValueDictionary[int, Memory]()

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        """A handle, or the tensor itself where it stays."""
        place = _place(tensor) if self._lane.takes(tensor) else None
        if place is None or place in self._staying:
            return tensor
        memory = self._memories.get(place)
        if memory is None:
            memory = self._memories[place] = Memory(tensor)
        return Handle.of(memory, tensor)

    def unpack(self, packed: Tensor | Handle) -> Tensor:
        """The tensor, on the device."""
        if isinstance(packed, Tensor):
            return packed
        if packed.memory.here is None:
            self._lane.arrive(self)
        return packed.tensor()

    def keep(self, tensors: Iterable[Any]) -> None:
        """The forward is over; these are used elsewhere, so they stay."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._memories.pop(_place(tensor), None)

    def memories(self) -> list[Memory]:
        """Those that the graph still has."""
        return list(self._memories.values())


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
        device = max(staying, key=lambda tensor: tensor.nbytes).device if staying else torch.device("cpu")
        if device not in self.lanes:
            self.lanes[device] = self._made(device)
        saved = Saved(self.lanes[device], staying)
        self._saved[stage, microbatch] = self.lanes[device], saved
        return saved

    def beside(self, moves: Moves) -> Moves:
        """With other moves of the same rank."""
        return Beside(moves, self._steps) if self.stages else moves

    def forget(self) -> None:
        """Drop what an unfinished step left behind."""
        self._saved.clear()
        for lane in self.lanes.values():
            lane.forget()

    def _steps(self, before: Action | None, here: Action, after: Action | None) -> list[Callable[[], None]]:
        """What this action needs is there, what the last one left goes, and what the next one needs comes."""
        near = {_key(a) for a in (here, after) if a is not None and a.kind in _BACK}
        found: list[Callable[[], None]] = []
        if here.kind in _BACK:  # first: what is sent may then go into the buffer that this one came from
            found.append(partial(self.arrive, _key(here)))
        if before is not None and before.kind is Kind.F and _key(before) not in near:
            found.append(partial(self.send, _key(before)))
        if after is not None and after.kind in _BACK:
            found.append(partial(self.fetch, _key(after)))
        return found

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


def _key(action: Action) -> Key:
    return action.stage, action.microbatch


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
