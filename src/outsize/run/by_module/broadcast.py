"""Broadcasts Python values with tensors in them, from one rank to all others.

    header   its size, or 0 when it equals the site's last one; then JSON of structure and layouts  (host)
    tensors  one broadcast each, in memory order                                                      (device)

A tensor in the tree is sent with its strides (rule 14). A tensor that stays on the sender is sent as a `meta`
tensor of its shape: lengths and dtypes can be read, values cannot. Objects that every rank has already
(arguments of the call, modules) are sent as their number or name. A site is the place of the program that
sends; its header is sent again only when it has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BoundaryMismatch
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.transport.values import NotSendable, ValueReader, ValueWriter, described, layout_of
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
        self._waits: list[tuple[float, float]] = []  # start and end of receives

    def send(self, site: Any, value: Any, common: Common, stays: Callable[[Tensor], bool]) -> None:
        """Sends `value` to all ranks; `stays(tensor)` says that its elements stay here.

        Raises BoundaryMismatch for what has no words (transport/values.py), after telling the other ranks. An
        error that has none is sent as a RuntimeError with its text.
        """
        try:
            header, tensors = _written(value, common, stays)
        except Exception as error:
            if isinstance(value, BaseException):
                self._send(site, *_written(RuntimeError(f"{type(value).__name__}: {value}"), common, stays))
                return
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
        layouts, body = json.loads(self._headers[site])
        tensors = [self._tensor(layout, source) for layout in map(layout_of, layouts)]
        self._waits.append((start, perf_counter()))
        value = ValueReader(tensors, _meanings(common, self.device)).read(body)
        if isinstance(value, BaseException):
            raise value
        return value

    def take_waits(self) -> list[tuple[float, float]]:
        """Returns start and end of every receive since the last call of this."""
        taken, self._waits = self._waits, []
        return taken

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
        RankCollectives.of(group).broadcast(flat.view(torch.uint8), source)
    return flat


def _unsendable(site: Any, error: Exception) -> BoundaryMismatch:
    return BoundaryMismatch(
        f"what {site} returns or changes cannot be sent to the other ranks",
        numbers=f"{type(error).__name__}: {error}",
        next_step="return tensors and plain Python values from it",
    )


def _written(value: Any, common: Common, stays: Callable[[Tensor], bool]) -> tuple[bytes, list[Tensor]]:
    writer = ValueWriter(_words(common, stays))
    body = writer.write(value)
    return json.dumps([described(map(WireLayout.of, writer.tensors)), body]).encode(), writer.tensors


def _words(common: Common, stays: Callable[[Tensor], bool]) -> Callable[[Any], list[Any] | None]:
    """Returns what is sent in place of an object that every rank has, or whose elements stay here."""
    numbers = common.numbers()

    def word(value: Any) -> list[Any] | None:
        if id(value) in numbers:
            return ["common", numbers[id(value)]]
        if isinstance(value, nn.Module) and id(value) in common.names:
            return ["module", common.names[id(value)]]
        if isinstance(value, torch.device):
            return ["place", value.type]
        if isinstance(value, Tensor) and stays(value):
            return ["meta", list(value.shape), str(value.dtype).removeprefix("torch.")]
        return None

    return word


def _meanings(common: Common, device: torch.device) -> Callable[[list[Any]], Any]:
    """Returns this rank's objects for those words."""

    def meaning(word: list[Any]) -> Any:
        match word:
            case ["common", int(number)] if 0 <= number < len(common.objects):
                return common.objects[number]
            case ["module", str(fqn)] if fqn in common.modules:
                return common.modules[fqn]
            case ["place", str(kind)]:
                return device if device.type == kind else torch.device(kind)
            case _:
                raise NotSendable(f"a message with {str(word)[:80]!r}")

    return meaning


def everything_but(sent: Collection[int]) -> Callable[[Tensor], bool]:
    """Returns a `stays` for a call's results: the tensors of these ids are sent; of others only integers are.

    Integers are bookkeeping (lengths, positions) that the glue of every rank reads; floating tensors inside
    an object are a cache's contents, which only its owner reads.
    """
    return lambda t: id(t) not in sent and (t.is_floating_point() or t.is_complex())
