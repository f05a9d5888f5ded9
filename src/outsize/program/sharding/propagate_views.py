"""Follows the sharded dim through views, splits and indexing, and computes the sizes in a rank's arguments.

A view retains a sharded dim when it begins a group of dims that are merged or split; of a fused q, k, v
(three parts) a split, an index or a view to (3, heads, width) takes whole parts, or asks for them
(NeedsParts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

from outsize.program.sharding.op_table import DimRule, op_of
from outsize.program.sharding.rank_step import (
    NeedsParts,
    NotPropagated,
    RankStep,
    RuleInput,
    Shape,
    op_name,
)
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tree import leaves


def _dims(call: RuleInput, start: int) -> tuple[int, ...]:
    sizes = call.args[start:] or tuple(call.instruction.kwargs.values())
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    return tuple(flat)


def transpose(call: RuleInput) -> RankStep:
    """Swaps two dims."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    a, b = (int(d) % ndim for d in _dims(call, 1))
    return call.same(share.at({a: b, b: a}.get(share.dim, share.dim)))


def transpose_last(call: RuleInput) -> RankStep:
    """Swaps the last two dims, for `t()` and `.mT`."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    return call.same(share.at({ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(share.dim, share.dim)))


def permute(call: RuleInput) -> RankStep:
    """Reorders all dims."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    order = [int(d) % ndim for d in _dims(call, 1)]
    return call.same(share.at(order.index(share.dim)))


def unsqueeze(call: RuleInput) -> RankStep:
    """Inserts a dim of one item."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    dim = int(call.arg(1, "dim")) % (ndim + 1)
    return call.same(share.at(share.dim + (dim <= share.dim)))


def view(call: RuleInput) -> RankStep:
    """Handles views, reshape, flatten, unflatten and squeeze from shapes alone; size arguments are
    rewritten.
    """
    share, shape = call.alone(), call.results()[0]
    if any(not isinstance(leaf, int) for leaf in leaves((call.args[1:], call.instruction.kwargs))):
        return call.same(share)  # This is a view of another dtype.
    new = viewed(share, call.shape(call.args[0]), shape)
    return call.same(new, rewrite=lambda place: resized_arguments(call, place, new, shape))


def viewed(share: Share, before: Shape, after: Shape) -> Share:
    """Returns the share after a view. Raises NotPropagated, and NeedsParts where the parts come first."""
    if share.dim >= len(before):
        raise NotPropagated("no such dim")
    start = prod(before[: share.dim])
    inner = prod(before[share.dim + 1 :])
    dims = [d for d in range(len(after)) if prod(after[:d]) == start and after[d] > 1]
    if not dims:
        raise NotPropagated("a view joins the divided dim with what stands before it")
    dim = dims[-1]
    if prod(after[dim:]) != share.size * inner:
        raise NotPropagated("a view does not keep the divided dim apart")
    if len(share.parts) > 1 and after[dim] == len(share.parts) and len(set(share.parts)) == 1:
        return _inside(share, after, dim)
    new = share.resized(after[dim])
    if new is None or prod(after[dim + 1 :]) * after[dim] != share.size * inner:
        raise NotPropagated(f"a view to {after} cuts through what each rank has")
    return new.at(dim)


def _inside(share: Share, after: Shape, dim: int) -> Share:
    """Shards the heads of a fused q, k, v in three parts, viewed as (3, heads, width)."""
    if dim + 1 == len(after):
        raise NotPropagated("a view has nothing left to divide")
    return Share(dim + 1, (after[dim + 1],), share.origins, False)


def resized_arguments(
    call: RuleInput, place: RankPosition, share: Share, shape: Shape
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the view's arguments with the size of the sharded dim on a rank."""
    named, size = op_of(call.instruction).sizes, place.size(share)
    args, kwargs = call.args, dict(call.instruction.kwargs)
    if named in ("one by one", "as a tuple"):
        sizes = list(_dims(call, 1))
        behind = len(shape) - share.dim
        if sizes[-behind] != -1:
            sizes[-behind] = size
        return (args[0], tuple(sizes)) if named == "as a tuple" else (args[0], *sizes), {}
    if named == "of one dim":
        sizes, first = list(call.arg(2, "sizes")), int(call.arg(1, "dim")) % len(call.shape(args[0]))
        if first <= share.dim < first + len(sizes) and sizes[share.dim - first] != -1:
            sizes[share.dim - first] = size
        return (args[0], first, tuple(sizes)), {}
    return args, kwargs


def expand(call: RuleInput) -> RankStep:
    """Expands with new dims in front; size arguments are rewritten."""
    share, shape = call.alone(), call.results()[0]
    new = share.at(share.dim + len(shape) - len(call.shape(call.args[0])))
    return call.same(new, rewrite=lambda place: resized_arguments(call, place, new, shape))


def repeat_interleave(call: RuleInput) -> RankStep:
    """Repeats each head several times: heads of a rank stay together."""
    share, times, dim = call.alone(), call.arg(1, "repeats"), call.arg(2, "dim")
    ndim = len(call.shape(call.args[0]))
    if not isinstance(times, int) or dim is None or call.arg(3, "output_size") is not None:
        raise NotPropagated("it repeats by a tensor")
    new = share.resized(share.size * times) if int(dim) % ndim == share.dim else share
    assert new is not None
    return call.same(new)


def split(call: RuleInput) -> RankStep:
    """Splits: split, chunk and unbind along the sharded dim take whole parts; along others they do not
    matter.
    """
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    name = op_name(call.instruction)
    dim = int(call.arg(1, "dim", 0) if name == "unbind" else call.arg(2, "dim", 0)) % ndim
    unbinds = name == "unbind"
    if dim != share.dim:
        return call.same(share.at(share.dim - (unbinds and dim < share.dim)))
    sizes = [1] * share.size if unbinds else [shape[dim] for shape in call.results()]
    taken = _taken(share, sizes)
    if unbinds:
        raise NotPropagated("it takes single heads out of those that are divided")
    if name == "chunk":
        if len(set(sizes)) > 1:
            raise NotPropagated("chunks of different sizes")
        return RankStep(tuple(taken))
    return RankStep(
        tuple(taken), rewrite=lambda place: ((call.args[0], [place.size(s) for s in taken], dim), {})
    )


def _taken(share: Share, sizes: Sequence[int]) -> list[Share]:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    pieces = [share.between(a, b) for a, b in pairwise(edges)]
    taken = [s for s in pieces if s is not None]
    if len(taken) < len(pieces):
        if not share.size:
            raise NotPropagated("it takes pieces of what is empty")
        if not share.complete or len(share.parts) > 1:
            raise NotPropagated("it takes pieces that are divided")
        raise NeedsParts(share, [Fraction(e, share.size) for e in edges[1:-1]])
    return taken


def getitem(call: RuleInput) -> RankStep:
    """Indexes with basic indices: the sharded dim whole, or whole parts of it."""
    share = call.alone()
    index = _all_dims(call)
    at, out = _where(index, share.dim)
    taken = index[at]
    if isinstance(taken, int):
        if not share.complete or len(share.parts) > 1:
            raise NotPropagated("it takes a single one of what is divided")
        raise NeedsParts(share, [Fraction(i, share.size) for i in range(1, share.size)])
    start, stop, step = taken.indices(share.size)
    if step != 1:
        raise NotPropagated("it is indexed in steps")
    if (start, stop) == (0, share.size):
        return call.same(share.at(out), rewrite=lambda place: _indexed(call, index, at, slice(None)))
    sizes = [size for size in (start, stop - start, share.size - stop) if size]
    new, before = _taken(share, sizes)[1 if start else 0].at(out), share.between(0, start)

    def rewrite(place: RankPosition) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = place.size(before) if before is not None else 0
        return _indexed(call, index, at, slice(first, first + place.size(new)))

    return call.same(new, rewrite=rewrite)


def _all_dims(call: RuleInput) -> list[Any]:
    """Returns the index with `...` and what is left out written as full slices."""
    indices = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    plain = (int, slice, type(None), type(Ellipsis))
    if any(not isinstance(i, plain) or isinstance(i, bool) for i in indices):
        raise NotPropagated("it is indexed by a tensor")
    left = len(call.shape(call.args[0])) - sum(isinstance(i, int | slice) for i in indices)
    at = next((n for n, i in enumerate(indices) if i is Ellipsis), len(indices))
    return [*indices[:at], *[slice(None)] * left, *indices[at + 1 :]]


def _where(index: Sequence[Any], dim: int) -> tuple[int, int]:
    """Returns the position in the index of a dim of what is indexed, and which dim of the result it
    becomes.
    """
    places = [n for n, i in enumerate(index) if i is not None]
    before = index[: places[dim]]
    return places[dim], sum(not isinstance(i, int) for i in before)


def _indexed(
    call: RuleInput, full: list[Any], at: int, item: slice
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (call.args[0], (*full[:at], item, *full[at + 1 :])), {}


def unchanged_dims(call: RuleInput) -> RankStep:
    """Leaves dims where they are, counted from the left."""
    return call.same(call.alone())


VIEWS: Mapping[DimRule, Callable[[RuleInput], RankStep]] = {
    "viewed": view,
    "transposed": transpose,
    "transposed last": transpose_last,
    "permuted": permute,
    "unsqueezed": unsqueeze,
    "expanded": expand,
    "repeated heads": repeat_interleave,
    "split": split,
    "indexed": getitem,
    "unchanged": unchanged_dims,
}
