"""Implements what ranks that hold rows of a sequence compute together.

    gather     forward: all-gather          backward: reduce-scatter     (keys and values)
    cut        forward: this rank's rows    backward: zeros around them
    total      forward: all-reduce          backward: all-reduce         (sums over the rows)
    end        forward: the loss            backward: 1 / ranks of the gradient

Every rank has the whole loss and begins its backward with its part of the gradient, so the gradient of
anything is the sum over ranks: of a weight too, which is added up at the end of a step.

Rows [start, stop) of a causal attention read the keys [0, stop), under torch's mask that is aligned at the
lower right end, which its kernels know without writing it down. So the last rank computes most; the rows are
not balanced.

Source: Llama 3, arXiv 2407.21783, sec. 3.3.2 (all-gather based context parallelism). Oracle:
tests/dist/test_context.py, the numbers of one process.
"""

from __future__ import annotations

from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from outsize.program.context_parallel.row_tape import Function, RowCollectives
from outsize.program.tensor_parallel.share import Share
from outsize.run.tensor_parallel.collectives import TensorParallelGroup
from outsize.run.tensor_parallel.functions import Paired


@final
class ContextParallelGroup(RowCollectives):
    """Runs the collectives over one dim of a mesh; `group.sent` counts bytes by kind of collective."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = TensorParallelGroup(mesh)
        self.place = self.group.place

    def gather(self, x: Tensor, share: Share) -> Tensor:
        return self.group.collect(x, share)

    def cut(self, x: Tensor, share: Share) -> Tensor:
        return Paired.apply(x, self.group.part, self._between_zeros, share)

    def end(self, loss: Tensor) -> Tensor:
        return Paired.apply(loss, _same, self._part_of)

    def dropout(self, x: Tensor, p: float, training: bool, inplace: bool, share: Share) -> Tensor:
        return self.group.dropout(x, p, training, inplace, share)

    def attention(
        self,
        share: Share,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        mask: Any = attn_mask
        if is_causal:
            start, stop = self.place.block(share.size)
            if stop <= key.shape[-2]:
                key, value = (_per_head(x.narrow(-2, 0, stop), query) for x in (key, value))
                mask = causal_lower_right(stop - start, stop)
            else:
                rows = torch.arange(start, stop, device=query.device)
                mask = rows[:, None] >= torch.arange(key.shape[-2], device=query.device)
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, False, **options)

    def cross_entropy(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        options = dict(zip(names, args, strict=False)) | kwargs
        reduction = options.pop("reduction", "mean")
        if reduction == "none":
            return function(**options, reduction="none")
        summed = self.total(function(**options, reduction="sum"))
        if reduction == "sum":
            return summed
        return summed / self.group.total(_counted(**options).to(summed.dtype))

    def average(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        reduction = kwargs.pop("reduction", "mean")
        each = function(*args, **kwargs, reduction="none")
        summed = self.total(each.sum())
        return summed if reduction == "sum" else summed / self._whole_count(each, share)

    def sum(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        return self.total(function(*args, **kwargs))

    def mean(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        x, *more = args
        mean = function(x, *more, **kwargs)
        return self.total(mean * (self.place.size(share) / share.size))

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x."""
        return Paired.apply(x, self.group.total, self.group.total)

    def _whole_count(self, x: Tensor, share: Share) -> int:
        return prod(x.shape) // x.shape[share.dim] * share.size

    def _between_zeros(self, x: Tensor, share: Share) -> Tensor:
        """Returns a whole value of which only this rank's rows are not zero."""
        whole = x.new_zeros([share.size if d == share.dim else size for d, size in enumerate(x.shape)])
        done = 0
        for start, stop in self.place.ranges(share):
            rows = x.narrow(share.dim, done, stop - start)
            whole.narrow(share.dim, start, stop - start).copy_(rows)
            done += stop - start
        return whole

    def _part_of(self, x: Tensor) -> Tensor:
        return x / self.place.ranks


def _counted(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """Returns the number of targets, or the sum of their classes' weights, that a mean is over."""
    if target.is_floating_point():
        return target.new_tensor(target.numel() // target.shape[min(1, target.ndim - 1)])
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.sum()
    return weight[target.masked_fill(~is_counted, 0)].masked_fill(~is_counted, 0).sum()


def _per_head(x: Tensor, query: Tensor) -> Tensor:
    """Returns keys or values for every head of the query: torch's aligned mask knows no groups of heads."""
    times = query.shape[-3] // x.shape[-3] if x.ndim > 2 else 1
    return x if times == 1 else x.repeat_interleave(times, -3)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
