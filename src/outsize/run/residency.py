"""Problem: a model is larger than its device. Which weights are on the device, and when do they move?

    master    the model's own parameter, on the host, a view of its block's buffer (flat.py)
    twin      a parameter on the device, a view of a place there that stages share in turn
    LOAD s    one copy of the block into its place; twins stand in the modules instead of the masters
    F, B      wait for the copy, compute with the twins; gradients add up on the device
    UNLOAD s  gradients leave for the masters' `.grad`, in memory of whoever reads them (landing.py);
              stand-ins are in the modules, so that whatever computes with a stage that is not there fails

How many stages have places at a time is the schedule's affair: two, or all of them.
Between steps the masters are in the modules, so optimizers, schedulers, state dicts, clipping see an ordinary
model on the host. A gradient that is there before a step (accumulation) comes to the device first, so sums
are added in the order of the plain loop. A weight that several stages use has a place of its own and stays
from the first of them to the last. Buffers live on the device.

Orders, on CUDA by events (links.py has the same): no copy into a place before the last use of what was
there, no use before the copy, no reading of a gradient by the host before it has landed, no freeing of one
before it has left, no landing where an optimizer reads. Oracle: tests/unit/run/test_residency.py on fake
streams, each order left out and found; tests/parity/test_offload_parity.py against the plain loop.
ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity (arXiv 2104.07857).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption, InvalidSchedule
from outsize.program.tree import map_leaves
from outsize.run.flat import Berth, Block, Going, Room, kept
from outsize.run.landing import Landing
from outsize.run.layout import Layout, pack, packed_bytes
from outsize.run.streams import Event, Streams
from outsize.run.weights import like, places

Users = Mapping[str, frozenset[int]]  # weight -> stages that compute with it
_HELD: Final = ("_parameters", "_buffers", "_modules")


@final
class Place:
    """Memory of the device that blocks have in turn. `free`: the point behind which it may be written."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.data, self.free = streams.empty(name, 0), streams.compute(name).record()

    def grow(self, size_bytes: int) -> None:
        """Views stay valid."""
        if size_bytes > self.data.untyped_storage().nbytes():
            self.data.untyped_storage().resize_(size_bytes)
            self.data = self.data.as_strided((size_bytes,), (1,))


@final
class Absent(nn.Parameter):
    """Stands in a module for a weight that is not on the device: it refuses every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise InvalidSchedule(
            "a weight is used that is not on the device",
            numbers=f"by {getattr(func, '__name__', func)}",
            next_step="load its stage before; outsize.schedules.offload.check_loads names the cell",
        )


@final
@dataclass(eq=False)
class Guest:
    """A block at its place on the device, under one row of actions."""

    block: Block
    place: Place
    first: int
    users: frozenset[int]
    twins: dict[str, nn.Parameter] = field(default_factory=dict)
    loaded: Event | None = None


@final
class Residency:
    """The weights of one model, and what of them is on one device."""

    def __init__(self, model: nn.Module, streams: Streams, device: str, room: Room | None = None) -> None:
        """`room`: where the host has it; None: in memory that can be copied to unpaged."""
        self._model, self._streams, self._device = model, streams, device
        self.room = room or streams.host
        self.compute = streams.compute(device)
        here = streams.is_host(device)
        self._down = self.compute if here else streams.copies("cpu", device)
        self._up = self.compute if here else streams.copies(device, "cpu")
        self._places: dict[Hashable, Place] = {}
        self._blocks: list[Block] = []
        self._block_of: dict[str, Block] = {}
        self._absent: dict[str, nn.Parameter] = {}
        self._modules = _Modules(model)
        self._leaving: deque[tuple[Event, list[Tensor]]] = deque()
        self.landing = Landing(threaded=False, room=self.room)

    @property
    def device_bytes(self) -> int:
        """Of all places."""
        return sum(place.data.numel() for place in self._places.values())

    @property
    def host_bytes(self) -> int:
        """Of masters, of gradients that have landed, and of what is put by."""
        return self.landing.host_bytes + sum(block.host_bytes for block in self._blocks)

    def guests(self, users: Users, colour: Mapping[int, int]) -> list[Guest]:
        """Blocks of these weights at their places; `colour[stage]`: which one.

        Raises BadOption for a weight with hooks of its own.
        """
        self._modules.find()
        masters = self._modules.masters()
        users = {name: stages for name, stages in users.items() if name in masters}
        self._insist_on_no_hooks(users, masters)
        self._make_blocks(users, masters)
        return self._guests(users, colour)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A run of microbatches: before and after it the masters are in the modules."""
        masters = self._modules.masters()
        for name, block in self._block_of.items():
            block.adopt(name, masters[name])
        self._hide(self._block_of)
        try:
            yield
        finally:
            self._modules.put({n: b.masters[n] for n, b in self._block_of.items()})
            self._finish()

    def load(self, coming: Iterable[Guest], graded: Iterable[Guest]) -> None:
        """Launch the copies, and put the twins into the modules; `graded` with the gradients they have."""
        for guest in coming:
            block, place = guest.block, guest.place
            self._down.after(place.free)
            there = place.data[guest.first : guest.first + block.size_bytes]
            self._down.copy(there, block.values)
            for name, master in block.masters.items():
                guest.twins[name].requires_grad_(master.requires_grad)
            guest.loaded = self._down.record()
            self._modules.put(guest.twins)
        self.bring(graded)

    def bring(self, graded: Iterable[Guest]) -> None:
        """Launch the copies of the gradients that they have."""
        for guest in graded:
            for name, master in guest.block.masters.items():
                if master.grad is not None:
                    guest.twins[name].grad = self._lowered(master.grad)
            guest.loaded = self._down.record()

    def unload(self, going: Sequence[Guest], trained: Sequence[Guest], final: bool, last: bool) -> None:
        """Take the twins out of the modules; launch the copies of gradients, their last ones if `final`. With
        the row's `last` one wait for the optimizer, whose steps are of the step that is measured.
        """
        for guest in going:
            self._hide(guest.twins)
        landed = self._land(trained, self.landing.berths if final else kept) if trained else []
        now = self.compute.record()
        for guest in going:
            guest.place.free = now
        if final and landed:
            self.landing(landed, self._leaving[-1][0])
        if last:
            self.landing.finish()

    def apart(self, value: Tensor | None) -> Tensor | None:
        """What a stage hands on: a copy where it is a view of a weight, whose place others take in turn."""
        here = {place.data.untyped_storage().data_ptr() for place in self._places.values()} - {0}
        if value is None or value.untyped_storage().data_ptr() not in here:
            return value
        layout = Layout.of(value)
        copy = layout.empty(value.device)
        layout.memory(copy).copy_(pack(value))
        return copy

    def _hide(self, names: Iterable[str]) -> None:
        """Whatever computes with these weights now fails."""
        for name in names:
            if name not in self._absent:
                self._absent[name] = Absent(torch.empty(0), requires_grad=False)
        self._modules.put({name: self._absent[name] for name in names})

    def _land(
        self, guests: Sequence[Guest], berths: Callable[[Sequence[Going]], list[Berth]]
    ) -> list[nn.Parameter]:
        """The masters whose gradients are on their way to their berths."""
        while self._leaving:
            self._let_go()
        found, going = list[nn.Parameter](), list[Going]()
        for guest in guests:
            for name, gradient in _taken(guest):
                master = guest.block.masters[name]
                found.append(master)
                if gradient.layout is torch.strided:
                    going.append((guest.block, name, gradient))
                else:
                    master.grad = gradient.to(master.device)
        held = [packed_bytes(gradient) for _, _, gradient in going]
        self._up.after(self.compute.record())
        for (block, name, _), source, (berth, into) in zip(going, held, berths(going), strict=True):
            block.masters[name].grad = berth
            self._up.copy(into, source)
        self._leaving.append((self._up.record(), held))
        return found

    def _lowered(self, gradient: Tensor) -> Tensor:
        """A gradient of the host's on the device."""
        if gradient.layout is not torch.strided:
            return gradient.to(self._streams.device(self._device))
        if self._leaving:
            self._down.after(self._leaving[-1][0])
        layout = Layout.of(gradient)
        room = self._streams.empty(self._device, layout.size_bytes)
        self._down.after(self.compute.record())
        self._down.copy(room, packed_bytes(gradient))
        return room.view(layout.dtype).as_strided(layout.shape, layout.stride).data

    def _let_go(self) -> None:
        self.compute.after(self._leaving[0][0])
        self._leaving.popleft()

    def _finish(self) -> None:
        """The host waits: masters may be written, their gradients read."""
        self._down.record().wait()
        for landed, _ in self._leaving:
            landed.wait()
        while self._leaving:
            self._let_go()

    def _make_blocks(self, users: Users, masters: Mapping[str, nn.Parameter]) -> None:
        """Weights that are new here and have the same users come and go together."""
        new: dict[frozenset[int], list[str]] = {}
        for name, stages in users.items():
            if name not in self._block_of:
                new.setdefault(stages, []).append(name)
        for names in new.values():
            block = Block({name: masters[name] for name in names}, self.room)
            self._blocks.append(block)
            self._block_of |= dict.fromkeys(names, block)

    def _guests(self, users: Users, colour: Mapping[int, int]) -> list[Guest]:
        found, filled = list[Guest](), dict[int, int]()
        for block in self._blocks:
            stages = frozenset().union(*(users.get(name, frozenset()) for name in block.masters))
            if not stages & colour.keys():
                continue
            key, first = ("block", id(block)), 0
            if len(stages) == 1:
                (stage,) = stages
                key, first = ("place", colour[stage]), filled.get(stage, 0)
                filled[stage] = first + block.size_bytes
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = Place(self._streams, self._device)
            place.grow(first + block.size_bytes)
            found.append(Guest(block, place, first, stages))
        for guest in found:
            guest.twins = {n: _twin(guest, n, master) for n, master in guest.block.masters.items()}
        return found

    @staticmethod
    def _insist_on_no_hooks(names: Iterable[str], masters: Mapping[str, nn.Parameter]) -> None:
        for name in names:
            hooks: Any = masters[name]._backward_hooks, masters[name]._post_accumulate_grad_hooks
            if any(hooks):
                raise BadOption(
                    f"{name} has a hook on its gradient, and weights on the host get theirs from a copy",
                    next_step="change gradients between engine.step(..., update=False) and engine.update()",
                )


@final
class _Modules:
    """Where the model's modules hold each weight: in their tables, and an LSTM in a list beside them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._beside: list[tuple[dict[str, Any], str]] = []

    def find(self) -> None:
        """Look through the model, which has its masters."""
        self._tables.clear()
        for table, key, name in places(self._model):
            self._tables.setdefault(name, []).append((table, key))
        ids = {id(p) for p in self.masters().values()}
        self._beside = []
        for module in self._model.modules():
            for key, value in vars(module).items():
                if key not in _HELD and _tensors_in(value) & ids:
                    self._beside.append((vars(module), key))

    def masters(self) -> dict[str, nn.Parameter]:
        """The parameters that are in the modules now, by their first names."""
        found = {name: held[0][0][held[0][1]] for name, held in self._tables.items()}
        return {name: p for name, p in found.items() if isinstance(p, nn.Parameter)}

    def put(self, chosen: Mapping[str, nn.Parameter]) -> None:
        """These instead of what is there."""
        swapped: dict[int, nn.Parameter] = {}
        for name, tensor in chosen.items():
            for table, key in self._tables[name]:
                swapped[id(table[key])] = tensor
                table[key] = tensor
        if self._beside:
            for attributes, key in self._beside:
                attributes[key] = map_leaves(lambda leaf: swapped.get(id(leaf), leaf), attributes[key])


def _tensors_in(value: Any) -> set[int]:
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return set().union(*map(_tensors_in, items))
    return {id(value)} if isinstance(value, Tensor) else set()


def _taken(guest: Guest) -> Iterator[tuple[str, Tensor]]:
    """The gradients of its twins, which have none then."""
    for name, twin in guest.twins.items():
        gradient, twin.grad = twin.grad, None
        if gradient is not None:
            yield name, gradient


def _twin(guest: Guest, name: str, master: nn.Parameter) -> nn.Parameter:
    view = guest.block.parts[name].within(guest.place.data, guest.first)
    twin = like(master, view)
    assert isinstance(twin, nn.Parameter)
    return twin
