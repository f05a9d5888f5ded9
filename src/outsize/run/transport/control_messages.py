"""Tells ranks facts and values of each other, as JSON and tensors: nothing here unpickles.

    all ranks   a frame: how many bytes, what about, and the bytes if they fit      all_gather of 1 KiB
    all ranks   where some do not fit: the bytes, filled up to those of the largest  all_gather

torch's `all_gather_object` and `broadcast_object_list` send pickles, and whoever can write one into a
connection runs code in every rank. JSON holds facts (`all_gather_json`, `broadcast_json`); what has tensors
or objects in it is written in a closed vocabulary (`all_gather_values`; values.py says which). Every function
is a collective over a group that takes tensors of the host.

A gather says what it is about ("the batch of a step"): ranks that have gone different ways through the
program meet in a gather of two kinds, and would read each other's facts as something else.

What ranks tell each other around a step are some dozens of bytes, and a collective over gloo takes as long
for 1 KiB as for 8 bytes: a frame, whose size all know, is one collective instead of two.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.errors import WorldMismatch
from outsize.run.transport.values import value_bytes, value_of_bytes

TOPIC_BYTES: Final = 64
FRAME_BYTES: Final = 1024
_HEAD: Final = struct.Struct("<qq")  # how many bytes the value has, and a digest of what it is about
INLINE_BYTES: Final = FRAME_BYTES - _HEAD.size
Json = Any
"""None, bool, int, float, str, and lists and dicts (with texts as keys) of them; tuples arrive as lists."""


def all_gather_json(own: Json, group: dist.ProcessGroup, about: str) -> list[Json]:
    """Returns each rank's facts, in the order of ranks. Raises WorldMismatch."""
    return [_loaded(data) for data in _all_gathered(_dumped(own), group, about)]


def broadcast_json(own: Json, group: dist.ProcessGroup, source: int = 0) -> Json:
    """Returns the facts of rank `source` of the group; what other ranks pass is not looked at."""
    is_source = group.rank() == source
    data = _dumped(own) if is_source else torch.empty(0, dtype=torch.uint8)
    frame = _frame(data, "")
    dist.broadcast(frame, group=group, group_src=source)
    (size, _), inline = _read(frame)
    if size > INLINE_BYTES:
        inline = data if is_source else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(inline, group=group, group_src=source)
    return _loaded(inline[:size])


def all_gather_tensors(own: Sequence[Tensor], group: dist.ProcessGroup, about: str) -> list[list[Tensor]]:
    """Returns each rank's tensors, on the host; ranks may have different numbers, shapes and dtypes.

    Raises WorldMismatch.
    """
    return all_gather_values(list(own), group, about)


def all_gather_values(own: Any, group: dist.ProcessGroup, about: str) -> list[Any]:
    """Returns each rank's value, its tensors on the host. Raises NotSendable, WorldMismatch."""
    return [value_of_bytes(data) for data in _all_gathered(value_bytes(own), group, about)]


def gather_values(own: Any, group: dist.ProcessGroup, about: str, destination: int = 0) -> list[Any] | None:
    """Returns each rank's value on rank `destination` of the group, and None on the others.

    Raises NotSendable, WorldMismatch.
    """
    data = value_bytes(own)
    sizes, parts = _framed(data, group, about)
    is_destination = group.rank() == destination
    if not parts:
        parts = _buffers(sizes) if is_destination else []
        dist.gather(_filled(data, max(sizes)), parts or None, group=group, group_dst=destination)
    if not is_destination:
        return None
    return [value_of_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _all_gathered(own: Tensor, group: dist.ProcessGroup, about: str) -> list[Tensor]:
    sizes, parts = _framed(own, group, about)
    if not parts:
        parts = _buffers(sizes)
        dist.all_gather(parts, _filled(own, max(sizes)), group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _framed(own: Tensor, group: dist.ProcessGroup, about: str) -> tuple[list[int], list[Tensor]]:
    """Returns how many bytes each rank has, and these bytes where all of them fit in a frame, else nothing.

    Raises WorldMismatch where they are about different things.
    """
    frames = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(frames, _frame(own, about), group=group)
    heads, parts = zip(*map(_read, frames), strict=True)
    sizes, topics = zip(*heads, strict=True)
    if len(set(topics)) > 1:
        _insist_on_one_topic(group, about)
    return list(sizes), list(parts) if max(sizes) <= INLINE_BYTES else []


def _frame(data: Tensor, about: str) -> Tensor:
    """Returns the frame of a value, with its bytes where they fit."""
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    _HEAD.pack_into(frame.numpy().data, 0, len(data), zlib.crc32(about.encode()))
    if len(data) <= INLINE_BYTES:
        frame[_HEAD.size : _HEAD.size + len(data)] = data
    return frame


def _read(frame: Tensor) -> tuple[tuple[int, int], Tensor]:
    """Returns size and topic of a frame, and the bytes behind them."""
    size, topic = _HEAD.unpack_from(frame.numpy().data, 0)
    return (size, topic), frame[_HEAD.size :]


def _insist_on_one_topic(group: dist.ProcessGroup, about: str) -> None:
    """Raises WorldMismatch with what the first rank tells, and the next that tells something else."""
    own = torch.frombuffer(bytearray(about.encode()[:TOPIC_BYTES].ljust(TOPIC_BYTES)), dtype=torch.uint8)
    parts = [torch.empty(TOPIC_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    texts = [part.numpy().tobytes().decode(errors="replace").rstrip() for part in parts]
    ranks = dist.get_process_group_ranks(group)
    other = next((place for place, text in enumerate(texts) if text != texts[0]), 0)
    raise WorldMismatch(
        "the ranks of this run are at different places of the program",
        numbers=f"rank {ranks[0]} compares {texts[0]}, rank {ranks[other]} compares {texts[other]}",
        next_step="make the same calls of outsize on every rank, in the same order",
    )


def _buffers(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]


def _filled(data: Tensor, size: int) -> Tensor:
    return data if len(data) == size else torch.cat([data, torch.zeros(size - len(data), dtype=torch.uint8)])


def _dumped(facts: Json) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


def _loaded(data: Tensor) -> Json:
    return json.loads(data.numpy().tobytes())
