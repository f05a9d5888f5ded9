"""Problem: a model is larger than its device. Which weights are on the device, and when do they move?

    master   the model's own parameter, on the host, a view of its block's buffer (flat_buffer.py)
    copy     a parameter on the device, a view of a buffer there that stages use in turn; of a weight that all
             calls read as autocast's copy, that copy alone (stage/cast_weights.py:WeightAsCast)

    LOAD s   one copy moves the block into its device buffer; modules refer to the copies
    F, B     wait for the copy and compute with it; gradients add up on the device
    UNLOAD s gradients leave for the masters' `.grad`, into memory of whoever reads them (optimizer_step.py);
             modules refer to absent weights, so that computing with an unloaded stage fails

The schedule decides how many stages have device buffers at a time: two, or all of them. Between steps the
masters are in the modules, so optimizers, schedulers, state dicts and clipping see an ordinary model on the
host. A gradient that exists before a step (accumulation) is copied to the device first, so sums are added in
the order of the plain loop. A weight that several stages use has its own buffer and stays from the first of
them to the last. Buffers of modules live on the device.

Orders, on CUDA by events (transport/device_copies.py has the same): no copy into a device buffer before the
last use of what was there, no use before the copy, no reading of a gradient by the host before it has
arrived, no freeing of one before it has left, no arrival where an optimizer still reads. Oracle:
tests/unit/run/host/test_host_residency.py on fake streams, where leaving out any of these orders is detected;
tests/parity/test_offload_parity.py against the plain loop. ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity
(arXiv 2104.07857).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.device.streams import StreamEvent, Streams
from outsize.errors import BadOption, InvalidSchedule
from outsize.program.tree import map_leaves
from outsize.run.host.flat_buffer import (
    Allocate,
    Destination,
    HostCast,
    OutgoingGradient,
    WeightBlock,
    block_destinations,
)
from outsize.run.host.mmap import FileBackedMemory
from outsize.run.host.optimizer_step import HostOptimizerStep
from outsize.run.stage.cast_weights import WeightAsCast
from outsize.run.transport.wire_layout import WireLayout, copied, packed_bytes
from outsize.run.weights.ownership import like, places

Users = Mapping[str, frozenset[int]]  # The key is a weight, the value the stages that compute with it.
Casts = Mapping[str, torch.dtype]  # The key is a weight, the value the dtype of the cast that calls read.
_HELD: Final = ("_parameters", "_buffers", "_modules")


@final
class DeviceBuffer:
    """Holds device memory that blocks use in turn; it may be written behind the event `free`."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.data, self._compute = streams.empty(name, 0), streams.compute(name)
        self.grow(0)

    def grow(self, size_bytes: int) -> None:
        """Enlarges the memory; existing views stay valid."""
        if size_bytes > self.data.untyped_storage().nbytes():
            self.data.untyped_storage().resize_(size_bytes)
            self.data = self.data.as_strided((size_bytes,), (1,))
        # The allocator may give memory that kernels launched before still use.
        self.free = self._compute.record()


@final
class AbsentWeight(nn.Parameter):
    """Replaces a weight that is not on the device in its module: every operation with it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise InvalidSchedule(
            "a weight is used while it is not on the device",
            numbers=f"by {getattr(func, '__name__', func)}",
            next_step="load its stage before; outsize.schedules.offload.check_loads names the cell",
        )


@final
@dataclass(eq=False)
class ResidentBlock:
    """Places a block in a device buffer, for one row of actions; with `cast` its weights as that alone."""

    block: WeightBlock
    place: DeviceBuffer
    first: int
    users: frozenset[int]
    cast: HostCast | None = None
    copies: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    loaded: StreamEvent | None = None

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that are copied, and that the device buffer has of it."""
        return self.block.size_bytes if self.cast is None else self.cast.size_bytes

    @property
    def values(self) -> Tensor:
        """Returns what is copied, as flat bytes of the host."""
        return self.block.values if self.cast is None else self.cast.of_this_step()

    def device_copy(self, name: str, master: nn.Parameter) -> nn.Parameter:
        """Returns the parameter that is in the modules while the block is on the device."""
        if self.cast is not None:
            return WeightAsCast(master, self.cast.parts[name].within(self.place.data, self.first))
        copy = like(master, self.block.parts[name].within(self.place.data, self.first))
        assert isinstance(copy, nn.Parameter)
        return copy


@final
class Residency:
    """Holds the weights of one model, and those of them that are on one device."""

    def __init__(
        self,
        model: nn.Module,
        streams: Streams,
        device: str,
        files: FileBackedMemory | None = None,
        *,
        threaded: bool = False,
    ) -> None:
        """Creates the residency; `files` stores the weights, by default page-locked host memory does.

        `threaded` lets the optimizer step in a thread while gradients arrive, and weights be cast in another
        one before they are copied.
        """
        self._caster: Executor | None = ThreadPoolExecutor(1, "outsize-casts") if threaded else None
        self._model, self._streams, self._device = model, streams, device
        self.room: Allocate = files or streams.host
        self.compute = streams.compute(device)
        here = streams.is_host(device)
        self._down = self.compute if here else streams.copies("cpu", device)
        self._up = self.compute if here else streams.copies(device, "cpu")
        self._places: dict[Hashable, DeviceBuffer] = {}
        self._blocks: list[WeightBlock] = []
        self._block_of: dict[str, WeightBlock] = {}
        self._absent: dict[str, nn.Parameter] = {}
        self._modules = _WeightTables(model)
        self._leaving: deque[tuple[StreamEvent, list[Tensor]]] = deque()
        self.landing = HostOptimizerStep(threaded=threaded, room=self.room, files=files)

    @property
    def device_bytes(self) -> int:
        """Returns the bytes of all device buffers."""
        return sum(place.data.numel() for place in self._places.values())

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of masters, of gradients that have arrived, and of snapshots."""
        return self.landing.host_bytes + sum(block.host_bytes for block in self._blocks)

    def resident_blocks(
        self, users: Users, colour: Mapping[int, int], casts: Casts = MappingProxyType({})
    ) -> list[ResidentBlock]:
        """Places blocks of these weights; `colour[stage]` numbers the device buffer of a stage, `casts` has
        those that are read as casts alone.

        Raises BadOption for a weight with hooks of its own.
        """
        self._modules.find()
        masters = self._modules.masters()
        users = {name: stages for name, stages in users.items() if name in masters}
        self._insist_on_no_hooks(users, masters)
        casts = {name: dtype for name, dtype in casts.items() if _may_be_cast(masters.get(name))}
        self._make_blocks(users, masters, casts)
        return self._resident_blocks(users, colour, casts)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Runs microbatches within the context; before and after it the masters are in the modules."""
        masters = self._modules.masters()
        for name, block in self._block_of.items():
            block.adopt(name, masters[name])
        if self._caster is not None:
            for cast in self._casts():
                cast.begin(self._caster)
        self._hide(self._block_of)
        try:
            yield
        finally:
            self._modules.put({n: b.masters[n] for n, b in self._block_of.items()})
            self._finish()

    def load(self, coming: Iterable[ResidentBlock], graded: Iterable[ResidentBlock]) -> None:
        """Launches the copies of blocks and puts them into the modules; `graded` ones also get their
        gradients.
        """
        for resident in coming:
            block, place = resident.block, resident.place
            self._down.after(place.free)
            there = place.data[resident.first : resident.first + resident.size_bytes]
            self._down.copy(there, resident.values)
            for name, master in block.masters.items():
                resident.copies[name].requires_grad_(master.requires_grad)
            resident.loaded = self._down.record()
            self._modules.put(resident.copies)
        self.load_gradients(graded)

    def load_gradients(self, graded: Iterable[ResidentBlock]) -> None:
        """Launches the copies of the gradients that the masters have."""
        for resident in graded:
            for name, master in resident.block.masters.items():
                if master.grad is not None:
                    resident.copies[name].grad = self._lowered(master.grad)
            resident.loaded = self._down.record()

    def unload(
        self, going: Sequence[ResidentBlock], trained: Sequence[ResidentBlock], final: bool, last: bool
    ) -> None:
        """Takes blocks out of the modules and launches the copies of gradients.

        `final` says that a stage's gradients are complete; with the row's `last` UNLOAD the call waits for
        the optimizer, so that its steps count as part of the measured step.
        """
        for resident in going:
            self._hide(resident.copies)
        landed = (
            self._land(trained, self.landing.destinations if final else block_destinations) if trained else []
        )
        now = self.compute.record()
        for resident in going:
            resident.place.free = now
        if final and landed:
            self.landing(landed, self._leaving[-1][0])
        if last:
            self.landing.finish()

    def copy_weight_view(self, value: Tensor | None) -> Tensor | None:
        """Returns a copy where the value is a view of a weight, whose device buffer other blocks
        use in turn.
        """
        here = {place.data.untyped_storage().data_ptr() for place in self._places.values()} - {0}
        if value is None or value.untyped_storage().data_ptr() not in here:
            return value
        return copied(value)

    def _hide(self, names: Iterable[str]) -> None:
        """Makes computing with these weights fail."""
        for name in names:
            if name not in self._absent:
                self._absent[name] = AbsentWeight(torch.empty(0), requires_grad=False)
        self._modules.put({name: self._absent[name] for name in names})

    def _land(
        self,
        blocks: Sequence[ResidentBlock],
        destinations: Callable[[Sequence[OutgoingGradient]], list[Destination]],
    ) -> list[nn.Parameter]:
        """Launches the copies of gradients; returns the masters that they belong to."""
        while self._leaving:
            self._let_go()
        masters, going = list[nn.Parameter](), list[OutgoingGradient]()
        for resident in blocks:
            for name, gradient in _taken(resident):
                master = resident.block.masters[name]
                masters.append(master)
                if gradient.layout is torch.strided:
                    going.append((resident.block, name, gradient))
                else:
                    master.grad = gradient.to(master.device)
        sources = [packed_bytes(gradient) for _, _, gradient in going]
        self._up.after(self.compute.record())
        for (block, name, _), source, (tensor, into) in zip(going, sources, destinations(going), strict=True):
            block.masters[name].grad = tensor
            self._up.copy(into, source)
        self._leaving.append((self._up.record(), sources))
        return masters

    def _lowered(self, gradient: Tensor) -> Tensor:
        """Copies a gradient from the host to the device."""
        if gradient.layout is not torch.strided:
            return gradient.to(self._streams.device(self._device))
        if self._leaving:
            self._down.after(self._leaving[-1][0])
        layout = WireLayout.of(gradient)
        room = self._streams.empty(self._device, layout.size_bytes)
        self._down.after(self.compute.record())
        self._down.copy(room, packed_bytes(gradient))
        return room.view(layout.dtype).as_strided(layout.shape, layout.stride).data

    def _let_go(self) -> None:
        self.compute.after(self._leaving[0][0])
        self._leaving.popleft()

    def _finish(self) -> None:
        """Blocks the host until masters may be written and their gradients read."""
        self._down.record().wait()
        for cast in self._casts():
            cast.end()
        for landed, _ in self._leaving:
            landed.wait()
        while self._leaving:
            self._let_go()

    def _casts(self) -> Iterator[HostCast]:
        return (cast for block in self._blocks for cast in block.casts())

    def _make_blocks(self, users: Users, masters: Mapping[str, nn.Parameter], casts: Casts) -> None:
        """Groups weights that are new here and have the same users into blocks, those that are read as casts
        apart from the others.
        """
        new: dict[tuple[frozenset[int], torch.dtype | None], list[str]] = {}
        for name, stages in users.items():
            if name not in self._block_of:
                new.setdefault((stages, casts.get(name)), []).append(name)
        for names in new.values():
            block = WeightBlock({name: masters[name] for name in names}, self.room)
            self._blocks.append(block)
            self._block_of |= dict.fromkeys(names, block)

    def _resident_blocks(self, users: Users, colour: Mapping[int, int], casts: Casts) -> list[ResidentBlock]:
        placed, filled = list[ResidentBlock](), dict[int, int]()
        for block in self._blocks:
            stages = frozenset().union(*(users.get(name, frozenset()) for name in block.masters))
            if not stages & colour.keys():
                continue
            dtypes = {casts.get(name) for name in block.masters}
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            cast = None if dtype is None else block.cast(dtype)
            size_bytes = block.size_bytes if cast is None else cast.size_bytes
            key, first = ("block", id(block)), 0
            if len(stages) == 1:
                (stage,) = stages
                key, first = ("place", colour[stage]), filled.get(stage, 0)
                filled[stage] = first + size_bytes
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = DeviceBuffer(self._streams, self._device)
            place.grow(first + size_bytes)
            placed.append(ResidentBlock(block, place, first, stages, cast))
        for resident in placed:
            resident.copies = {
                name: resident.device_copy(name, master) for name, master in resident.block.masters.items()
            }
        return placed

    @staticmethod
    def _insist_on_no_hooks(names: Iterable[str], masters: Mapping[str, nn.Parameter]) -> None:
        for name in names:
            hooks: Any = masters[name]._backward_hooks, masters[name]._post_accumulate_grad_hooks
            if any(hooks):
                raise BadOption(
                    f"{name} has a hook on its gradient, which cannot run where weights are on the host",
                    next_step="change gradients between engine.step(..., update=False) and engine.update()",
                )


@final
class _WeightTables:
    """Refers to each weight in the model's modules: in their tables, and in lists such as an LSTM's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._attributes: list[tuple[dict[str, Any], str]] = []

    def find(self) -> None:
        """Searches the model while its masters are in the modules."""
        self._tables.clear()
        for table, key, name in places(self._model):
            self._tables.setdefault(name, []).append((table, key))
        ids = {id(p) for p in self.masters().values()}
        self._attributes = []
        for module in self._model.modules():
            for key, value in vars(module).items():
                if key not in _HELD and _tensors_in(value) & ids:
                    self._attributes.append((vars(module), key))

    def masters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that are in the modules now, by their first names."""
        parameters = {name: entries[0][0][entries[0][1]] for name, entries in self._tables.items()}
        return {name: p for name, p in parameters.items() if isinstance(p, nn.Parameter)}

    def put(self, chosen: Mapping[str, nn.Parameter]) -> None:
        """Replaces the tensors in the modules by these."""
        swapped: dict[int, nn.Parameter] = {}
        for name, tensor in chosen.items():
            for table, key in self._tables[name]:
                swapped[id(table[key])] = tensor
                table[key] = tensor
        if self._attributes:
            for attributes, key in self._attributes:
                attributes[key] = map_leaves(lambda leaf: swapped.get(id(leaf), leaf), attributes[key])


def _tensors_in(value: Any) -> set[int]:
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return set().union(*map(_tensors_in, items))
    return {id(value)} if isinstance(value, Tensor) else set()


def _taken(resident: ResidentBlock) -> Iterator[tuple[str, Tensor]]:
    """Takes the gradients away from a block's copies and yields them by name."""
    for name, copy in resident.copies.items():
        gradient, copy.grad = copy.grad, None
        if gradient is not None:
            yield name, gradient


def _may_be_cast(master: nn.Parameter | None) -> bool:
    """Returns whether autocast casts a weight of this kind, and it is a plain parameter with values."""
    return type(master) is nn.Parameter and master.dtype is torch.float32 and master.numel() > 0
