"""Problem: what autograd saves of microbatches that wait for their backward fills the device.

    pack       in a forward: each storage that autograd saves is recorded once, however many tensors lie in it
    OFFLOAD_F  launches when the next compute begins (host/copy_lane.py)
    FETCH_B    launches one compute before the backward
    unpack     in the backward: views of memory that is freed with the nodes of the graph

The device holds what is computed and one microbatch under way, in one direction at a time: before the next
one moves, compute is behind the copies of the last. schedules/offload.py has the picture, and says which
microbatches stay. Parameters, buffers, received and sent values stay, and so do storages below SMALL_BYTES. A
storage is copied whole, as it is at the end of its stage's forward, so views and strides are unchanged:
bit-equal.

Oracle: tests/unit/run/moves/test_moves_activations.py on fake streams, where leaving out any order is
detected; tests/parity/test_activation_offload.py against the plain loop. vDNN (arXiv 1602.08124), Capuchin
(ASPLOS 2020); torch.autograd.graph.save_on_cpu, which copies on the compute stream, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Self, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from outsize.device.streams import TorchStreams
from outsize.ir.plan import Plan
from outsize.ir.schedule import FETCH, Action, Kind, Schedule
from outsize.run.host.copy_lane import Bundle, CopyLane, Handle, OffloadedStorage
from outsize.run.moves.base import Moves
from outsize.run.moves.copies import WithCopies, following_compute
from outsize.schedules.offload import with_activation_copies

_BACK: Final = frozenset({Kind.B, Kind.I})
Key = tuple[int, int]  # stage, microbatch


@final
class SavedTensors(Bundle):
    """Holds what autograd saves in one forward of a stage."""

    def __init__(self, lane: CopyLane, staying: Iterable[Tensor]) -> None:
        super().__init__()
        self._lane, self._staying = lane, {_place(t) for t in staying}
        self._memories = WeakValueDictionary[int, OffloadedStorage]()

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        """Returns a handle for autograd to save, or the tensor itself where it stays on the device."""
        place = _place(tensor) if self._lane.takes(tensor) else None
        if place is None or place in self._staying:
            return tensor
        memory = self._memories.get(place)
        if memory is None:
            memory = self._memories[place] = OffloadedStorage(tensor)
        return Handle.of(memory, tensor)

    def unpack(self, packed: Tensor | Handle) -> Tensor:
        """Returns the tensor on the device."""
        if isinstance(packed, Tensor):
            return packed
        if packed.memory.here is None:
            self._lane.arrive(self)
        return packed.tensor()

    def keep(self, tensors: Iterable[Any]) -> None:
        """Ends the forward; these tensors are used elsewhere, so they stay on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._memories.pop(_place(tensor), None)

    def memories(self) -> list[OffloadedStorage]:
        """Returns the storages that the autograd graph still references."""
        return list(self._memories.values())


@final
class ActivationOffload:
    """Offloads activations of the stages of one process that the plan names."""

    def __init__(self, stages: Iterable[int], lane: Callable[[torch.device], CopyLane] | None = None) -> None:
        self.stages, self._made = frozenset(stages), lane or _lane
        self.lanes: dict[torch.device, CopyLane] = {}
        self._saved: dict[Key, tuple[CopyLane, SavedTensors]] = {}

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Creates the offload for all stages of the plan whose policy of activations offloads."""
        return cls(stage for stage, policy in enumerate(plan.activation_policies) if policy.offloads)

    def begin(self, stage: int, microbatch: int, staying: Sequence[Tensor]) -> SavedTensors:
        """Begins a forward; the tensors of `staying` (weights and received values) remain on the device."""
        device = max(staying, key=lambda tensor: tensor.nbytes).device if staying else torch.device("cpu")
        lane = self.lane(device)
        saved = SavedTensors(lane, staying)
        self._saved[stage, microbatch] = lane, saved
        return saved

    def lane(self, device: torch.device) -> CopyLane:
        """Returns the lane between a device and its host."""
        if device not in self.lanes:
            self.lanes[device] = self._made(device)
        return self.lanes[device]

    def combined_with(self, moves: Moves) -> Moves:
        """Returns other moves of the same rank together with these."""
        return WithCopies(moves, self) if self.stages else moves

    def forget(self) -> None:
        """Drops what an unfinished step left."""
        self._saved.clear()
        for lane in self.lanes.values():
            lane.forget()

    def scheduled(self, schedule: Schedule) -> Schedule:
        """Returns the schedule with the copies of the stages that offload."""
        return with_activation_copies(schedule, self.stages)

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """Returns the function that launches the copies of an OFFLOAD_F or a FETCH_B."""
        key, following = _key(row[at]), following_compute(row[at:])
        if row[at].kind in FETCH:
            return partial(self.fetch, key)
        if following is None or following.kind not in _BACK:
            return partial(self.send, key)
        awaited = _key(following)

        def leave() -> None:
            # The arrival is first, so that the copies may go into the buffer that it came from.
            self.arrive(awaited)
            self.send(key)

        return leave

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """Returns the function that waits for the activations of a backward, or None for other actions."""
        offloads = row[at].stage in self.stages and row[at].kind in _BACK
        return partial(self.arrive, _key(row[at])) if offloads else None

    def send(self, key: Key) -> None:
        """Sends a microbatch that waits for its backward to the host."""
        if key in self._saved:
            lane, saved = self._saved[key]
            lane.send(saved)

    def fetch(self, key: Key) -> None:
        """Launches the copies back, because the backward is the next action."""
        if key in self._saved:
            lane, saved = self._saved[key]
            lane.fetch(saved)

    def arrive(self, key: Key) -> None:
        """Waits for the copies, because the backward begins."""
        if key in self._saved:
            lane, saved = self._saved.pop(key)
            lane.arrive(saved)


def _lane(device: torch.device) -> CopyLane:
    place = str(device)
    return CopyLane(TorchStreams((place,)), place)


def _key(action: Action) -> Key:
    return action.stage, action.microbatch


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
