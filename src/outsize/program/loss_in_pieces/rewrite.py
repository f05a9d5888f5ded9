"""Puts the loss in pieces in the place of its instructions on a tape.

    v64 = lm_head(v63)                              nothing
    v65 = float(v64)                                nothing
    v72 = cross_entropy(view(v65), v71)             v72 = loss_in_pieces(v63, v71, lm_head.weight)

The tape keeps its length, so every other instruction draws the random numbers that it drew, and the slots of
logits are never filled: outputs of the model that are among them are None. Costs are those of the parts:

    FLOPs, bytes       forward once, backward with one more forward; each piece reads the weights
    saved              what comes from outside: the rows, and the targets, as they are
    workspace          what the region makes / pieces; in the backward also the gradients of the rows and of
                       the weights, twice (of one piece, and the sum in float32)

Complexity: O(instructions). Oracle: tests/parity/test_loss_in_pieces.py counts real bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Final, final

from torch import nn

from outsize.ir.graph import Work
from outsize.program.loss_in_pieces.modules import wide_modules
from outsize.program.loss_in_pieces.pieces import LossInPieces
from outsize.program.loss_in_pieces.region import RowRegion, find_region
from outsize.program.tape import Cost, Instruction, Ref, Tape, Weight
from outsize.program.tree import map_leaves

# A piece takes about as many bytes as the rows that it is made of, and at least so many: smaller matrices are
# computed more slowly.
_LEAST_BYTES: Final = 256 << 20


def in_pieces(tape: Tape, model: nn.Module, pieces: int, of_modules: int = 1) -> Tape:
    """Returns the tape with its loss in at most `pieces` pieces of rows, and its wide modules in so many; the
    tape itself where no part of it can be computed so, or where one piece is asked for.
    """
    region = find_region(tape, model) if pieces > 1 else None
    wide = wide_modules(tape, model) if of_modules > 1 else []
    for each in wide:
        tape = _with_pieces(tape, each, LossInPieces(each, of_modules))
    return tape if region is None else _with_pieces(tape, region, LossInPieces(region, pieces))


@final
@dataclass(frozen=True, slots=True)
class LossBytes:
    """Holds the bytes that the logits of all rows and what is made of them take, and in how many pieces one
    is about as large as the rows that it is made of.
    """

    whole_bytes: int
    pieces: int


def loss_bytes(tape: Tape, model: nn.Module, ranks: int = 1) -> LossBytes | None:
    """Returns what a loss takes, and its pieces on each of `ranks` ranks that share the rows of a sequence;
    None where it cannot be in pieces.
    """
    region = find_region(tape, model)
    if region is None:
        return None
    whole, rows = max(_held_bytes(tape, region)), tape.metas[region.rows.slot].size_bytes
    wanted = -(-whole // max(rows, ranks * _LEAST_BYTES))
    return LossBytes(whole, max(1, min(1 << max(0, wanted - 1).bit_length(), region.size // ranks)))


def _with_pieces(tape: Tape, region: RowRegion, call: LossInPieces) -> Tape:
    last = region.instructions[-1]
    inside = {i.index for i in region.instructions}
    instructions = list(tape.instructions)
    for index in inside:
        instructions[index] = _nothing(tape.instructions[index])
    exits = [Ref(slot) for slot in region.exits]
    instructions[last.index] = replace(
        last,
        target=call,
        args=region.operands,
        kwargs={},
        out=exits[0] if len(exits) == 1 else tuple(exits),
        modes=region.modes,
        writes=frozenset(),
        weights=tuple(leaf for leaf in region.operands if isinstance(leaf, Weight)),
        casts=tuple(dict.fromkeys(cast for i in region.instructions for cast in i.casts)),
        cost=_cost(tape, region, call.count),
    )
    gone = {slot for i in region.instructions for slot in i.defines()} - {*region.exits}
    output = map_leaves(lambda x: None if isinstance(x, Ref) and x.slot in gone else x, tape.output)
    return replace(tape, instructions=tuple(instructions), output=output)


def nothing() -> None:
    """Stands where an instruction was."""


def _nothing(instruction: Instruction) -> Instruction:
    return replace(
        instruction, target=nothing, args=(), kwargs={}, out=None, writes=frozenset(), weights=(), casts=(),
        cost=Cost(),
    )  # fmt: skip


def _held_bytes(tape: Tape, region: RowRegion) -> tuple[int, int]:
    """Returns the most that a forward of all rows, and its backward, hold besides operands and gradients of
    operands.
    """
    costs = [i.cost for i in region.instructions]
    saved = sum(c.saved_bytes for c in costs) - sum(_given_sizes(tape, region))
    storages = {tape.storage(slot) for i in region.instructions for slot in i.defines()}
    named = {s for c in costs for s in c.saved_storages} & storages
    sizes = {tape.storage(s): tape.metas[s].size_bytes for i in region.instructions for s in i.defines()}
    hidden = max(0, saved - sum(sizes[storage] for storage in named))
    worst, freed = 0, 0
    for cost in reversed(costs):
        worst = max(worst, cost.backward_workspace_bytes - freed)
        freed += cost.saved_bytes
    given = _weight_bytes(region)[0] + tape.metas[region.rows.slot].size_bytes
    return sum(sizes.values()) + hidden + max(c.workspace_bytes for c in costs), saved + max(0, worst - given)


def _given_sizes(tape: Tape, region: RowRegion) -> list[int]:
    first = region.instructions[0].index
    before = {s for i in tape.instructions[:first] for s in i.cost.saved_storages}
    sizes = {
        tape.storage(o.slot): tape.metas[o.slot].size_bytes for o in region.operands if isinstance(o, Ref)
    }
    return [size for storage, size in sizes.items() if storage not in before]


def _cost(tape: Tape, region: RowRegion, pieces: int) -> Cost:
    """Returns the cost of the region in pieces."""
    costs = [i.cost for i in region.instructions]
    given, held = _given_sizes(tape, region), _held_bytes(tape, region)
    rows = tape.metas[region.rows.slot].size_bytes
    weights, sums = _weight_bytes(region)
    kept = sum(tape.metas[slot].size_bytes for slot in region.exits)
    more = (pieces - 1) * weights
    forward = _repeated((w for c in costs for w in c.forward), pieces, more)
    backward = _repeated(
        (w for c in costs for w in (*c.backward_input, *c.backward_weight)), pieces, 2 * more
    )
    return Cost(
        flops=sum(c.flops for c in costs),
        moved_bytes=sum(c.moved_bytes for c in costs) + more,
        saved_bytes=sum(given),
        saved_sizes=tuple(given),
        workspace_bytes=-(-held[0] // pieces),
        backward_workspace_bytes=-(-max(held) // pieces) + kept + rows + weights + sums,
        weight_sum_bytes=sums,
        cast_bytes=sum(c.cast_bytes for c in costs),
        forward=forward,
        backward_input=(*forward, *backward),
        saved_storages=_outside(tape, region),
    )


def _outside(tape: Tape, region: RowRegion) -> frozenset[int]:
    return frozenset(tape.storage(o.slot) for o in region.operands if isinstance(o, Ref))


def _weight_bytes(region: RowRegion) -> tuple[int, int]:
    """Returns the bytes of gradients of the product's weights: of one piece, and of the sum over all."""
    named = dict(region.walked.model.named_parameters(remove_duplicate=False))
    cast = {name: dtype for i in region.instructions for name, dtype in i.casts if dtype is not None}
    names = [o.name for o in region.operands if isinstance(o, Weight) and o.name in named]
    sizes = {name: prod(named[name].shape) for name in names if named[name].requires_grad}
    own = sum(n * cast.get(name, named[name].dtype).itemsize for name, n in sizes.items())
    return own, sum(n * max(4, cast.get(name, named[name].dtype).itemsize) for name, n in sizes.items())


def _repeated(works: Iterable[Work], pieces: int, more_bytes: int) -> tuple[Work, ...]:
    """Returns the works in pieces: so many launches, and the bytes that every further piece reads again."""
    made: list[Work] = []
    for work in works:
        again = more_bytes if work.flops and not made else 0
        update = {"launches": work.launches * pieces, "moved_bytes": work.moved_bytes + again}
        made.append(work.model_copy(update=update))
    return tuple(made)
