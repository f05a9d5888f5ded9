"""Implements collectives of a tensor-parallel group, and weights of which each rank has a shard.

    enter   forward: x as it is       backward: all-reduce       (Megatron's f)
    reduce  forward: all-reduce       backward: the gradient     (Megatron's g)
    gather  forward: all-gather          backward: this rank's shard
    cut     forward: this rank's shard   backward: all-gather    (so second derivatives are right as well)
    scatter forward: reduce-scatter   backward: all-gather       (sequence parallelism, arXiv 2205.05198)
    collect forward: all-gather       backward: reduce-scatter
    columns forward: enter or collect, then products    backward: the collective beside the weights' gradients

The collective of `columns` runs on the communicator's own stream. It is launched as soon as the gradient of
the products' input is, and waited for when the gradients of their weights have been launched. Every other
collective is on the stream of the caller, because what follows it reads its result at once.

Weights remain parameters under their names, as DTensors: state dicts, torch.distributed.checkpoint,
clip_grad_norm_ and optimizers support them. The cross entropy of logits whose classes are sharded sends three
numbers per row instead of all logits. Dropout of a sharded value draws the mask of the whole value and takes
its shard, so it equals that of one process, at the price of memory for all of it.

Sources: Megatron-LM, arXiv 1909.08053, sec. 3; torch.distributed.tensor. Oracle:
tests/dist/test_tensor_parallel.py, the numbers of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from outsize.axes.tensor import TENSOR
from outsize.device.accelerators import widest_float
from outsize.errors import BadOption
from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.sharding.tensor_parallel.calls import ColumnProduct
from outsize.run.collectives.attention import by_heads, one_mask
from outsize.run.collectives.functions import ColumnProducts, Entry, Paired, lowered
from outsize.run.collectives.mesh_collectives import MeshCollectives, part_of
from outsize.run.collectives.scaled_products import ScaledLayer, scaled_product
from outsize.run.transport.rank_collectives import RankCollectives


@final
class TensorParallelGroup(AxisGroup):
    """Computes with gradients what ranks along one dim of a mesh compute together, by their `collectives`.

    `ends_graphs`: compiled stages call it outside of their graphs.
    """

    def __init__(self, mesh: DeviceMesh, *, ends_graphs: bool = False) -> None:
        self.mesh, self._ends_graphs = mesh, ends_graphs
        self.collectives = MeshCollectives(mesh)
        self.place = self.collectives.place

    def collective(self, name: str) -> Callable[..., Any]:
        return named_collective(self, name, ends_graph=self._ends_graphs)

    def enter(self, x: Tensor) -> Tensor:
        """Returns x, whose gradient is the sum of all ranks' gradients."""
        return Paired.apply(x, _same, self.collectives.total)

    def reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x."""
        return Paired.apply(x, self.collectives.total, _same)

    def cut(self, x: Tensor, share: Share) -> Tensor:
        """Returns this rank's shard of x."""
        return Paired.apply(x, self.collectives.part, self.collectives.whole, share)

    def gather(self, x: Tensor, share: Share) -> Tensor:
        """Returns the whole of which each rank has a shard."""
        return Paired.apply(x, self.collectives.whole, self.collectives.part, share)

    def scatter(self, x: Tensor, share: Share) -> Tensor:
        """Returns this rank's shard of the sum of all ranks' x."""
        return Paired.apply(x, self.collectives.total_part, self.collectives.whole, share)

    def collect(self, x: Tensor, share: Share) -> Tensor:
        """Returns the whole, whose gradient is the sum of all ranks' gradients."""
        return Paired.apply(x, self.collectives.whole, self.collectives.total_part, share)

    def columns(
        self, x: Tensor, share: Share | None, products: tuple[ColumnProduct, ...]
    ) -> tuple[Tensor, ...]:
        """Returns the entered x (with a share, the whole of which x is this rank's shard), and its products.

        Ranks add up the gradient of x while each computes the gradients of its weights.
        """
        weights = [lowered(tensor) for weight, bias, _ in products for tensor in (weight, bias)]
        turned = tuple(turned for *_, turned in products)
        results = ColumnProducts.apply(x, self._entry(share), turned, *weights)
        return results[: 1 + len(products)]

    def _entry(self, share: Share | None) -> Entry:
        if share is None:
            return Entry(_same, self.collectives.total, self.collectives.begin_total)
        one = {"share": share}
        return Entry(
            partial(self.collectives.whole, **one),
            partial(self.collectives.total_part, **one),
            partial(self.collectives.begin_total_part, **one),
            gathers=True,
        )

    def _added(self, x: Tensor, scatter: Share | None) -> Tensor:
        return self.reduce(x) if scatter is None else self.scatter(x, scatter)

    def row(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, scatter: Share | None = None
    ) -> Tensor:
        """Adds up a product of which each rank has some summands; with `scatter` it returns its shard."""
        out = self._added(functional.linear(x, weight.t() if turned else weight), scatter)
        return out if bias is None else out + bias.to(out.dtype)

    def stored_row(
        self, x: Tensor, bias: Tensor | None, layer: nn.Module, scatter: Share | None = None
    ) -> Tensor:
        """Adds up what a layer makes of a rank's part of its codes; with `scatter` it returns its shard."""
        with without_bias(layer):
            out = layer(x)
        out = self._added(out, scatter)
        return out if bias is None else out + bias.to(out.dtype)

    def scaled_columns(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Module, rows: Any = None
    ) -> Tensor:
        """Returns this rank's features of a layer whose scales are of whole tensors; x was entered.

        `rows`: the group of an axis whose ranks have other rows of x.
        """
        largest = (self.collectives.largest,)
        others = () if rows is None else rows.largest
        layer = ScaledLayer(module, {"input": others, "weight": largest, "gradient": (*largest, *others)})
        out = scaled_product(layer, x, weight)
        return out if bias is None else out + bias.to(out.dtype)

    def scaled_row(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: nn.Module,
        rows: Any = None,
        scatter: Share | None = None,
    ) -> Tensor:
        """Adds up the product of such a layer, of which each rank has some summands; as `row` does."""
        largest = (self.collectives.largest,)
        others = () if rows is None else rows.largest
        layer = ScaledLayer(module, {"input": (*largest, *others), "weight": largest, "gradient": others})
        out = self._added(scaled_product(layer, x, weight), scatter)
        return out if bias is None else out + bias.to(out.dtype)

    def lookup(
        self, index: Tensor, weight: Tensor, share: Share, padding: int | None, scatter: Share | None = None
    ) -> Tensor:
        """Looks up an embedding of which each rank has some rows."""
        ((start, stop),) = self.place.ranges(share)
        elsewhere = (index < start) | (index >= stop)
        if start == stop:
            return self._added(_nothing(index, weight), scatter)
        local_padding = None if padding is None or not start <= padding < stop else padding - start
        rows = functional.embedding((index - start).masked_fill(elsewhere, 0), weight, local_padding)
        return self._added(rows.masked_fill(elsewhere.unsqueeze(-1), 0), scatter)

    def attend(
        self,
        module: nn.MultiheadAttention,
        inputs: tuple[Tensor, ...],
        masks: tuple[Any, ...],
        weights: tuple[Any, ...],
        scatter: Share | None = None,
        share: Share | None = None,
    ) -> tuple[Tensor, None]:
        """Runs an nn.MultiheadAttention of which each rank has some heads.

        `inputs` are query, key and value, or one tensor for all of them, which is entered by `columns`.
        """
        in_weight, in_bias, out_weight, out_bias = weights
        biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
        pairs = [*zip(in_weight.chunk(3), biases, strict=True)]
        if len(inputs) == 1:
            _, *made = self.columns(inputs[0], share, tuple((w, b, False) for w, b in pairs))
        else:
            made = [functional.linear(x, w, b) for x, (w, b) in zip(inputs, pairs, strict=True)]
        q, k, v = (by_heads(each, module) for each in made)
        mask, causal = one_mask(q, k, *masks)
        if mask is not None and mask.ndim == 4 and mask.shape[1] == module.num_heads:
            mask = self.collectives.part(mask, Share(1, (module.num_heads,)))
        p = module.dropout if module.training else 0.0
        share_of_heads, kernel = Share(1, (module.num_heads,)), functional.scaled_dot_product_attention
        out = self.attention(share_of_heads, kernel, q, k, v, mask, p, causal)
        # Tokens come first in memory, as in torch's own attention: a dropout after it draws in memory order.
        out, turned = out.permute(2, 0, 1, 3).flatten(2), module.batch_first and inputs[0].ndim == 3
        scatter = scatter.at(1 - scatter.dim) if turned and scatter is not None else scatter
        out = self.row(out if inputs[0].ndim == 3 else out.squeeze(1), out_weight, out_bias, False, scatter)
        return (out.transpose(0, 1) if turned else out), None

    def cross_entropy(
        self, logits: Tensor, target: Tensor, share: Share, ignore_index: int = -100, reduction: str = "mean"
    ) -> Tensor:
        """Computes the cross entropy of logits (n, classes of this rank)."""
        counted = target != ignore_index
        if torch.is_autocast_enabled(logits.device.type):
            logits = logits.float()  # torch's own cross entropy does the same.
        rows = _CrossEntropy.apply(logits, target, share, self).masked_fill(~counted, 0)
        if reduction == "none":
            return rows
        return rows.sum() if reduction == "sum" else rows.sum() / counted.sum()

    def dropout(
        self,
        share: Share,
        function: Callable[..., Tensor],
        x: Tensor,
        p: float,
        training: bool,
        inplace: bool,
    ) -> Tensor:
        """Applies dropout with the mask that one process would draw."""
        if not training or p == 0.0:
            return x
        mask = drawn_mask(function, x, p, ((share, self.place),))
        return x.mul_(mask) if inplace else x * mask

    def attention(
        self,
        share: Share,
        function: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Runs scaled_dot_product_attention, whose dropout has the mask that one process would draw."""
        if dropout_p == 0.0:
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return function(query, key, value, attn_mask, 0.0, is_causal, **options)
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
        scores = (query * root) @ (key * root).mT
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
        chances = scores.softmax(-1)
        mask = drawn_mask(functional.dropout, chances, dropout_p, ((share, self.place),))
        return (chances * mask) @ value

    # -- weights -------------------------------------------------------------------------------------

    def parameter(self, weight: Tensor, share: Share | None) -> nn.Parameter:
        """Returns the weight as a DTensor of which this rank has its shard, or with None all."""
        local = weight.detach() if share is None else self.collectives.part(weight.detach(), share)
        sharded = DTensor.from_local(
            local, self.mesh, [_placement(share)], run_check=False, shape=weight.shape, stride=weight.stride()
        )
        return nn.Parameter(sharded, requires_grad=weight.requires_grad)


def named_collective(group: AxisGroup, name: str, *, ends_graph: bool) -> Callable[..., Any]:
    """Returns the method of a group; with `ends_graph`, a compiled stage calls it outside of its graph."""
    run = getattr(group, name)
    return torch.compiler.disable(run) if ends_graph else run


def local_of(weight: Tensor) -> Tensor:
    """Returns this rank's shard, whose gradient goes to the weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def mesh_of(weight: Tensor) -> DeviceMesh | None:
    """Returns the mesh over whose ranks a weight (or gradient) is sharded; None where it is not."""
    return weight.device_mesh if isinstance(weight, DTensor) else None


def full_of(weight: Tensor) -> Tensor:
    """Returns the whole weight (or gradient) on every rank; all of them must call it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@contextmanager
def without_bias(layer: nn.Module) -> Iterator[None]:
    """Lets a layer multiply without its bias, which ranks add to their sum once."""
    table, bias = layer._parameters, layer._parameters.get("bias")
    if bias is not None:
        table["bias"] = None
    try:
        yield
    finally:
        if bias is not None:
            table["bias"] = bias


@final
@dataclass(frozen=True, slots=True)
class LocalBox:
    """The box of a tensor that this rank has: the shape of the whole, and where the rank's part begins.

    `first`: of the ranks that have this very part, it is the first.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    first: bool = True


def local_box(weight: Tensor) -> LocalBox:
    """Returns which part of a tensor this rank has. Raises BadOption where the part is no box."""
    if not isinstance(weight, DTensor):
        return LocalBox(tuple(weight.shape), (0,) * weight.ndim)
    for placement in weight.placements:
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            raise BadOption(
                f"a tensor is divided over ranks as {placement}, which is no box of it",
                next_step=f"{TENSOR.typed(2)} of outsize.parallelize, whose parts are known",
            )
    mesh = weight.device_mesh
    _, offsets = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    place = mesh.get_coordinate() or ()
    first = all(at == 0 for at, p in zip(place, weight.placements, strict=True) if isinstance(p, Replicate))
    return LocalBox(tuple(weight.shape), tuple(offsets), first)


def divided_like(local: Tensor, weight: Tensor) -> Tensor:
    """Returns this rank's part of a new tensor as a tensor that is divided as `weight` is."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def shard_like(local: Tensor, weight: Tensor) -> Tensor:
    """Returns a tensor whose shard on this rank is `local`, divided over the ranks that divide `weight`."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)


def own_shard(whole: Tensor, weight: Tensor) -> Tensor:
    """Returns a tensor that every rank has whole as one that is divided as `weight` is."""
    if not isinstance(weight, DTensor):
        return whole
    local, box = weight.to_local(), local_box(weight)
    for dim, (size, offset) in enumerate(zip(local.shape, box.offsets, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    return divided_like(whole.to(local.device), weight)


Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a function of torch with its arguments, among which are shards that ask it."""


@final
class AskingShard(DTensor):
    """A divided tensor that lets `answer` compute torch's functions of it; below them it is a DTensor."""

    answer: Answer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns what the shard's `answer` does."""
        shard = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AskingShard))
        return shard.answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes as DTensor does: autograd itself adds to a gradient."""
        return func(*tree_map(plain_shard, args), **tree_map(plain_shard, kwargs or {}))


def asking(shard: Tensor, answer: Answer) -> Tensor:
    """Returns a divided tensor with the same memory that lets `answer` compute; any other tensor as it is."""
    if not isinstance(shard, DTensor):
        return shard
    made = AskingShard(shard._local_tensor, shard._spec, requires_grad=False)
    vars(made)["answer"] = answer
    return made


def plain_shard(value: Any) -> Any:
    """Returns a DTensor with the memory of one that asks; anything else as it is."""
    if not isinstance(value, AskingShard):
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)


def part_number(weight: Tensor) -> tuple[int, ...]:
    """Returns where the ranks with this rank's part of a tensor stand among those with another part."""
    if not isinstance(weight, DTensor):
        return ()
    place = weight.device_mesh.get_coordinate() or ()
    return tuple(at for at, p in zip(place, weight.placements, strict=True) if not isinstance(p, Replicate))


@contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """Replaces sharded parameters within the context by meta tensors of the whole shape, to record
    the model.
    """
    replacements: dict[int, nn.Parameter] = {}
    tables = [module._parameters for module in model.modules()]
    sharded = [(t, key, p) for t in tables for key, p in t.items() if isinstance(p, DTensor)]
    for table, key, p in sharded:
        empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
        table[key] = replacements.setdefault(id(p), nn.Parameter(empty, requires_grad=p.requires_grad))
    try:
        yield
    finally:
        for table, key, p in sharded:
            table[key] = p


def norms_of_shards(norms: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Turns norms of this rank's shards into norms of the whole gradients; all ranks must make the same call.

    `norms[i]` belongs to `gradients[i]`.
    """
    whole = list(norms)
    for mesh in dict.fromkeys(g.device_mesh for g in gradients if isinstance(g, DTensor)):
        is_part = [isinstance(g, DTensor) and g.device_mesh == mesh for g in gradients]
        whole = with_added_squares(whole, is_part, partial(_total_over, mesh.get_group(mesh.ndim - 1)))
    return whole


def _total_over(group: dist.ProcessGroup, squares: Tensor) -> Tensor:
    RankCollectives.of(group).all_reduce(squares)
    return squares


def with_added_squares(
    norms: Sequence[Tensor], is_part: Sequence[bool], total: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Returns norms (0-dim) of whole values from those of parts; `total` adds up squares over ranks."""
    parts = [norm for norm, part in zip(norms, is_part, strict=True) if part]
    if not parts:
        return list(norms)
    # fp64 holds the squares of every dtype exactly.
    squares = torch.stack(parts).to(widest_float(parts[0].device)).square()
    whole = iter(total(squares).sqrt().unbind())
    return [next(whole) if part else norm for norm, part in zip(norms, is_part, strict=True)]


def _placement(share: Share | None) -> Placement:
    if share is None:
        return Replicate()
    return (
        Shard(share.dim) if len(share.parts) == 1 else _StridedShard(share.dim, split_factor=len(share.parts))
    )


def drawn_mask(
    dropout: Callable[..., Tensor], x: Tensor, p: float, divided: Sequence[tuple[Share, RankPosition]]
) -> Tensor:
    """Returns this rank's part of a dropout mask that is drawn for the whole value in memory order, as one
    process does; x has the part that it has by each share in `divided`.
    """
    order = sorted(range(x.ndim), key=lambda dim: -x.stride(dim))
    sizes = {share.dim: share.size for share, _ in divided}
    whole = x.new_ones([sizes.get(dim, x.shape[dim]) for dim in order])
    mask = dropout(whole, p).permute([order.index(dim) for dim in range(x.ndim)])
    for share, place in divided:
        mask = part_of(mask, share, place)
    return mask


def _nothing(index: Tensor, weight: Tensor) -> Tensor:
    """Returns zeros for a rank without rows; they depend on the weight, so that every rank has a gradient."""
    return weight.new_zeros(*index.shape, weight.shape[1]) + weight.sum()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


@final
class _CrossEntropy(torch.autograd.Function):
    """Computes -log softmax at the target, per row of logits (n, classes of this rank)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, share: Share, group: TensorParallelGroup) -> Tensor:
        ((start, stop),) = group.place.ranges(share)
        lowest = torch.finfo(logits.dtype).min
        top = logits.amax(1) if stop > start else logits.new_full(target.shape, lowest)
        top = group.collectives.total(top, dist.ReduceOp.MAX)
        powers = (logits - top[:, None]).exp()
        is_local = (target >= start) & (target < stop)
        at = (target - start).masked_fill(~is_local, 0)[:, None]
        there = (logits - top[:, None]).gather(1, at)[:, 0] if stop > start else torch.zeros_like(top)
        sums, there = group.collectives.total(torch.stack([powers.sum(1), there.masked_fill(~is_local, 0)]))
        ctx.save_for_backward(powers / sums[:, None], at, is_local)
        return sums.log() - there

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        chances, at, is_local = ctx.saved_tensors
        grad = chances.clone()
        if grad.shape[1]:
            grad.scatter_add_(1, at, -is_local.to(grad.dtype)[:, None])
        return grad * grads[0][:, None], None, None, None
