"""Tells ranks facts and values of each other, as JSON and tensors: nothing here unpickles.

    all ranks   the number of bytes of each                      all_gather of int64
    all ranks   the bytes, filled up to those of the largest     all_gather of uint8

torch's `all_gather_object` and `broadcast_object_list` send pickles, and whoever can write one into a
connection runs code in every rank. JSON holds facts (`all_gather_json`, `broadcast_json`); what has tensors
or objects in it is written in a closed vocabulary (`all_gather_values`; values.py says which). Every function
is a collective over a group that takes tensors of the host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.run.transport.values import value_bytes, value_of_bytes

Json = Any
"""None, bool, int, float, str, and lists and dicts (with texts as keys) of them; tuples arrive as lists."""


def all_gather_json(own: Json, group: dist.ProcessGroup) -> list[Json]:
    """Returns each rank's facts, in the order of ranks."""
    return [_loaded(data) for data in _all_gathered(_dumped(own), group)]


def broadcast_json(own: Json, group: dist.ProcessGroup, source: int = 0) -> Json:
    """Returns the facts of rank `source` of the group; what other ranks pass is not looked at."""
    is_source = group.rank() == source
    data = _dumped(own) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=source)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=source)
    return _loaded(data)


def all_gather_tensors(own: Sequence[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Returns each rank's tensors, on the host; ranks may have different numbers, shapes and dtypes."""
    return all_gather_values(list(own), group)


def all_gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns each rank's value, its tensors on the host. Raises NotSendable."""
    return [value_of_bytes(data) for data in _all_gathered(value_bytes(own), group)]


def gather_values(own: Any, group: dist.ProcessGroup, destination: int = 0) -> list[Any] | None:
    """Returns each rank's value on rank `destination` of the group, and None on the others."""
    data = value_bytes(own)
    sizes = _sizes(data, group)
    parts = _buffers(sizes) if group.rank() == destination else None
    dist.gather(_filled(data, max(sizes)), parts, group=group, group_dst=destination)
    return parts and [value_of_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _all_gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    sizes = _sizes(own, group)
    parts = _buffers(sizes)
    dist.all_gather(parts, _filled(own, max(sizes)), group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _sizes(own: Tensor, group: dist.ProcessGroup) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    return [int(size) for size in sizes]


def _buffers(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]


def _filled(data: Tensor, size: int) -> Tensor:
    return data if len(data) == size else torch.cat([data, torch.zeros(size - len(data), dtype=torch.uint8)])


def _dumped(facts: Json) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


def _loaded(data: Tensor) -> Json:
    return json.loads(data.numpy().tobytes())
