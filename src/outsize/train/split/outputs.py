"""Problem: microbatches return outputs of their own, the user's loss wants those of the batch, on each rank.

    logits [4, 10] four times     joined along the dim in which the samples lie: [16, 10]
    loss, a number, four times    the sum by the microbatches' shares, as a step weighs it
    a count of integers           what the last microbatch returned

With `outputs="last"` what has samples stays on the ranks of the last stage. The others get zeros of its shape
that lie in the memory of one number, so the same loop runs there and its backward enters the same nodes; only
the gradients of the last stage's ranks are used. What has no samples, as a loss inside of the model, is small
and goes to every rank.

The dim is the one whose size differs where the model is recorded for another number of samples, once for each
kind of call; a guess by sizes would join a tensor without samples whose dim 0 happens to have that size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.errors import BadOption, OutsizeError
from outsize.program.tape import Meta
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import shares_of
from outsize.train.ranks.mesh import Mesh
from outsize.train.split.nodes import JoinedOutput
from outsize.train.split.opened_call import CallOutputs

Outputs = Literal["all", "last"]
"""Which ranks get the outputs of the batch: all, or those of the last stage."""
Shapes = Callable[[Batch], Sequence[torch.Size]]
"""Records the model for a microbatch and returns the shapes of its outputs."""


@final
class OutputJoin:
    """Joins the outputs of microbatches.

    `group` are the ranks of the pipeline, of which `last` has the outputs of this replica's microbatches, and
    `replicas` the ranks of its stage in all replicas.
    """

    def __init__(self, shapes: Shapes, mesh: Mesh | None, last: int, device: torch.device | None) -> None:
        self._group = None if mesh is None else mesh.pipeline
        self._replicas = None if mesh is None else mesh.replicas
        self._shapes, self._last, self._device = shapes, last, device
        self._dims: dict[Hashable, tuple[int | None, ...]] = {}

    @property
    def is_last(self) -> bool:
        """Returns whether this rank has the outputs of the last stage."""
        return self._group is None or self._group.rank() == self._last

    def join(
        self, outputs: CallOutputs, parts: Sequence[Batch], ranks: Outputs
    ) -> tuple[list[JoinedOutput], list[Tensor]]:
        """Returns the outputs of the batch and their values, in the order of the last stage's; every rank
        calls this.
        """
        variants = outputs.variants
        metas = [[v.cut.tape.metas[slot] for slot in v.cut.programs[-1].outputs] for v in variants]
        dims = self._dims_of(metas[0], parts[0]) if len(parts) > 1 else (0,) * len(metas[0])
        shares = shares_of(outputs.counted)
        counted = [piece.counts for piece in outputs.pieces]
        joined: list[JoinedOutput] = []
        wholes: list[Tensor] = []
        for at, (dim, meta) in enumerate(zip(dims, metas[0], strict=True)):
            shapes = [torch.Size(each[at].shape) for each in metas]
            values = [each[at] for each, counts in zip(outputs.values, counted, strict=False) if counts]
            by_shares = () if dim is not None or not meta.dtype.is_floating_point else shares
            if len(parts) == 1 and not shapes[0]:
                dim, by_shares = None, [1.0]
            in_graph = meta.requires_grad and torch.is_grad_enabled()
            in_graph = in_graph and (dim is not None or bool(by_shares))
            here = outputs.values[0][at].device if outputs.values else None
            device = here or self._device or torch.device("cpu")
            one = JoinedOutput(meta.dtype, device, dim, shapes, by_shares, in_graph)
            joined.append(one)
            of_replicas = self._of_replicas(one, values, outputs.replicas) if self.is_last else None
            wholes.append(self._whole(one, of_replicas, ranks))
        return joined, wholes

    def _whole(self, joined: JoinedOutput, whole: Tensor | None, ranks: Outputs) -> Tensor:
        """Returns an output of the batch; `whole` is None where another rank has the last stage."""
        if ranks == "last" and joined.dim is not None:
            return _zeros(joined) if whole is None else whole
        if self._group is not None and self._group.size() > 1:
            if whole is None:
                whole = torch.empty(_shape(joined), dtype=joined.dtype, device=joined.device)
            whole = whole.contiguous()
            dist.broadcast(whole, group=self._group.of_tensor(whole), group_src=self._last)
        assert whole is not None
        return whole

    def _of_replicas(self, joined: JoinedOutput, values: Sequence[Tensor], replicas: Sequence[int]) -> Tensor:
        """Returns the output of the batch on the last stage, from the microbatches of all replicas; `values`
        are those of this one, and `replicas` say which one has each.
        """
        group, own = self._replicas, iter(values)
        if group is None or group.size() == 1:
            return _together(joined, values)
        every: list[Tensor] = []
        for shape, replica in zip(joined.shapes, replicas, strict=True):
            if replica == group.rank():
                value = next(own).contiguous()
            else:
                value = torch.empty(shape, dtype=joined.dtype, device=joined.device)
            dist.broadcast(value, group=group.of_tensor(value), group_src=replica)
            every.append(value)
        return _together(joined, every)

    def _dims_of(self, metas: Sequence[Meta], part: Batch) -> tuple[int | None, ...]:
        kind = (
            tuple((len(meta.shape), meta.dtype) for meta in metas),
            tuple((t.ndim, t.dtype) for t in part.tensors()),
        )
        if kind not in self._dims:
            other = self._other_shapes(part, len(metas))
            pairs = zip(metas, other or [None] * len(metas), strict=True)
            self._dims[kind] = tuple(_dim(meta, shape, part.size) for meta, shape in pairs)
        return self._dims[kind]

    def _other_shapes(self, part: Batch, count: int) -> Sequence[torch.Size] | None:
        """Returns the outputs' shapes for one sample more; None where the model takes no other number."""
        try:
            shapes = self._shapes(part.resized(part.size + 1))
        except OutsizeError:
            return None
        return shapes if len(shapes) == count else None


def _dim(meta: Meta, other: torch.Size | None, size: int) -> int | None:
    """Returns the dim along which the samples lie. Raises BadOption where they lie along several."""
    if other is None or len(other) != len(meta.shape):
        return 0 if meta.shape and meta.shape[0] == size else None
    dims = [d for d, (a, b) in enumerate(zip(meta.shape, other, strict=True)) if a != b]
    if len(dims) > 1:
        raise BadOption(
            "an output of the model has the samples along several dims, so microbatches do not give that of "
            "the batch",
            numbers=f"{tuple(meta.shape)} for {size} samples, {tuple(other)} for {size + 1}",
            next_step="microbatches=1, or compute what compares all samples outside of the model",
        )
    return dims[0] if dims else None


def _together(joined: JoinedOutput, values: Sequence[Tensor]) -> Tensor:
    if joined.dim is not None and values[0].ndim:
        return torch.cat(list(values), joined.dim)
    if not joined.shares:
        return values[-1]
    total: Tensor | None = None
    for value, share in zip(values, joined.shares, strict=True):
        part = value * share
        total = part if total is None else total + part
    assert total is not None
    return total


def _zeros(joined: JoinedOutput) -> Tensor:
    """Returns zeros of an output's shape in the memory of one number."""
    # A view of other memory, as `expand` makes it, could not become the output of a node.
    shape = _shape(joined)
    zeros = torch.empty_strided(shape, [0] * len(shape), dtype=joined.dtype, device=joined.device)
    if zeros.numel():
        zeros.as_strided([1], [1]).zero_()
    return zeros


def _shape(joined: JoinedOutput) -> list[int]:
    shape = list(joined.shapes[0])
    if joined.dim is not None:
        shape[joined.dim] = sum(each[joined.dim] for each in joined.shapes)
    return shape
