"""Along which dim of each input the samples lie, when the shapes alone do not say it.

    lstm(x [length, batch, width]) with target [batch]         x: 1, target: 0
    model(image [batch, 3, h, w], anchors [k, 4])              image: 0, anchors: none

Where all tensors agree in dim 0 and nothing else has that size, that is it. Otherwise the readings that the
shapes allow are tried in turn, those that explain most tensors first: the batch is grown from b to b + 1
samples as the reading says, and recorded on fake tensors; the first reading that the model accepts holds.
The user's `batch_dims` are never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.ladder import LossFn, record
from outsize.errors import BadOption
from outsize.program.tree import leaves
from outsize.train.batch import Batch, Dims

Asked = Mapping[str | int, int | None]
_KNOWN, _TRIES = 4096, 32  # readings that are ranked, and that are tried


@final
class BatchDims:
    """Finds the batch dims of batches that look alike once. `accepts(batch)` tells if the model takes it.

    `asked` maps an argument's name or position, or "target", to the dim of all its tensors.
    """

    def __init__(self, accepts: Callable[[Batch], bool], asked: Asked | None = None) -> None:
        self._accepts, self._asked = accepts, dict(asked or {})
        self._found: dict[tuple[Any, ...], Dims] = {}

    def of(self, batch: Batch) -> Batch:
        """The batch with its dims."""
        if batch.in_lists() and not self._asked:
            return replace(batch, listed=batch.in_lists())
        look = tuple((t.ndim, t.dtype) for t in batch.tensors())
        known = batch.dims or self._found.get(look)
        if known is None or not _agree(batch.tensors(), known):
            known = self._find(batch, _fixed(batch, self._asked))
        self._found[look] = known
        return replace(batch, dims=known)

    def _find(self, batch: Batch, fixed: Mapping[int, int | None]) -> Dims:
        readings = _readings(batch.tensors(), fixed)
        if not readings:
            return batch.batch_dims()
        if len(readings) == 1 or _plain(batch.tensors(), readings[0]):
            return readings[0]
        grown = (d for d in readings if self._accepts(_grown(replace(batch, dims=d))))
        return next(grown, readings[0])


def insist_on_names(batch: Batch, asked: Asked) -> None:
    """Raise BadOption when `asked` names arguments that the batch has not."""
    owners = dict.fromkeys(_owners(batch))
    unknown = [key for key in asked if key not in owners]
    if unknown:
        raise BadOption(
            f"batch_dims names {', '.join(map(repr, unknown))}, which is no tensor of the batch",
            numbers=f"there are {', '.join(map(repr, owners))}",
            next_step="batch_dims={'argument name or position': dim}",
        )


def _owners(batch: Batch) -> list[str | int]:
    """For each of the batch's tensors, the argument that it came in."""
    found: list[str | int] = []
    for key, value in (*enumerate(batch.args), *batch.kwargs.items(), ("target", batch.target)):
        found += [key for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return found


def _fixed(batch: Batch, asked: Asked) -> dict[int, int | None]:
    """Position among the batch's tensors -> the dim that the user gave."""
    return {place: asked[owner] for place, owner in enumerate(_owners(batch)) if owner in asked}


def _agree(tensors: Sequence[Tensor], dims: Dims) -> bool:
    return len({t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None}) == 1


def _readings(tensors: Sequence[Tensor], fixed: Mapping[int, int | None]) -> list[Dims]:
    """Most tensors explained first, then most along dim 0, then as the first tensor says."""
    given = [tensors[place].shape[dim] for place, dim in fixed.items() if dim is not None]
    sizes = given[:1] or list(dict.fromkeys(t.shape[0] for t in tensors if t.ndim))
    tables = ([_options(t, p, size, fixed) for p, t in enumerate(tensors)] for size in sizes)
    found = list(islice((dims for table in tables for dims in product(*table)), _KNOWN))
    found = [dims for dims in found if any(d is not None for d in dims)]
    return sorted(found, key=lambda dims: (dims.count(None), -dims.count(0)))[:_TRIES]


def _options(tensor: Tensor, place: int, size: int, fixed: Mapping[int, int | None]) -> list[int | None]:
    if place in fixed:
        return [fixed[place]]
    found: list[int | None] = [dim for dim, n in enumerate(tensor.shape) if n == size]
    return [*found, None]


def _plain(tensors: Sequence[Tensor], dims: Dims) -> bool:
    """Dim 0 of every tensor, and no other dim of that size."""
    size = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
    return all(d == 0 or not t.ndim for t, d in zip(tensors, dims, strict=True)) and not any(
        size in t.shape[1:] for t in tensors
    )


def _grown(batch: Batch) -> Batch:
    """One sample more."""
    return batch.resized(batch.size + 1)


def acceptance(
    model: nn.Module, loss_fn: LossFn | None, home: torch.device | None = None
) -> Callable[[Batch], bool]:
    """Does the model, with its loss, take a batch? `home` as in `record`."""

    def accepts(batch: Batch) -> bool:
        try:
            record(model, batch.args, batch.kwargs, loss_fn, batch.target, home)
        except Exception:
            return False
        return True

    return accepts
