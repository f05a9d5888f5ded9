"""Compares the batches of ranks, which must be those of one loader.

Every rank of a pipeline is given the whole batch, and each stage takes of it what it needs: the inputs on the
first rank, the targets on the last. Ranks whose loaders were seeded differently would train one rank's inputs
on another's targets. So checksums are compared in the first step and then in ever rarer ones (steps 0, 1, 2,
4, 8, ..., then every 256th): one collective of short texts, and a copy of the batch to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.errors import WorldMismatch
from outsize.program.objects import PLAIN
from outsize.program.tree import parts as parts_of
from outsize.program.values.tensor_bits import flat_bytes
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.batch.batch import Batch

EVERY = 256


def is_checked(step: int) -> bool:
    """Whether the batches of this step are compared."""
    return step & (step - 1) == 0 or step % EVERY == 0


def insist_on_one_batch(group: dist.ProcessGroup, parts: Sequence[Batch], step: int, replica: int) -> None:
    """A collective over the processes of the run; `replica` numbers those that are given the same batch.

    Raises WorldMismatch on all of them where two of one replica have other batches.
    """
    cards: list[tuple[int, list[str]]] = all_gather_json(
        (replica, _texts(parts)), group, "the batch of a step"
    )
    first: dict[int, tuple[int, list[str]]] = {}
    for rank, (number, texts) in enumerate(cards):
        known, expected = first.setdefault(number, (rank, texts))
        if texts != expected:
            raise _mismatch(step, (known, expected), (rank, texts))


def _mismatch(step: int, one: tuple[int, list[str]], other: tuple[int, list[str]]) -> WorldMismatch:
    (first, expected), (rank, texts) = one, other
    if len(expected) != len(texts):
        numbers = f"rank {first} has {len(expected)} tensors and other values, rank {rank} has {len(texts)}"
    else:
        place = next(place for place, text in enumerate(texts) if text != expected[place])
        numbers = f"value {place}: rank {first} has {expected[place]}, rank {rank} has {texts[place]}"
    return WorldMismatch(
        f"the ranks of this run were given different batches in step {step}",
        numbers=numbers,
        next_step="seed the data loader alike on every rank, and set PYTHONHASHSEED=0 where it goes through "
        "a set of texts; or outsize.Ranks(own_batches=True) for a batch per replica",
    )


def _texts(parts: Sequence[Batch]) -> list[str]:
    """Shape, dtype and checksum of each tensor, and other plain values, microbatch by microbatch."""
    return [_text(value) for part in parts for _, value in parts_of(part.tree())]


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__
    if value.is_nested:
        return " ".join(map(_text, value.unbind()))
    return _text_of_tensor(value)


def _text_of_tensor(tensor: Tensor) -> str:
    values = tensor.detach()
    values = values.to_dense() if values.layout is not torch.strided else values
    data = flat_bytes(values.cpu()) if values.numel() else values
    return f"{tuple(tensor.shape)} {tensor.dtype} checksum {crc32(data.numpy().data):08x}"
