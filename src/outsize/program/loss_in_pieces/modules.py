"""Problem: which modules of a model work on each row by itself and are wide inside, so that some rows can be
run at a time?

    x (2, T, 4096)  ->  gate, up (2, T, 14336)  ->  silu(gate) * up  ->  down  ->  y (2, T, 4096)

A module that holds others counts where its instructions follow one another, read one value and the module's
weights alone, are followed by the rules of rows, and return rows of one value. Of modules within one another
the outermost counts. What it makes inside has to be larger than what goes in and out.

Source: tiled MLPs of Arctic Long Sequence Training, arXiv 2506.13996, sec. 3.2. Deviation: found on the
recorded program, whatever its modules are called. Complexity: O(instructions x depth of modules). Oracle:
tests/parity/test_loss_in_pieces.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from torch import nn

from outsize.program.liveness import live
from outsize.program.loss_in_pieces.region import RowRegion, operands_of, row_step, weights_of
from outsize.program.sharding.context_parallel.calls import OverRows
from outsize.program.sharding.products import Product, WalkedModel
from outsize.program.sharding.rank_step import NotPropagated
from outsize.program.sharding.share import Share
from outsize.program.tape import Instruction, Ref, Tape, Weight


def wide_modules(tape: Tape, model: nn.Module) -> list[RowRegion]:
    """Returns the regions of a tape's wide modules, in order."""
    finder = _Finder(tape, model)
    found, taken = list[RowRegion](), set[int]()
    for frame, members in finder.frames():
        if taken.isdisjoint(i.index for i in members) and (region := finder.region(frame, members)):
            found.append(region)
            taken.update(i.index for i in members)
    return sorted(found, key=lambda region: region.instructions[0].index)


@final
class _Finder:
    def __init__(self, tape: Tape, model: nn.Module) -> None:
        self._tape, self._model = tape, WalkedModel(model)
        wanted = {tape.loss.slot} if tape.loss is not None else {*tape.output_slots()}
        self._alive = live(tape, wanted)

    def frames(self) -> Iterator[tuple[str, list[Instruction]]]:
        """Yields modules that hold others with their instructions that are needed, outermost first."""
        inside: dict[str, list[Instruction]] = {}
        for instruction in self._tape.instructions:
            frame = instruction.frame
            while frame and self._alive[instruction.index]:
                inside.setdefault(frame, []).append(instruction)
                frame = frame.rpartition(".")[0]
        yield from sorted(inside.items(), key=lambda item: (item[0].count("."), item[1][0].index))

    def region(self, frame: str, members: list[Instruction]) -> RowRegion | None:
        """Returns the region of a module; None where it does more than work on its rows."""
        between = self._tape.instructions[members[0].index : members[-1].index]
        others = {i.index for i in between if self._alive[i.index]} - {i.index for i in members}
        defined = {slot for i in members for slot in i.defines()}
        entries = {s for i in members for s in i.reads()} - defined
        exits = self._read_outside(members, defined)
        if others or len(entries) != 1 or len(exits) != 1 or not frame:
            return None
        (entry,), (exit_slot,) = entries, exits
        shape, after = self._tape.metas[entry].shape, self._tape.metas[exit_slot].shape
        dims = [dim for dim in range(len(shape) - 1) if shape[dim] > 1 and after[:-1] == shape[:-1]]
        for dim in sorted(dims, key=lambda dim: -shape[dim]):
            try:
                region = self._followed(members, Ref(entry), dim, exit_slot)
            except NotPropagated:
                continue
            return region if self._is_wide(region) else None
        return None

    def _read_outside(self, members: list[Instruction], defined: set[int]) -> set[int]:
        inside = {i.index for i in members}
        rest = (i for i in self._tape.instructions if self._alive[i.index] and i.index not in inside)
        read = {slot for i in rest for slot in i.reads()}
        loss = {self._tape.loss.slot} if self._tape.loss is not None else {*self._tape.output_slots()}
        return defined & (read | loss)

    def _followed(self, members: list[Instruction], rows: Ref, dim: int, exit_slot: int) -> RowRegion:
        shares = {rows.slot: Share(dim, (self._tape.metas[rows.slot].shape[dim],))}
        products, storages = dict[int, Product](), set[int]()
        for instruction in members:
            writes_outside = instruction.written_weights or not storages.issuperset(instruction.writes)
            if instruction.random or writes_outside:
                raise NotPropagated("it draws random numbers, or writes elsewhere")
            step = row_step(self._model, self._model.asked(instruction, self._tape.metas, shares), 2)
            if isinstance(step.call, OverRows) or any(share is None for share in step.out):
                raise NotPropagated("it makes a whole value of some rows")
            product = self._model.product(instruction)
            if product is not None:
                products[instruction.index] = product
            elif instruction.is_leaf and instruction.parameters():
                raise NotPropagated("it is a module with weights")
            pairs = zip(instruction.defines(), step.out, strict=True)
            shares.update((slot, share) for slot, share in pairs if share is not None)
            storages |= {self._tape.storage(slot) for slot in instruction.defines()}
        if len(products) < 2 or shares[exit_slot].dim != dim:
            raise NotPropagated("it is one product, or turns its rows")
        named = [leaf for i in members for leaf in operands_of(i) if isinstance(leaf, Weight)]
        named += [weight for product in products.values() for weight in weights_of(product)]
        operands = (rows, *dict.fromkeys(named))
        return RowRegion(
            self._model, tuple(members), self._tape.metas, rows, dim, operands, (exit_slot,),
            products, keeps_rows=True,
        )  # fmt: skip

    def _is_wide(self, region: RowRegion) -> bool:
        metas, (exit_slot,) = self._tape.metas, region.exits
        sizes = {metas[s].storage: metas[s].size_bytes for i in region.instructions for s in i.defines()}
        outside = metas[region.rows.slot].size_bytes + metas[exit_slot].size_bytes
        return sum(sizes.values()) > 2 * outside
