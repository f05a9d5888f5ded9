"""Runs a region of a program by pieces of its rows, and each piece once more in the backward.

    forward     for each piece: its rows through the region, without a graph; its parts are added up
    backward    for each piece: its rows once more with a graph, gradients of its rows and its part of those
                of the weights, which add up in float32

So logits exist for the rows of one piece. They are computed twice, as recompute would, and not their
gradients in the forward (as Liger Kernel does): nothing of the size of a weight waits between forward and
backward for each microbatch in flight, and a loss scale comes in where torch brings it. Sums over rows are
sums over pieces of sums: float32 results differ from those of all rows at once by rounding.

Source: arXiv 2411.09009 and arXiv 2410.10989 (see region.py); recompute of arXiv 1604.06174. Oracle:
tests/parity/test_loss_in_pieces.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.loss_in_pieces.region import DividedRegion, RowRegion, run_form
from outsize.program.replaying.modes import current_modes, under
from outsize.program.replaying.replay import Relocatable
from outsize.program.sharding.context_parallel.calls import AddsUpOverRows, OnRows, OverRows
from outsize.program.sharding.context_parallel.row_sums import RowParts, divides
from outsize.program.sharding.rank_step import NotPropagated, Operand, RankStep, RuleInput
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction, Ref, Weight

_Cut = tuple[int, tuple[tuple[int, int], ...]]
"""Holds a dim and ranges of its rows."""
_NAME: Final = "loss_in_pieces"
_MODULE: Final = "in_pieces"


@final
class LossInPieces(AddsUpOverRows, Relocatable):
    """Calls a region with its operands and returns its exits: one tensor, or a tuple of several."""

    def __init__(self, region: RowRegion, pieces: int) -> None:
        """Prepares at most `pieces` pieces, fewer where there are fewer rows. Raises NotPropagated."""
        self.__name__ = _MODULE if region.keeps_rows else _NAME
        self.region, self.pieces = region, pieces
        self._divided = region.in_pieces(pieces)
        self._divides = (
            ()
            if region.keeps_rows
            else tuple(
                divides(_sum_over_rows(self._divided.steps[i.index]).method, i.args, i.kwargs)
                for i in region.instructions
                if not {*region.exits}.isdisjoint(i.defines())
            )
        )

    @property
    def count(self) -> int:
        """Returns the number of pieces."""
        return self._divided.count

    def __call__(self, *operands: Tensor) -> Any:
        return self.finish(self.parts(*operands))

    def parts(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Returns the numerator of each exit, and its denominator where it has one: sums over rows."""
        if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
            return _InPieces.apply(self._programs, self._counts, *operands)
        return _totals(self._programs, operands)

    @property
    def _counts(self) -> tuple[int, ...]:
        """Returns which parts are denominators."""
        kinds = [kind for has in self._divides for kind in ((False, True) if has else (False,))]
        return tuple(number for number, is_count in enumerate(kinds) if is_count)

    def finish(self, parts: Sequence[Tensor]) -> Any:
        """Returns the exits of the sums of their parts; rows are what they are."""
        if self.region.keeps_rows:
            return parts[0]
        left, results = iter(parts), list[Tensor]()
        for has_denominator in self._divides:
            numerator = next(left)
            results.append(numerator / next(left).to(numerator.dtype) if has_denominator else numerator)
        return results[0] if len(results) == 1 else tuple(results)

    def follow_rows(self, call: RuleInput, ranks: int) -> RankStep:
        """Returns how ranks that have rows of a sequence compute the call."""
        names = dict(zip(self.region.operands, call.args, strict=True))
        shares = {
            own.slot: share
            for own, given in names.items()
            if isinstance(own, Ref) and (share := call.share(given)) is not None
        }
        rows = shares.get(self.region.rows.slot)
        if rows is None or rows.dim != self.region.dim:
            raise NotPropagated("its rows are not those of the sequence")

        def local(place: RankPosition) -> LossInPieces:
            return LossInPieces(self.region.divided(shares, place.ranks).at(place), self.pieces)

        divided = self.region.divided(shares, ranks)
        cut: dict[Operand, Share] = {names[o]: s for o, s in divided.cut.items() if names[o] not in shares}
        if self.region.keeps_rows:
            return call.same(divided.shares[self.region.exits[0]], cut=cut, call=OnRows(local))
        return call.same(None, cut=cut, call=OverRows("add_up", rows, local))

    def relocated(self, move: Callable[[Instruction], Instruction]) -> LossInPieces:
        """Returns the call whose instructions name the devices of another stage."""
        moved = tuple(map(move, self.region.instructions))
        return LossInPieces(replace(self.region, instructions=moved), self.pieces)

    @cached_property
    def _programs(self) -> list[_Piece]:
        places = (RankPosition(number, self.count) for number in range(self.count))
        return [_piece(self._divided, place, self.region) for place in places]


@final
@dataclass(frozen=True)
class _Piece:
    """Holds the function of one piece; `cuts[n]` is the dim and the rows of operand n, None for all of it,
    and `result` those of what it returns, None where that adds up.
    """

    function: Callable[..., tuple[Tensor, ...]]
    cuts: tuple[_Cut | None, ...]
    result: _Cut | None = None

    def operands(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Returns the piece's own part of each operand."""
        return [x if cut is None else _rows(x, *cut) for x, cut in zip(whole, self.cuts, strict=True)]

    def run(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the parts of this piece."""
        return self.function(*operands, _never)


def _piece(divided: DividedRegion, place: RankPosition, region: RowRegion) -> _Piece:
    """Writes the function of one piece."""
    own = divided.at(place)
    slots = {**divided.cut, region.rows: divided.shares[region.rows.slot]}
    instructions, exits, free = list[Instruction](), list[int](), len(own.metas)
    for instruction in own.instructions:
        step = divided.steps[instruction.index]
        if region.keeps_rows or {*region.exits}.isdisjoint(instruction.defines()):
            instructions.append(run_form(region, instruction))
            continue
        target = instruction.target
        call = _sum_over_rows(step)
        assert not isinstance(target, str)
        parts = RowParts(call.method, target, place.size(call.share))
        made = 2 if divides(call.method, instruction.args, instruction.kwargs) else 1
        out = tuple(Ref(free + number) for number in range(made))
        exits, free = [*exits, *(ref.slot for ref in out)], free + made
        instructions.append(replace(instruction, target=parts, out=out))
    entries = [leaf for leaf in region.operands if isinstance(leaf, Ref)]
    foreign = [leaf for leaf in region.operands if isinstance(leaf, Weight)]
    spec = SliceSpec(
        name=f"piece_{place.rank}",
        instructions=instructions,
        entries=[leaf.slot for leaf in entries],
        exits=region.exits if region.keeps_rows else exits,
        foreign=[leaf.name for leaf in foreign],
    )
    function = compile_slice(spec, region.walked.model, region.modes)
    shares = [slots.get(leaf) for leaf in (*entries, *foreign)]
    cuts = (None if share is None else (share.dim, tuple(place.ranges(share))) for share in shares)
    kept = divided.shares[region.exits[0]] if region.keeps_rows else None
    result = None if kept is None else (kept.dim, tuple(place.ranges(kept)))
    return _Piece(function, tuple(cuts), result)


def _sum_over_rows(step: RankStep) -> OverRows:
    """Returns how an exit of a region adds up."""
    assert isinstance(step.call, OverRows)
    return step.call


def _rows(x: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _never(_: int) -> None:
    raise AssertionError("a piece draws no random numbers")


def _totals(programs: Sequence[_Piece], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the sums of all pieces' parts, without a graph."""
    with torch.no_grad():
        whole = [operand.detach() for operand in operands]
        totals: list[Tensor] = []
        for piece in programs:
            parts = piece.run(piece.operands(whole))
            if piece.result is not None:
                totals = totals or [_empty(parts[0], piece.result[0], programs)]
                _put(totals[0], parts[0], piece.result)
            else:
                totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else list(parts)
    return tuple(totals)


def _empty(part: Tensor, dim: int, programs: Sequence[_Piece]) -> Tensor:
    """Returns the memory of all rows of a result of which `part` is a piece."""
    ranges = [each for piece in programs if piece.result is not None for each in piece.result[1]]
    shape = [*part.shape]
    shape[dim] = sum(stop - start for start, stop in ranges)
    return part.new_empty(shape)


def _put(whole: Tensor, part: Tensor, cut: _Cut) -> None:
    """Writes the rows of a piece to where they are in the whole."""
    (dim, ranges), done = cut, 0
    for start, stop in ranges:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, done, stop - start))
        done += stop - start


@final
class _InPieces(torch.autograd.Function):
    """Computes the parts of a region, and in the backward each piece again."""

    @staticmethod
    def forward(
        ctx: Any, programs: Sequence[_Piece], counts: Sequence[int], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.programs, ctx.modes = programs, current_modes()
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        totals = _totals(programs, operands)
        ctx.mark_non_differentiable(*(totals[number] for number in counts))
        return totals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise BadOption(
                "a loss in pieces has no second derivative",
                numbers=f"its {len(ctx.programs)} pieces are computed again outside of the backward's graph",
                next_step="outsize.Request(loss_pieces=1) (--loss-pieces 1)",
            )
        operands = ctx.saved_tensors
        wanted = [n for n in range(len(operands)) if ctx.needs_input_grad[n + 2]]
        sums: list[Tensor | None] = [None] * len(operands)
        with ExitStack() as stack:
            for context in under(ctx.modes):
                stack.enter_context(context)
            for piece in ctx.programs:
                _add_piece(piece, operands, wanted, gradients, sums)
        return None, None, *(s if s is None else s.to(x.dtype) for s, x in zip(sums, operands, strict=True))


def _add_piece(
    piece: _Piece,
    operands: Sequence[Tensor],
    wanted: Sequence[int],
    gradients: Sequence[Tensor | None],
    sums: list[Tensor | None],
) -> None:
    """Adds the gradients of one piece to the sums."""
    own = [x.detach() for x in piece.operands([operand.detach() for operand in operands])]
    for n in wanted:
        own[n].requires_grad_()
    with torch.enable_grad():
        parts = piece.run(own)
    given = [(p, g) for p, g in zip(parts, gradients, strict=True) if g is not None and p.requires_grad]
    roots = [(p, g if piece.result is None else _rows(g, *piece.result)) for p, g in given]
    if not roots:
        return
    found = torch.autograd.grad(
        [part for part, _ in roots], [own[n] for n in wanted], [g for _, g in roots], allow_unused=True
    )
    for n, gradient in zip(wanted, found, strict=True):
        if gradient is not None:
            sums[n] = _added(sums[n], gradient, operands[n], piece.cuts[n])


def _added(
    total: Tensor | None,
    gradient: Tensor,
    operand: Tensor,
    cut: _Cut | None,
) -> Tensor:
    """Returns the sum with the gradient of a piece: in its rows, or, of a whole operand, added in float32."""
    if cut is None:
        if total is None:
            return gradient.float() if operand.dtype.itemsize < 4 else gradient
        return total.add_(gradient)
    total = torch.zeros_like(operand) if total is None else total
    _put(total, gradient, cut)
    return total
