"""Problem: which values of a tape can each of several ranks hold by rows of the sequence?

    ids (2, T) whole   ->  embedding   ->  rows (2, T / ranks, width)  ->  ...  ->  loss, whole
                           a source: its index is cut

A source is the first module that works on each token by itself: an embedding of an index (samples, tokens),
or a product or norm of (samples, tokens, width), whose argument comes from the inputs. From the sources on,
rows are followed by the rules (rules.py). Tokens are along dim 1 of a source, or along dim 0 where the
model's attention layers say so (`nn.MultiheadAttention` with `batch_first=False`) and dim 1 leads nowhere.
Whole values (masks, positions, shifted labels) are cut where they meet rows. Keys and values are gathered
where attention reads them. Whatever has no rule is refused with its line: a convolution or a recurrence over
tokens is never computed in pieces.

Every rank ends with the whole loss, and its backward begins with 1 / ranks of the gradient. So the gradient
of anything is the sum of what the ranks have for it: rows, a whole value and a weight alike. Gathers add up
gradients on the way back; the gradients of weights are added up once, at the end of a step.

Complexity: O(instructions), one pass. Oracle: tests/dist/test_context.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

from torch import nn

from outsize.axes.context import CONTEXT
from outsize.errors import BadOption
from outsize.policies.slices import SLICES
from outsize.program.liveness import live
from outsize.program.sharding.context_parallel.rules import follow_rows, is_causal, looks_up_by_row
from outsize.program.sharding.opaque_modules import runs_own_code, works_by_vector
from outsize.program.sharding.products import WalkedModel
from outsize.program.sharding.rank_step import NotPropagated, RankStep, RuleInput
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction, Ref, Tape


@final
@dataclass(frozen=True)
class SequenceRows:
    """Holds what the walk has found: how slots are divided, the steps of instructions that have rows, and the
    tokens of the longest sequence."""

    shares: Mapping[int, Share]
    steps: Mapping[int, RankStep]
    sources: tuple[str, ...]
    tokens: int


@final
@dataclass(frozen=True, kw_only=True)
class Holders:
    """Says who holds rows: ranks, at the same time, or slices of a sequence, one after the other.

    `mirrors`: under a causal mask each has an early and a late block. `typed` says what a user types for so
    many, and `instead` what else; the others are words of errors.
    """

    name: str
    title: str
    part: str
    typed: Callable[[int], str]
    instead: str
    mirrors: bool

    def refusal(self, instruction: Instruction, reason: str) -> BadOption:
        """Returns the error of an instruction that cannot be computed so."""
        return BadOption(
            f"{instruction.name} cannot be computed by rows of the sequence: {reason}",
            numbers=instruction.where,
            next_step=f"{self.typed(1)}{self.instead}",
        )


RANKS: Final = Holders(
    name=CONTEXT.name,
    title=CONTEXT.title,
    part="a rank",
    typed=CONTEXT.typed,
    instead=", or another axis (dp_replicate, tp, pp)",
    mirrors=True,
)
IN_SLICES: Final = Holders(
    name=SLICES.name, title=SLICES.title, part=SLICES.part, typed=SLICES.typed, instead="", mirrors=False
)


def by_rows(tape: Tape, model: nn.Module, ranks: int, holders: Holders = RANKS) -> SequenceRows:
    """Returns how `ranks` ranks, or other holders, hold the values of a tape by rows.

    Raises BadOption where something cannot be computed by rows, or where no sequence is found.
    """
    modules = dict(model.named_modules())
    attention = (modules[i.target] for i in tape.instructions if isinstance(i.target, str))
    is_tokens_first = any(type(m) is nn.MultiheadAttention and not m.batch_first for m in attention)
    refusals: list[tuple[int, BadOption]] = []
    for dim in (1, 0) if is_tokens_first else (1,):
        walk = _RowWalk(tape, model, ranks, dim, holders)
        try:
            return walk.run()
        except BadOption as refusal:
            refusals.append((walk.visited, refusal))
    raise max(refusals, key=lambda each: each[0])[1]


@final
class _RowWalk:
    def __init__(self, tape: Tape, model: nn.Module, ranks: int, dim: int, holders: Holders) -> None:
        self._dim, self._holders, self.visited = dim, holders, 0
        self._tape, self._ranks, self._model = tape, ranks, WalkedModel(model)
        required = {*tape.output_slots(), *((tape.loss.slot,) if tape.loss is not None else ())}
        self._alive = live(tape, required)
        self._copies: dict[int, int] = {}  # The first instruction that copies a storage.
        self._writes: list[tuple[int, Instruction]] = []
        self._from_inputs = {slot for slot in tape.inputs if tape.metas[slot].shape}
        self._shares: dict[int, Share] = {}
        self._steps: dict[int, RankStep] = {}
        self._sources: list[str] = []
        self._tokens, self._too_short = 0, 0
        self._mirrors = holders.mirrors and any(
            is_causal(i) for i in tape.instructions if self._alive[i.index]
        )

    def run(self) -> SequenceRows:
        """Returns what was found. Raises BadOption."""
        for instruction in self._tape.instructions:
            self.visited = instruction.index
            self._visit(instruction)
        return self._result()

    def _visit(self, instruction: Instruction) -> None:
        """Follows one instruction."""
        call = self._model.asked(instruction, self._tape.metas, self._shares)
        if not self._from_inputs.isdisjoint(instruction.reads()):
            self._from_inputs.update(instruction.defines())
        if not self._alive[instruction.index]:
            return
        module = self._model.module(instruction)
        if call.divided():
            step = self._followed(call, module)
        elif (share := self._source(call, module)) is not None:
            operand = instruction.args[0]
            self._sources.append(instruction.name)
            self._tokens = max(self._tokens, share.size)
            step = call.same(share, cut={operand: share})
        else:
            return
        self._note_memory(instruction, step)
        self._steps[instruction.index] = step
        pairs = zip(instruction.defines(), step.out, strict=True)
        self._shares.update((slot, share) for slot, share in pairs if share is not None)

    def _followed(self, call: RuleInput, module: nn.Module | None) -> RankStep:
        instruction = call.instruction
        try:
            if instruction.written_weights:
                raise NotPropagated("it writes buffers")
            return follow_rows(call, module, self._ranks)
        except NotPropagated as reason:
            raise self._holders.refusal(instruction, str(reason)) from reason

    def _source(self, call: RuleInput, module: nn.Module | None) -> Share | None:
        """Returns how the first argument is divided, where an instruction begins rows."""
        operand = call.args[0] if call.args else None
        if not isinstance(operand, Ref) or not call.instruction.parameters():
            return None
        shape, computed = call.shape(operand), operand.slot in self._from_inputs
        if len(shape) < 2 or (module is not None and runs_own_code(module)):
            return None
        if isinstance(module, nn.Embedding):
            # An index of positions has one row for all samples; one of pairs of positions is no sequence.
            fits = len(shape) == 2 and (computed or shape[1 - self._dim] == 1) and looks_up_by_row(module)
        elif len(shape) != 3 or not computed or call.instruction.written_weights:
            return None
        else:
            product = self._model.product(call.instruction)
            fits = product is not None or (module is not None and works_by_vector(module, shape, self._dim))
        tokens = shape[self._dim]
        share = self._share_of(tokens)
        places = (RankPosition(rank, self._ranks) for rank in range(self._ranks))
        if fits and not all(place.size(share) for place in places):
            self._too_short = max(self._too_short, tokens)
            return None
        return share if fits else None

    def _share_of(self, tokens: int) -> Share:
        """Returns how a sequence is divided: under a causal mask each rank has an early and a late block, so
        that all ranks compute as much.
        """
        if not self._mirrors or tokens < 2 * self._ranks:
            return Share(self._dim, (tokens,))
        return Share(self._dim, (tokens - tokens // 2, tokens // 2), mirrored=True)

    def _note_memory(self, instruction: Instruction, step: RankStep) -> None:
        """Notes which memory is copied, as rows or whole, and which is written in place."""
        for operand in (*step.gather, *step.cut):
            if isinstance(operand, Ref):
                self._copies.setdefault(self._tape.storage(operand.slot), instruction.index)
        self._writes += [(storage, instruction) for storage in instruction.writes]

    def _insist_on_memory(self) -> None:
        """Raises BadOption where a write in place comes after a copy, which would miss it."""
        for storage, instruction in self._writes:
            if self._copies.get(storage, instruction.index + 1) <= instruction.index:
                raise self._holders.refusal(instruction, "it writes in place what is read elsewhere")

    def _result(self) -> SequenceRows:
        """Returns what was found. Raises BadOption where nothing is divided."""
        self._insist_on_memory()
        who = self._holders
        if not self._sources and self._too_short:
            tokens = self._too_short
            fitting = (n for n in range(self._ranks, 0, -1) if -(-tokens // n) * (n - 1) < tokens)
            raise BadOption(
                f"the sequences are too short for {who.title}: {who.part} would have no token",
                numbers=f"{tokens} tokens in blocks of {-(-tokens // self._ranks)}, {who.name}={self._ranks}",
                next_step=who.typed(next(fitting)),
            )
        if not self._sources:
            raise BadOption(
                f"{who.title} finds no sequence in this model: no embedding of (samples, tokens), "
                "and no product or norm of (samples, tokens, width)",
                numbers=f"{who.name}={self._ranks}",
                next_step=f"{who.typed(1)}{who.instead}",
            )
        return SequenceRows(self._shares, self._steps, tuple(self._sources), self._tokens)
