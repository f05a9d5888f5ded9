"""Keeps what the slices of a sequence read of each other, within one stage.

    gather     forward: own rows into the microbatch's, returns those up to them      (keys, values)
               backward: adds the gradient up with that of later slices, returns that of own rows
    total      forward: the sum so far      backward: the gradient of the whole sum, which the last slice had
    end        forward: the value           backward: zeros, but in the last slice

                 slice 0      slice 1      slice 2
    forward      k v [0,2)    k v [0,4)    k v [0,6)     one tensor of 6 rows, each has the first ones
    backward     <- d k v     <- d k v     d k v [0,6)   a gradient is whole when those behind have run

Keys and values of a microbatch are in memory once, however many slices read them: what is returned has the
storage of the microbatch's rows. Later slices write rows behind those that were returned, so what autograd
has saved does not change; and a recomputed forward writes the bits that are there. Gradients of 16-bit rows
are added up in float32 and rounded once.

Source: SlimPipe, arXiv 2504.14519. Oracle: tests/parity/test_slices.py, the numbers of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.program.sharding.share import RankPosition, Share
from outsize.run.collectives.context_parallel import Function, RowGroup, causal
from outsize.run.collectives.functions import Paired

Site = tuple[int, int]
"""A collective call of the tape, by its number, and which of the values of that call."""
_WIDER: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@final
@dataclass(eq=False)
class KeptOfMicrobatch:
    """Holds what the slices of one microbatch have left in a stage, by the call that reads it."""

    rows: dict[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    gradients: dict[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    sums: dict[tuple[Site, int], Tensor] = field(default_factory=dict[tuple[Site, int], Tensor])
    sum_gradients: dict[Site, Tensor] = field(default_factory=dict[Site, Tensor])


@final
class KeptRows:
    """Holds what a stage keeps of its microbatches in flight; `now` is that of the one that it computes."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptOfMicrobatch] = {}
        self.now = KeptOfMicrobatch()

    def begin(self, microbatch: int) -> None:
        """Says which microbatch is computed next."""
        self.now = self._kept.setdefault(microbatch, KeptOfMicrobatch())

    def end(self, microbatch: int) -> None:
        """Drops what is kept of a microbatch."""
        self._kept.pop(microbatch, None)
        self.now = KeptOfMicrobatch()

    def clear(self) -> None:
        """Drops all, of an unfinished step."""
        self._kept.clear()
        self.now = KeptOfMicrobatch()

    @property
    def rows_bytes(self) -> int:
        """Returns the bytes of keys and values that are kept now."""
        return sum(rows.nbytes for kept in self._kept.values() for rows in kept.rows.values())


@final
class SequenceKeeper:
    """Holds what the slices of one program share: for each of its stages, the rows that it keeps."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._stages: dict[tuple[int, int], KeptRows] = {}
        self._at = KeptRows()

    @property
    def now(self) -> KeptOfMicrobatch:
        """Returns what is kept of the microbatch of which a stage computes a slice."""
        return self._at.now

    def enter(self, rows: KeptRows, microbatch: int) -> None:
        """Says which stage computes next, by the rows that it keeps, and of which microbatch."""
        self._at = rows
        rows.begin(microbatch)

    def group(self, number: int) -> SliceGroup:
        """Returns what computes for one slice."""
        return SliceGroup(self, RankPosition(number, self.slices))

    def of(self, stage: int, model: object) -> KeptRows:
        """Returns what a stage with the weights of a model keeps, for all slices."""
        return self._stages.setdefault((stage, id(model)), KeptRows())


@final
@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Says which slice of its sequences a program computes; all of them have one `keeper`."""

    number: int
    keeper: SequenceKeeper


@final
class SliceGroup(RowGroup):
    """Computes for one slice what reads rows of others; it sends nothing.

    Calls have numbers in the order in which the tape of a slice is written, which is the same for all slices.
    """

    def __init__(self, keeper: SequenceKeeper, place: RankPosition) -> None:
        self.place, self._keeper = place, keeper
        self.gathered = RankPosition(place.rank, place.ranks, from_first=True)
        self._numbers = count()
        self._site = (-1, 0)

    @property
    def _is_last(self) -> bool:
        return self.place.rank == self.place.ranks - 1

    def collective(self, name: str) -> Callable[..., Any]:
        """Returns the method of this name, for the next call of a slice's tape."""
        run, number = getattr(self, name), next(self._numbers)

        def at_site(*args: Any, **kwargs: Any) -> Any:
            self._site = number, 0
            return run(*args, **kwargs)

        return at_site

    def gather(self, x: Tensor, share: Share) -> Tensor:
        """Returns the rows of this slice and of those before it."""
        ((start, stop),) = self.place.ranges(share)
        rows = _SliceRows(share.dim, start, stop, share.size)
        out: Tensor = _Gathered.apply(x, self._keeper.now, self._site, rows)
        return out

    def output(self, x: Tensor, share: Share) -> Tensor:
        """Is in a tape and never run: a step in slices has no outputs but its loss."""
        raise AssertionError("a slice has no outputs")

    def end(self, whole: Tensor) -> Tensor:
        """Returns a loss or another whole value, whose gradient is that of the last slice."""
        return Paired.apply(whole, _same, _same if self._is_last else torch.zeros_like)

    def attention(
        self,
        share: Share,
        function: Function,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: Any,
        scale: float | None = None,
        **more: Any,
    ) -> Tensor:
        """Runs causal scaled_dot_product_attention of rows that end with the last of these keys; of what is
        not causal, the keys are not of the sequence.
        """
        named = dict(
            zip(("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), others, strict=False)
        )
        named |= more | ({} if scale is None else {"scale": scale})
        if not named.pop("is_causal", False):
            return function(query, key, value, **named)
        ((_, stop),) = self.place.ranges(share)
        key, value = key.narrow(-2, 0, stop), value.narrow(-2, 0, stop)
        return causal(function, query, key, value, named.get("scale"))

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of this slice's x and of those before it."""
        out: Tensor = _Summed.apply(x, self._keeper.now, self._next_site(), self.place)
        return out

    def total_count(self, x: Tensor) -> Tensor:
        """Returns the sum of this slice's x and of those before it, which has no gradient."""
        return _sum_so_far(x, self._keeper.now, self._next_site(), self.place.rank)

    def _next_site(self) -> Site:
        number, value = self._site
        self._site = number, value + 1
        return number, value


@final
@dataclass(frozen=True, slots=True)
class _SliceRows:
    """The rows of a slice among all `size` of a dim."""

    dim: int
    start: int
    stop: int
    size: int


@final
class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: KeptOfMicrobatch, site: Site, rows: _SliceRows) -> Tensor:
        ctx.kept, ctx.site, ctx.rows = kept, site, rows
        whole = kept.rows.get(site)
        if whole is None:
            whole = kept.rows[site] = _room_for(x, rows)
        whole.narrow(rows.dim, rows.start, rows.stop - rows.start).copy_(x)
        shape = [rows.stop if dim == rows.dim else size for dim, size in enumerate(x.shape)]
        # No view, which would share the count of changes with rows that later slices write.
        return x.new_empty(0).set_(whole.untyped_storage(), 0, shape, whole.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), rows, gradients = grads, ctx.rows, ctx.kept.gradients
        known = gradients.pop(ctx.site, None)
        added = grad if known is None else known.add_(grad)
        own = added.narrow(rows.dim, rows.start, rows.stop - rows.start).to(grad.dtype)
        if rows.start:
            before = added.narrow(rows.dim, 0, rows.start)
            # A gradient of autograd's may have the memory of another one.
            wide = _WIDER.get(grad.dtype, grad.dtype)
            gradients[ctx.site] = before.to(wide, copy=True) if known is None else before
        return own, None, None, None


def _room_for(x: Tensor, rows: _SliceRows) -> Tensor:
    """Returns memory for all rows of a value, in the order in which the dims of x are in memory."""
    order = sorted(range(x.ndim), key=lambda dim: (-x.stride(dim), dim))
    sizes = [rows.size if dim == rows.dim else x.shape[dim] for dim in order]
    return x.new_empty(sizes).permute([order.index(dim) for dim in range(x.ndim)])


@final
class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: KeptOfMicrobatch, site: Site, place: RankPosition) -> Tensor:
        ctx.kept, ctx.site, ctx.is_last = kept, site, place.rank == place.ranks - 1
        return _sum_so_far(x, kept, site, place.rank)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), known = grads, ctx.kept.sum_gradients
        if ctx.is_last:
            known[ctx.site] = grad
        # Earlier slices know a part of the sum alone, and what follows from it means nothing.
        grad = known[ctx.site] if ctx.site in known else torch.zeros_like(grad)
        return grad, None, None, None


def _sum_so_far(x: Tensor, kept: KeptOfMicrobatch, site: Site, number: int) -> Tensor:
    """Returns the sum of x over the slices up to this one; a second forward finds the same before it."""
    with torch.no_grad():
        # What is returned may be added to in place.
        total = kept.sums[site, number] = x.clone() if number == 0 else kept.sums[site, number - 1] + x
        return total.clone()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
