"""How many bytes of tensors a stage really holds: storages count from their birth in an op to their end.

All stages run in one process. What is born while a stage's action runs is that stage's; a received value is
copied into a buffer of the receiver, made when the receive is posted, as between processes.

    before the step      weights, buffers, optimizer states, by the stage that owns them
    forward, backward    each action of a stage's row
    optimizer            one optimizer for each stage, as each process would have

A sent tensor is the sender's until its next compute action is over, as if it then had left. As between
processes, a view with holes is copied to be sent, and what it was a view of need not stay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251  a tracker of storages
from torch.utils._pytree import tree_leaves

from outsize.run.interpreter.interpreter import Interpreter
from outsize.run.transport import base, local
from outsize.run.transport.wire_layout import pack

Place = tuple[int, int, int, int]


@final
class Meter(TorchDispatchMode):
    """Live bytes and their peak by stage; `stage` is whose turn it is, None nobody's."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stage: int | None = None
        self.doing = ""
        self.live_bytes, self.peaks = [0] * stages, [0] * stages
        self.moments = [""] * stages
        self._known: dict[int, weakref.ref[Any] | None] = {}
        self._count = 0
        self.events: list[tuple[int, int, int]] = []  # stage, storage, its bytes; 0 at its end

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = args[0].add_(args[1]) if _adds_up(op, args) else op(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._meet(leaf.untyped_storage())
        return result

    def hold(self, stage: int, tensors: Iterable[Tensor]) -> None:
        """These are here already, and are the stage's."""
        before, self.stage, self.doing = self.stage, stage, "load"
        for tensor in tensors:
            self._meet(tensor.untyped_storage())
        self.stage = before

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Every stage has these for good, as every process has the batch."""
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values():
            self._known[storage._cdata] = None
            self.live_bytes = [live + storage.nbytes() for live in self.live_bytes]

    def has_met(self, tensor: Tensor) -> bool:
        """Whether the memory of this tensor is known."""
        return tensor.untyped_storage()._cdata in self._known

    def elsewhere(self, tensors: Iterable[Tensor]) -> None:
        """These are the host's, and live as long as the engine."""
        self._known |= dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors)

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size, stage = storage._cdata, storage.nbytes(), self.stage
        if key in self._known:
            return
        if stage is None:
            self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key))
            return
        self._count += 1
        number = self._count
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, number, stage, size))
        self.events.append((stage, number, size))
        self._change(stage, size)

    def _forget(self, key: int, number: int, stage: int, size: int) -> None:
        del self._known[key]
        self.events.append((stage, number, 0))
        self._change(stage, -size)

    def _change(self, stage: int, size: int) -> None:
        self.live_bytes[stage] += size
        if self.live_bytes[stage] > self.peaks[stage]:
            self.peaks[stage], self.moments[stage] = self.live_bytes[stage], self.doing


def _adds_up(op: Any, args: Any) -> bool:
    """Whether autograd adds a part of a gradient to the sum so far, whose memory is nobody else's.

    It does so in place, but not while somebody watches (`can_accumulate_inplace` in input_buffer.cpp).
    """
    if op is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or len(args) != 2:
        return False
    total, part = args
    alike = isinstance(part, Tensor) and part.shape == total.shape and part.dtype == total.dtype
    return alike and total.is_contiguous() and _owners(total.untyped_storage()) == 1


def _owners(storage: torch.UntypedStorage) -> int:
    """Tensors that live in it: without the handle of Python that asks."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


@final
class Posted(base.Pending):
    """A receive with a buffer of its own, where the layout is known from an earlier step."""

    def __init__(self, boxes: dict[Place, Tensor | None], key: Place, buffer: Tensor | None) -> None:
        self._boxes, self._key, self._buffer = boxes, key, buffer

    def ready(self) -> bool:
        return self._key in self._boxes

    def wait(self) -> Tensor | None:
        sent = self._boxes.pop(self._key)
        if sent is None or self._buffer is None:
            return sent
        buffer, self._buffer = self._buffer, None
        return buffer.copy_(sent)

    def release(self) -> None:
        """Freed with its last holder."""


@contextlib.contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Every action of an interpreter is its rank's; receives are copies. Steps before learn the layouts."""
    execute, layouts = Interpreter._execute, dict[Place, Tensor]()
    leaving = dict[int, list[Tensor]]()  # sent, until the sender's next compute action is over

    def attributed(self: Interpreter, op: Any) -> None:
        meter.stage, meter.doing = self.rank, op.text
        execute(self, op)
        meter.stage = None
        if op.lane == "compute" or op is self._ops[-1]:  # a process flushes at the end of its row
            leaving.pop(self.rank, None)

    def send(self: Any, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        key, stage = (self._rank, peer, channel, microbatch), meter.stage
        if tensor is not None:  # what leaves a process: the tensor's memory, or a copy where that has holes
            leaving.setdefault(self._rank, []).append(pack(tensor))
        meter.stage = None  # what is on the wire is nobody's
        self._boxes[key] = tensor.detach().clone() if tensor is not None else None
        if tensor is not None:
            layouts[key] = torch.empty_like(tensor, device="meta")
        meter.stage = stage

    def post(self: Any, peer: int, channel: int, microbatch: int) -> base.Pending:
        key = (peer, self._rank, channel, microbatch)
        like = layouts.get(key)
        return Posted(self._boxes, key, None if like is None else _here(like))

    with (
        mock.patch.object(Interpreter, "_execute", attributed),
        mock.patch.object(local.LocalTransport, "send", send),
        mock.patch.object(local.LocalTransport, "post", post),
    ):
        yield


def _here(like: Tensor) -> Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)


@final
class Split(torch.optim.Optimizer):
    """One optimizer for each stage."""

    def __init__(self, groups: dict[int, list[nn.Parameter]], make: Any, meter: Meter) -> None:
        self.parts = {stage: make(weights) for stage, weights in groups.items() if weights}
        self._meter = meter
        super().__init__([w for weights in groups.values() for w in weights], {})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for stage, part in self.parts.items():
            self._meter.stage, self._meter.doing = stage, "optimizer"
            part.step()
        self._meter.stage = None
