"""Broadcasts Python values with tensors in them, from one rank to all others.

    header   its size, or 0 when it equals the site's last one; then a pickle of structure and layouts  (host)
    tensors  one broadcast each, in memory order                                                      (device)

A tensor in the tree is sent with its strides (rule 14). A tensor that stays on the sender is sent as a `meta`
tensor of its shape: lengths and dtypes can be read, values cannot. Objects that every rank has already
(arguments of the call, modules) are sent as their number or name. A site is the place of the program that
sends; its header is sent again only when it has changed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BoundaryMismatch
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.wire_layout import WireLayout, pack

# Most headers are smaller and are sent in one message with their size.
_FIRST, _SIZE = 4096, 8


@final
@dataclass(frozen=True, slots=True)
class Common:
    """The objects that all ranks of a call have: `objects` by number, `modules` by name, `names` by a
    module's id.
    """

    objects: Sequence[Any] = ()
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)

    def numbers(self) -> dict[int, int]:
        """Returns id -> number of the objects that have an identity; numbers and texts have none."""
        return {
            id(o): n for n, o in enumerate(self.objects) if isinstance(o, Tensor) or hasattr(o, "__dict__")
        }


@final
class Exchange:
    """Broadcasts over one group. Every rank calls `send` or `receive` in the same order."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self.rank, self.world_size = group.rank(), group.size()
        self._headers: dict[Any, bytes] = {}
        self.waits: list[tuple[float, float]] = []  # start and end of receives, until take_waits

    def send(self, site: Any, value: Any, common: Common, stays: Callable[[Tensor], bool]) -> None:
        """Sends `value` to all ranks; `kept(tensor)` says that its elements stay here.

        Raises BoundaryMismatch for what cannot be pickled, after telling the other ranks.
        """
        try:
            header, tensors = _written(value, common, stays)
        except Exception as error:
            refusal = _unsendable(site, error)
            header, tensors = _written(refusal, common, stays)
            self._send(site, header, tensors)
            raise refusal from error
        self._send(site, header, tensors)

    def receive(self, site: Any, source: int, common: Common) -> Any:
        """Returns what rank `source` sends at this site; raises the exception that it sends instead."""
        start = perf_counter()
        first = self._bytes(_FIRST, source)
        size = int.from_bytes(first[:_SIZE], "little")
        if size:
            rest = self._bytes(max(0, size - _FIRST + _SIZE), source)
            self._headers[site] = (first[_SIZE:] + rest)[:size]
        layouts, body = pickle.loads(self._headers[site])
        tensors = [self._tensor(layout, source) for layout in layouts]
        self.waits.append((start, perf_counter()))
        value = _Reader(io.BytesIO(body), tensors, common, self.device).load()
        if isinstance(value, BaseException):
            raise value
        return value

    def all_agree(self, here: bool) -> bool:
        """Returns True on every rank if it holds on every rank."""
        flag = torch.tensor([here], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group.host)
        return bool(flag)

    def _send(self, site: Any, header: bytes, tensors: Sequence[Tensor]) -> None:
        new = b"" if self._headers.get(site) == header else header
        self._headers[site] = header
        message = bytearray((len(new).to_bytes(_SIZE, "little") + new).ljust(_FIRST, b"\0"))
        for part in (message[:_FIRST], message[_FIRST:]):
            if part:
                _broadcast(torch.frombuffer(part, dtype=torch.uint8), self.rank, self._group.host)
        for tensor in tensors:
            _broadcast(pack(tensor), self.rank, self._group.device)

    def _bytes(self, count: int, source: int) -> bytes:
        received = _broadcast(torch.empty(count, dtype=torch.uint8), source, self._group.host)
        return received.numpy().tobytes()

    def _tensor(self, layout: WireLayout, source: int) -> Tensor:
        tensor = layout.empty(self.device)
        _broadcast(layout.memory(tensor), source, self._group.device)
        return tensor


def _broadcast(flat: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    if flat.numel():
        # Sent as bytes, since not every backend knows every dtype.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
    return flat


def _unsendable(site: Any, error: Exception) -> BoundaryMismatch:
    return BoundaryMismatch(
        f"what {site} returns or changes cannot be sent to the other ranks",
        numbers=f"{type(error).__name__}: {error}",
        next_step="return tensors and plain Python values from it",
    )


def _written(value: Any, common: Common, stays: Callable[[Tensor], bool]) -> tuple[bytes, list[Tensor]]:
    body = io.BytesIO()
    writer = _Writer(body, common, stays)
    writer.dump(value)
    layouts = [WireLayout.of(t) for t in writer.tensors]
    return pickle.dumps((layouts, body.getvalue())), writer.tensors


@final
class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, common: Common, stays: Callable[[Tensor], bool]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers, self._kept = common.numbers(), stays
        self._names = common.names
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Returns what is sent in place of an object that is not pickled."""
        if id(obj) in self._numbers:
            return "common", self._numbers[id(obj)]
        if isinstance(obj, nn.Module) and id(obj) in self._names:
            return "module", self._names[id(obj)]
        if isinstance(obj, torch.device):
            return "device", obj.type
        if not isinstance(obj, Tensor):
            return None
        if self._kept(obj):
            return "kept", tuple(obj.shape), obj.dtype
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return "sent", self._places[id(obj)]


@final
class _Reader(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: Sequence[Tensor], common: Common, device: torch.device
    ) -> None:
        super().__init__(file)
        self._tensors, self._common, self._device = tensors, common, device

    def persistent_load(self, pid: Any) -> Any:
        """Returns this rank's object for a persistent id."""
        match pid:
            case "common", number:
                return self._common.objects[number]
            case "module", fqn:
                return self._common.modules[fqn]
            case "device", kind:
                return self._device if self._device.type == kind else torch.device(kind)
            case "kept", shape, dtype:
                return torch.empty(shape, dtype=dtype, device="meta")
            case _, number:
                return self._tensors[number]


def everything_but(sent: Collection[int]) -> Callable[[Tensor], bool]:
    """Returns a `stays` for a call's results: the tensors of these ids are sent; of others only integers are.

    Integers are bookkeeping (lengths, positions) that the glue of every rank reads; floating tensors inside
    an object are a cache's contents, which only its owner reads.
    """
    return lambda t: id(t) not in sent and (t.is_floating_point() or t.is_complex())
