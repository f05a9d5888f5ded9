"""Implements what ranks that hold rows of a sequence compute together.

    gather     forward: all-gather          backward: reduce-scatter     (keys and values)
    cut        forward: this rank's rows    backward: zeros around them
    total      forward: all-reduce          backward: all-reduce         (sums over the rows)
    output     forward: all-gather          backward: this rank's rows   (outputs of the model)
    end        forward: the value           backward: 1 / ranks of the gradient

Every rank has the whole loss, or whole outputs of which the user computes one, and begins its backward with
its part of the gradient. So the gradient of anything is the sum over ranks: of a weight too, which is added
up at the end of a step. An output that were gathered as keys are would get the sum of all ranks' gradients,
each of which is whole already.

Rows [start, stop) of a causal attention read the keys [0, stop), under torch's mask that is aligned at the
lower right end, which its kernels know without writing it down. A rank has an early and a late block of each
sequence, so all of them compute as much.

Source: Llama 3, arXiv 2407.21783, sec. 3.3.2 (all-gather based context parallelism). Oracle:
tests/dist/test_context.py, the numbers of one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from outsize.policies.heads import pieces_of_heads
from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.context_parallel.calls import AddsUpOverRows
from outsize.program.sharding.context_parallel.row_sums import counted_targets
from outsize.program.sharding.share import RankPosition, Share
from outsize.run.collectives.attention_by_heads import attention_by_heads
from outsize.run.collectives.functions import Paired
from outsize.run.collectives.kept_attention import outside_modes
from outsize.run.collectives.scaled_products import ScaledLayer, scaled_product
from outsize.run.collectives.tensor_parallel import TensorParallelGroup, drawn_mask, named_collective, part_of

Function = Callable[..., Tensor]


class RowGroup(AxisGroup, ABC):
    """Computes what holders of rows of a sequence compute of all rows: losses, sums, dropout.

    `share` says how the divided argument is divided, and `function` is the model's own.
    """

    @abstractmethod
    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of all holders' x; its gradient is that of the whole sum."""

    @abstractmethod
    def total_count(self, x: Tensor) -> Tensor:
        """Returns the sum of all holders' x, which has no gradient."""

    def cut(self, x: Tensor, share: Share) -> Tensor:
        """Returns this holder's rows of a whole value."""
        return Paired.apply(x, self._rows_of, self._between_zeros, share)

    def dropout(
        self,
        share: Share,
        function: Function,
        x: Tensor,
        p: float,
        training: bool,
        inplace: bool,
        *others: tuple[Share, RankPosition],
    ) -> Tensor:
        """Applies dropout with the mask that one process would draw.

        `others`: along which other dims x is divided, among which other ranks.
        """
        if not training or p == 0.0:
            return x
        mask = drawn_mask(function, x, p, ((share, self.place), *others))
        return x.mul_(mask) if inplace else x * mask

    def cross_entropy(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the cross entropy of all rows from this holder's logits and targets."""
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        options = dict(zip(names, args, strict=False)) | kwargs
        logits, target, reduction = (options.pop(name, "mean") for name in ("input", "target", "reduction"))
        if reduction == "none":
            return function(logits, target, **options, reduction="none")
        summed = self.total(function(logits, target, **options, reduction="sum"))
        if reduction == "sum":
            return summed
        return summed / self.total_count(counted_targets(target, **options).to(summed.dtype))

    def average(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes a loss that is a mean (or sum) over all elements from this holder's."""
        reduction = kwargs.pop("reduction", "mean")
        each = function(*args, **kwargs, reduction="none")
        summed = self.total(each.sum())
        return summed if reduction == "sum" else summed / self._whole_count(each, share)

    def sum(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Adds up over all rows."""
        return self.total(function(*args, **kwargs))

    def add_up(self, share: Share, function: AddsUpOverRows, *operands: Tensor) -> Any:
        """Returns the results of the sums over all holders of what a function computes of its rows."""
        return function.finish([self.total(part) for part in function.parts(*operands)])

    def mean(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the mean over all rows."""
        x, *more = args
        mean = function(x, *more, **kwargs)
        return self.total(mean * (self.place.size(share) / share.size))

    def _rows_of(self, x: Tensor, share: Share) -> Tensor:
        return part_of(x, share, self.place)

    def _between_zeros(self, x: Tensor, share: Share) -> Tensor:
        """Returns a whole value of which only this holder's rows are not zero."""
        whole = x.new_zeros([share.size if d == share.dim else size for d, size in enumerate(x.shape)])
        done = 0
        for start, stop in self.place.ranges(share):
            rows = x.narrow(share.dim, done, stop - start)
            whole.narrow(share.dim, start, stop - start).copy_(rows)
            done += stop - start
        return whole

    def _whole_count(self, x: Tensor, share: Share) -> int:
        return prod(x.shape) // x.shape[share.dim] * share.size


@final
class ContextParallelGroup(RowGroup):
    """Runs the collectives over one dim of a mesh; `group.collectives` counts the bytes of each kind.

    Gradients of whole values are sums over ranks. `ends_graphs`: compiled stages call the collectives outside
    of their graphs.
    """

    def __init__(self, mesh: DeviceMesh, *, ends_graphs: bool = False) -> None:
        self.group, self._ends_graphs = TensorParallelGroup(mesh), ends_graphs
        self.place = self.group.place

    def collective(self, name: str) -> Callable[..., Any]:
        """Returns the method of this name."""
        return named_collective(self, name, ends_graph=self._ends_graphs)

    def gather(self, x: Tensor, share: Share) -> Tensor:
        """Returns all rows; the gradient of x is the sum of all ranks' gradients of its rows."""
        return self.group.collect(x, share)

    def output(self, x: Tensor, share: Share) -> Tensor:
        """Returns all rows; every rank has the whole gradient of them, and takes that of its rows."""
        return self.group.gather(x, share)

    def end(self, whole: Tensor) -> Tensor:
        """Returns a loss or another whole value, whose gradient begins as 1 / ranks on each rank."""
        return Paired.apply(whole, _same, self._part_of)

    def attention(
        self,
        share: Share,
        function: Function,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Runs scaled_dot_product_attention with rows of the query, all keys and values, rows of the mask."""
        if not is_causal or share.size > key.shape[-2]:
            mask = self._causal_mask(share, key.shape[-2], query.device) if is_causal else attn_mask
            return function(query, key, value, mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa)
        return self._causal_rows(share, partial(causal, function, scale=scale), query, key, value)

    def attention_by_heads(
        self,
        share: Share,
        function: Function,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        scale: float | None = None,
        **__: Any,
    ) -> Tensor:
        """Runs the same under its causal mask with rows of keys and values, too, which are gathered for some
        heads after the others.
        """

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows = partial(causal, function, scale=scale)
            return self._causal_rows(share, rows, query, self.gather(key, share), self.gather(value, share))

        sizes = key.shape, value.shape
        whole_bytes = sum(shape.numel() // shape[-2] * share.size for shape in sizes) * key.element_size()
        return attention_by_heads(attend, query, key, value, pieces_of_heads(key.shape[-3], whole_bytes))

    def _causal_rows(
        self, share: Share, attend: Function, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        parts, done = list[Tensor](), 0
        for start, stop in self.place.ranges(share):
            rows = query.narrow(-2, done, stop - start)
            parts.append(attend(rows, key.narrow(-2, 0, stop), value.narrow(-2, 0, stop)))
            done += stop - start
        return torch.cat(parts, -2)

    @property
    def largest(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Returns what ranks that have other rows are asked for the largest element with."""
        return (self.group.collectives.largest,)

    def scaled_rows_of_input(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Module
    ) -> Tensor:
        """Returns this rank's rows of a layer whose scales are of all rows."""
        layer = ScaledLayer(module, {"input": self.largest, "gradient": self.largest})
        out = scaled_product(layer, x, weight)
        return out if bias is None else out + bias.to(out.dtype)

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x."""
        return Paired.apply(x, self.group.collectives.total, self.group.collectives.total)

    def total_count(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, which has no gradient."""
        return self.group.collectives.total(x)

    def _causal_mask(self, share: Share, keys: int, device: torch.device) -> Tensor:
        rows = torch.cat([torch.arange(*rows, device=device) for rows in self.place.ranges(share)])
        return rows[:, None] >= torch.arange(keys, device=device)

    def _rows_of(self, x: Tensor, share: Share) -> Tensor:
        return self.group.collectives.part(x, share)

    def _part_of(self, x: Tensor) -> Tensor:
        return x / self.place.ranks


def causal(function: Function, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Returns the attention of rows that end with the last key.

    torch's aligned mask knows no groups of heads: heads that share keys are computed one after another, so
    that keys are never repeated in memory.
    """
    with outside_modes():
        mask: Any = causal_lower_right(query.shape[-2], key.shape[-2])
    times = query.shape[-3] // key.shape[-3] if key.ndim > 2 else 1
    if times == 1:
        return function(query, key, value, mask, scale=scale)
    heads = query.unflatten(-3, (-1, times)).unbind(-3)
    return torch.stack([function(each, key, value, mask, scale=scale) for each in heads], -3).flatten(-4, -3)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
