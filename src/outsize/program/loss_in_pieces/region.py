"""Problem: which instructions between the last product of a model and its loss can be run on some rows at a
time, so that the loss is a sum over pieces?

    logits = linear(hidden, W)           hidden (2, T, width): rows [a, b) of each sequence
    shifted = logits.float().view(..)    by rows
    loss = cross_entropy(shifted, y)     the sum over rows / the number of targets: both add up over pieces

The rules are those of ranks that hold rows of a sequence (context_parallel/rules.py): a piece is to a device
what a rank is to a group. From the product on, rows are followed; every path has to end in a result that adds
up over rows. Whatever has no rule, reads other rows, draws random numbers or has weights of its own ends the
attempt, and the next smaller one of the last products is tried.

Sources: Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009; Liger Kernel, arXiv
2410.10989, sec. 3.2 (FusedLinearCrossEntropy, chunks of rows). Deviation: derived from a recorded program,
so any loss that adds up over rows is taken, not a cross entropy alone. Complexity: O(instructions) for each
product that is tried. Oracle: tests/parity/test_loss_in_pieces.py, the numbers of the plain loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Final, final

from torch import nn
from torch.nn import functional

from outsize.program.liveness import live
from outsize.program.sharding.context_parallel.calls import OverRows
from outsize.program.sharding.context_parallel.rules import follow_rows
from outsize.program.sharding.products import Product, WalkedModel
from outsize.program.sharding.rank_step import NotPropagated, Operand, RankStep, RuleInput
from outsize.program.sharding.rank_tape import resized_meta
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.sharding.tensor_parallel.calls import turned_linear
from outsize.program.tape import Instruction, Meta, Modes, Ref, Tape, Weight
from outsize.program.tree import leaves

# So many of the last products are tried, the largest first; a loss has one or two heads, which may be smaller
# than the layers before them, and what has weights of its own after it begins no region.
_TRIED: Final = 4
# So many numbers of pieces are tried.
_MORE: Final = 4


@final
@dataclass(frozen=True)
class RowRegion:
    """Describes instructions that turn rows of a value into results that add up over rows.

    `rows` is the value, and `dim` the dim of its rows. `operands` are all tensors that come from outside,
    values before weights; `exits` are the slots of the results, which add up over rows unless the region
    `keeps_rows`. `instructions` are as the rules know them; `products`, by their index, are run as functions
    of their weights. `metas` are those of the tape.
    """

    walked: WalkedModel
    instructions: tuple[Instruction, ...]
    metas: Sequence[Meta]
    rows: Ref
    dim: int
    operands: tuple[Operand, ...]
    exits: tuple[int, ...]
    products: Mapping[int, Product]
    keeps_rows: bool = False

    @property
    def size(self) -> int:
        """Returns the number of rows."""
        return self.metas[self.rows.slot].shape[self.dim]

    @property
    def modes(self) -> Modes:
        """Returns the modes under which the region is called: those of its product."""
        return self.instructions[0].modes

    def divided(self, shares: Mapping[int, Share], ranks: int) -> DividedRegion:
        """Returns how `ranks` pieces, or ranks, compute the region with operands that are divided so.

        Raises NotPropagated.
        """
        known, steps = dict(shares), dict[int, RankStep]()
        cut: dict[Operand, Share] = {}
        for instruction in self.instructions:
            step = row_step(self.walked, self.walked.asked(instruction, self.metas, known), ranks)
            for operand, share in step.cut.items():
                if cut.setdefault(operand, share) != share:
                    raise NotPropagated("it is read by different rows")
            steps[instruction.index] = step
            pairs = zip(instruction.defines(), step.out, strict=True)
            known.update((slot, share) for slot, share in pairs if share is not None)
        whole = {
            leaf
            for i in self.instructions
            for leaf in operands_of(i)
            if leaf in cut and leaf not in steps[i.index].cut
        }
        if whole:
            raise NotPropagated("an operand is read whole and by rows")
        return DividedRegion(self, steps, known, cut)

    def in_pieces(self, pieces: int) -> DividedRegion:
        """Returns how the region is computed in `pieces` pieces, or in a few more or less.

        A loss that leaves out the last token wants a number of pieces in which that moves no row to another
        piece, and there are no pieces without rows. Raises NotPropagated.
        """
        most = max(1, min(pieces, self.size))
        counts = filter(self._is_full, (*range(most, most + _MORE), *range(most - 1, 0, -1)))
        for count in islice(counts, _MORE):
            try:
                divided = self.divided({self.rows.slot: Share(self.dim, (self.size,))}, count)
            except NotPropagated:
                continue
            return replace(divided, count=count)
        raise NotPropagated("no number of pieces keeps its rows apart")

    def _is_full(self, count: int) -> bool:
        share = Share(self.dim, (self.size,))
        return RankPosition(count - 1, count).size(share) > 0


@final
@dataclass(frozen=True)
class DividedRegion:
    """Holds the steps of a region's instructions, by index, how all its slots are divided, and which operands
    are cut.
    """

    region: RowRegion
    steps: Mapping[int, RankStep]
    shares: Mapping[int, Share]
    cut: Mapping[Operand, Share]
    count: int = 1

    def at(self, place: RankPosition) -> RowRegion:
        """Returns the region of one rank, or piece: its own sizes, and operands of its rows."""
        region = self.region
        metas = list(region.metas)
        cut = {leaf.slot: share for leaf, share in self.cut.items() if isinstance(leaf, Ref)}
        for slot, share in {**self.shares, **cut}.items():
            metas[slot] = resized_meta(metas[slot], share.dim, place.size(share))
        own = []
        for instruction in region.instructions:
            step = self.steps[instruction.index]
            args, kwargs = instruction.args, instruction.kwargs
            if step.rewrite is not None:
                args, kwargs = step.rewrite(place)
            own.append(replace(instruction, args=args, kwargs=kwargs))
        return replace(region, instructions=tuple(own), metas=metas)


def find_region(tape: Tape, model: nn.Module) -> RowRegion | None:
    """Returns the region with the largest product whose every path to the loss adds up over rows; None where
    there is none, or no loss.
    """
    if tape.loss is None:
        return None
    known = WalkedModel(model)
    alive = live(tape, {tape.loss.slot})
    products = list[tuple[int, Instruction, Product]]()
    for instruction in tape.instructions:
        product = known.product(instruction)
        is_plain = product is not None and not product.is_scaled and product.stored is None
        if product is not None and is_plain and alive[instruction.index]:
            size = prod(tape.metas[next(iter(instruction.defines()))].shape)
            products.append((size, instruction, product))
    last = sorted(products, key=lambda each: each[1].index)[-_TRIED:]
    for _, instruction, product in sorted(last, key=lambda each: (-each[0], -each[1].index)):
        found = _region_from(tape, known, alive, instruction, product)
        if found is not None:
            return found
    return None


@final
@dataclass(frozen=True)
class _Start:
    """Is the product that a region begins with; its rows are those of `dim`, in so many pieces."""

    instruction: Instruction
    product: Product
    dim: int
    pieces: int


def _region_from(
    tape: Tape,
    model: WalkedModel,
    alive: Sequence[bool],
    instruction: Instruction,
    product: Product,
) -> RowRegion | None:
    shape = tape.metas[product.input.slot].shape
    dims = sorted(range(len(shape) - 1), key=lambda dim: -shape[dim])
    for dim in dims:
        if shape[dim] < 2:
            continue
        for pieces in range(2, 2 + _MORE):
            try:
                return _followed(tape, model, alive, _Start(instruction, product, dim, pieces))
            except NotPropagated:
                continue
    return None


def _followed(
    tape: Tape,
    model: WalkedModel,
    alive: Sequence[bool],
    start: _Start,
) -> RowRegion:
    """Returns the region from a product on. Raises NotPropagated."""
    first, product, dim, pieces = start.instruction, start.product, start.dim, start.pieces
    shares = {product.input.slot: Share(dim, (tape.metas[product.input.slot].shape[dim],))}
    members, exits, made = list[Instruction](), list[int](), set[int]()
    for instruction in tape.instructions[first.index :]:
        reads = made.intersection(instruction.reads())
        if instruction is not first and not (alive[instruction.index] and reads):
            continue
        _insist_on_plain(instruction, first, made, tape)
        # Only what the region itself makes is divided: others may read the same rows whole.
        known = shares if instruction is first else {s: shares[s] for s in reads}
        step = row_step(model, model.asked(instruction, tape.metas, known), pieces)
        members.append(instruction)
        if isinstance(step.call, OverRows) and step.call.adds_rows_up and not any(step.out):
            exits += instruction.defines()
            continue
        if any(share is None for share in step.out):
            raise NotPropagated("it makes a whole value of some rows")
        pairs = zip(instruction.defines(), step.out, strict=True)
        shares.update((slot, share) for slot, share in pairs if share is not None)
        made.update(instruction.defines())
    if not exits:
        raise NotPropagated("no loss adds up over its rows")
    defined = {slot for i in members for slot in i.defines()}
    everything = [leaf for i in members for leaf in operands_of(i)]
    operands = [leaf for leaf in everything if isinstance(leaf, Weight) or leaf.slot not in defined]
    operands += weights_of(product)
    entries = [leaf for leaf in dict.fromkeys(operands) if isinstance(leaf, Ref)]
    read = [leaf for leaf in dict.fromkeys(operands) if isinstance(leaf, Weight)]
    region = RowRegion(
        model, tuple(members), tape.metas, product.input, dim, (*entries, *read), tuple(exits),
        {first.index: product},
    )  # fmt: skip
    _insist_on_order(tape, region, alive)
    region.in_pieces(pieces)
    return region


def _insist_on_plain(instruction: Instruction, first: Instruction, made: set[int], tape: Tape) -> None:
    """Raises NotPropagated where an instruction does more than compute its results of its arguments."""
    storages = {tape.storage(slot) for slot in made}
    if instruction.random or instruction.written_weights or not storages.issuperset(instruction.writes):
        raise NotPropagated("it draws random numbers, or writes elsewhere")
    if instruction is not first and instruction.parameters():
        raise NotPropagated("it has weights")


def _insist_on_order(tape: Tape, region: RowRegion, alive: Sequence[bool]) -> None:
    """Raises NotPropagated where the region cannot be run at the place of its last instruction."""
    first, last = region.instructions[0].index, region.instructions[-1].index
    inside = {i.index for i in region.instructions}
    outside = {tape.storage(leaf.slot) for leaf in region.operands if isinstance(leaf, Ref)}
    for instruction in tape.instructions[first:last]:
        if instruction.index in inside or not alive[instruction.index]:
            continue
        if not outside.isdisjoint(instruction.writes) or not {*region.exits}.isdisjoint(instruction.reads()):
            raise NotPropagated("another instruction comes between")


def row_step(model: WalkedModel, call: RuleInput, ranks: int) -> RankStep:
    """Returns the step of an instruction of a region. Raises NotPropagated."""
    step = follow_rows(call, model.module(call.instruction), ranks)
    attends = isinstance(step.call, OverRows) and not step.call.adds_rows_up
    product = model.product(call.instruction)
    if product is not None and product.is_scaled:
        raise NotPropagated("its scales are of all rows")
    if step.gather or step.dropout is not None or attends:
        raise NotPropagated("it reads other rows")
    if any(isinstance(operand, Weight) for operand in step.cut):
        raise NotPropagated("its weights are divided")
    return step


def run_form(region: RowRegion, instruction: Instruction) -> Instruction:
    """Returns the instruction as it is run: a product as a function of its weights."""
    product = region.products.get(instruction.index)
    if product is None or not instruction.is_leaf:
        return instruction
    names = (product.weight, product.bias)
    weight, bias = (None if name is None else Weight(name, "parameter") for name in names)
    target = turned_linear if product.turned else functional.linear
    return replace(instruction, target=target, args=(instruction.args[0], weight, bias), kwargs={}, casts=())


def weights_of(product: Product) -> list[Weight]:
    """Returns the weights of a product."""
    return [Weight(name, "parameter") for name in (product.weight, product.bias) if name is not None]


def operands_of(instruction: Instruction) -> Iterator[Operand]:
    """Yields the tensors among the arguments of an instruction."""
    everything = leaves((instruction.args, instruction.kwargs))
    return (leaf for leaf in everything if isinstance(leaf, Ref | Weight))
