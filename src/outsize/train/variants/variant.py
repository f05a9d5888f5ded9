"""Variants: the programs of one input signature, recorded when first met and kept.

A tape is valid for a signature (shapes, dtypes, Python values, train / eval, grad and autocast modes) and
for its guards (Python decisions on input values). One of other lengths than those that were recorded is made
of them (dynamic_shapes.py), and its stages run the same functions with other numbers. The plan says by unit
names which stage owns what, so every variant is cut the same way. Guards are evaluated on every microbatch
before it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Final, final

import torch
from torch import Tensor, nn

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.guards.check import ChangedRead, ReadGuards
from outsize.capture.guards.symbolic_numbers import PlantedNumbers, is_number
from outsize.capture.recording.fallbacks import LossFn, TapeOptions, record
from outsize.capture.recording.leaf_rule import KnownBlocks
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.policies.slices import most_slices
from outsize.program.garbage import uncollected
from outsize.program.lengths import Lengths
from outsize.program.loss_in_pieces.rewrite import in_pieces
from outsize.program.python_reads import LOSS, PythonRead
from outsize.program.replaying.modes import current_modes
from outsize.program.sharding.context_parallel.slices import in_order, slice_tapes
from outsize.program.tape import Tape
from outsize.program.weights.of_loss import with_loss
from outsize.run.collectives.sequence_slices import SequenceKeeper, SequenceSlice
from outsize.run.collectives.tensor_parallel import whole_shapes
from outsize.run.stage.boundary import backward_edges, forward_edges
from outsize.run.stage.cut import Cut, CutAtLengths, cut
from outsize.run.stage.to_device import TapeHome
from outsize.train.batch.batch import Batch, evaluating_loss
from outsize.train.batch.loss_terms import ratios_of, with_ratios
from outsize.train.batch.loss_trials import LossTrial
from outsize.train.batch.loss_weights import FROM_LOSS, Counting, LossShares
from outsize.train.ranks.context_parallel import ContextRanks
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.variants.changed_values import ChangedValues
from outsize.train.variants.dynamic_shapes import DynamicShapes, FoundTape
from outsize.train.variants.input_guards import InputGuards
from outsize.train.variants.instruction_owners import PlacedWeights, instruction_owners
from outsize.train.variants.known_tapes import KnownTapes
from outsize.train.variants.lru import LruCache
from outsize.train.variants.number_inputs import another_number, with_number_inputs

KEPT = 32


@final
@dataclass(frozen=True)
class Variant:
    """A captured signature, cut by the plan. `number` counts variants in the order of their making; `home`
    is the device that the tape was made for, where stages have others.

    Where its sequences go through the stages in slices, `slices` are the variants of these, first to last,
    each of which says which `slice` it is.
    """

    number: int
    captured: Captured
    cut: Cut
    guards: InputGuards
    shares: LossShares
    reads: ReadGuards
    home: torch.device | None = None
    slices: tuple[Variant, ...] = ()
    slice: SequenceSlice | None = None

    @property
    def units(self) -> tuple[Variant, ...]:
        """The programs that the schedule of a microbatch runs: its slices, or its one program."""
        return self.slices or (self,)

    @property
    def tape(self) -> Tape:
        """The recorded program, of one device."""
        return self.captured.tape

    def inputs(self, part: Batch, ratios: Sequence[float]) -> list[Tensor]:
        """The inputs of the stages' programs: tensors of the microbatch, and ratios of the loss's terms."""
        tensors = part.tensors()
        return [*tensors, ratios_of(ratios, tensors[0].device)] if self.shares.sums else tensors

    @cached_property
    def loss_dtype(self) -> torch.dtype | None:
        """None when there is no loss."""
        loss = self.tape.loss
        return self.tape.metas[loss.slot].dtype if loss is not None else None

    @property
    def buffers_read_first(self) -> frozenset[str]:
        """The buffers that guards and the shares of microbatches read before a step, on every rank."""
        return self.guards.buffers | self.shares.buffers

    @cached_property
    def wiring(self) -> Hashable:
        """Tells what travels between which stages, and whether a backward comes to the outputs; variants that
        agree in it run in one schedule.
        """
        boundaries = self.cut.boundaries
        tied = frozenset((b.weight, b.producer, b.consumers) for b in boundaries if b.weight is not None)
        loss = tuple(p.stage for p in self.cut.programs if p.has_loss)
        outputs = (self.cut.tape.metas[slot] for slot in self.cut.programs[-1].outputs)
        edges = forward_edges(boundaries), backward_edges(boundaries)
        trained = any(meta.requires_grad for meta in outputs)
        return *edges, tied, loss, self.loss_dtype, trained, len(self.slices)


@final
@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """How the variants of a model are recorded, besides what its plan says.

    `counting` says by what a microbatch weighs: samples, tokens, or 1. `home` says which device
    tapes are made for, where stages have others. `tensor` has this rank's part of the weights under tensor
    parallelism, `context` its rows of sequences under context parallelism. `most` variants stay. `known` are
    tapes that were recorded before.
    """

    counting: Counting = FROM_LOSS
    home: TapeHome | None = None
    tensor: DividedWeights | None = None
    context: ContextRanks | None = None
    most: int = KEPT
    known: KnownTapes = field(default_factory=KnownTapes)


_DEFAULTS: Final = RecordingOptions()
_FORMS: Final = 16


@final
@dataclass(frozen=True, slots=True)
class _Form:
    """Holds what the variants of one program at several lengths share: all but their numbers and shapes.

    `placed` says where weights lived when the program was cut.
    """

    placed: PlacedWeights
    captured: Captured
    cut: CutAtLengths
    shares: LossShares
    reads: ReadGuards

    def at(self, found: FoundTape, lengths: Lengths, home: torch.device | None) -> Variant:
        """Returns the variant of a tape with these lengths; its number is not known yet."""
        captured, made = replace(self.captured, tape=found.tape), self.cut.at(found.tape, lengths)
        return Variant(0, captured, made, found.guards, self.shares.at(found.tape), self.reads, home)


@final
@dataclass(slots=True)
class ProgramChange:
    """Whether a call runs other programs than the one before.

    Programs that are new, or those of other Python values, count, and so does another number of microbatches;
    shapes that were met before do not. `values` are the reads that have changed, each with the stages whose
    programs follow from it. `live` are the modules that run live.
    """

    happened: bool = False
    values: list[tuple[ChangedRead, frozenset[int]]] = field(default_factory=list)
    live: frozenset[str] = frozenset()


@final
class Variants:
    """Holds the variants of a model that were used last; the oldest are dropped."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFn | None,
        options: RecordingOptions = _DEFAULTS,
        changes: ChangedValues | None = None,
    ) -> None:
        self._model, self._plan = with_loss(model, loss_fn), plan
        self._loss_fn, self._options = loss_fn, options
        self._known: OrderedDict[Hashable, list[Variant]] = OrderedDict()
        self._made = 0
        self.changes = changes or ChangedValues()
        self.change = ProgramChange()  # of the last call of `find_each`
        self._placed = PlacedWeights()  # Where programs that are made from now on find their weights.
        self._last: Variant | None = None
        self._shapes = DynamicShapes(self._model)
        self._forms = LruCache[Hashable, _Form](_FORMS)
        self._blocks = LruCache[Hashable, KnownBlocks](_FORMS)  # Which blocks are copies of each other.
        self._state = ""  # of the model, in the call that looks for variants
        self._counts: dict[bool, int] = {}  # microbatches of the last step, and of the last evaluation

    def place(self, weights: PlacedWeights) -> None:
        """Says where programs that are made from now on find their weights."""
        self._placed = weights

    def find(self, part: Batch, *, outputs: bool, state: int = 0) -> Variant:
        """The variant under which this microbatch runs; recorded if it is new.

        `state` is the model's number by `StructureVersions`, where the user may change it between calls.
        """
        return self.find_each([part], outputs=outputs, state=state)[0]

    def find_each(self, parts: Sequence[Batch], *, outputs: bool, state: int = 0) -> list[Variant]:
        """The variants of a step's microbatches; what Python read is compared once for all of them."""
        checked: dict[int, bool] = {}
        self._state = f"{state}{outputs}"
        self.change = ProgramChange(happened=len(parts) != self._counts.get(outputs))
        self._counts[outputs] = len(parts)
        found = [self._find(part, f"{state}{outputs}", checked, outputs=outputs) for part in parts]
        self._last = found[-1] if found else self._last
        self._options.known.drop()
        self.change.live = self.changes.live
        return found

    def _find(self, part: Batch, state: str, checked: dict[int, bool], *, outputs: bool) -> Variant:
        key = part.signature(), self._model.training, state, current_modes()
        same = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        stale: Variant | None = None
        for place, variant in enumerate(same):
            if not variant.guards.hold(part):
                continue
            if variant.number not in checked:
                checked[variant.number] = variant.reads.hold()
            if checked[variant.number]:
                # The last one used comes first: its values are most likely still the same.
                same.insert(0, same.pop(place))
                if stale is not None:
                    self._note_change(stale)
                return variant
            stale = stale or variant
        self._note_change(stale or self._last)
        if stale is not None:
            self.changes.note(stale.reads.changed(), partial(self._stages_of, stale.captured))
        with uncollected():
            variant = self._make(part, outputs)
        same.insert(0, variant)
        return variant

    def _note_change(self, before: Variant | None) -> None:
        """Notes that a call runs another program than `before`."""
        self.change.happened = True
        changed = () if before is None or before.reads.hold() else before.reads.changed()
        self.change.values += [(each, self._stages_reading(each.read, before)) for each in changed if before]

    def _stages_reading(self, read: PythonRead, variant: Variant) -> frozenset[int]:
        """The stages that follow from a value: those of the modules that read it, or all."""
        stages = {LOSS: {p.stage for p in variant.cut.programs if p.has_loss}, "": set[int]()}
        for frame in read.frames - stages.keys():
            stages[frame] = self._stages_of(variant.captured, frame)
        everywhere = not all(stages[frame] for frame in read.frames) or not read.frames
        found = range(len(self._plan.stages)) if everywhere else chain(*(stages[f] for f in read.frames))
        return frozenset(found)

    def __len__(self) -> int:
        return sum(len(same) for same in self._known.values())

    def trim(self) -> list[int]:
        """Drops the oldest beyond those that are kept, and returns their numbers.

        Called after a step, since one that has more variants than are kept needs all of them until its end.
        """
        dropped: list[int] = []
        while len(self) > self._options.most:
            key, same = next(iter(self._known.items()))
            last = same.pop()
            dropped += [unit.number for unit in (*last.slices, last)]
            if not same:
                del self._known[key]
        return dropped

    def _tape(self, part: Batch, loss_fn: LossFn | None) -> FoundTape:
        """Returns the tape of a microbatch: recorded, or that of other lengths with its lengths put in."""
        return self._shapes.tape(
            part, self._kind(loss_fn), self._home(), partial(self._record, part, loss_fn)
        )

    def _kind(self, loss_fn: LossFn | None) -> Hashable:
        """Returns what a recording depends on besides the batch and the values that are read."""
        return self._model.training, self._state, current_modes(), id(loss_fn), self.changes.live

    def _record(self, part: Batch, loss_fn: LossFn | None, numbers: PlantedNumbers | None = None) -> Tape:
        kind = self._kind(loss_fn)
        known = self._known_tape(part, loss_fn) if numbers is None else None
        if known is not None:
            self._blocks.put(kind, self._options.known.blocks)
            return known
        blocks = self._blocks.get(kind, KnownBlocks)
        options = TapeOptions(self._home(), self.changes.live, numbers, blocks=blocks)
        try:
            return record(self._model, part.args, part.kwargs, loss_fn, part.target, options)
        finally:
            blocks.recorded.clear()  # Their reads are gone, so no recording of an engine uses them.

    def _known_tape(self, part: Batch, loss_fn: LossFn | None) -> Tape | None:
        """Returns the tape of a microbatch that was recorded before; None where this rank's would be another
        one, or there is none.
        """
        options = self._options
        is_whole = options.tensor is None and options.context is None
        if not is_whole or self._home() is not None or self.changes.live or loss_fn is not self._loss_fn:
            return None
        return options.known.take(part, self._model)

    def output_shapes(self, part: Batch) -> list[torch.Size]:
        """The shapes of the model's outputs for a microbatch, which is recorded for them alone."""
        tensor = self._options.tensor
        with whole_shapes(self._model), nullcontext() if tensor is None else tensor.whole():
            tape = self._tape(part, None).tape
        return [torch.Size(tape.metas[slot].shape) for slot in dict.fromkeys(tape.output_slots())]

    def _home(self) -> torch.device | None:
        return None if self._options.home is None else self._options.home.now()

    def _stages_of(self, captured: Captured, fqn: str) -> set[int]:
        """The stages that have instructions of this module."""
        owners = zip(captured.tape.instructions, self._owners(captured), strict=True)
        return {owner for i, owner in owners if f"{i.name}.".replace(":", ".").startswith(f"{fqn}.")}

    def _owners(self, captured: Captured) -> list[int]:
        trained = frozenset(name for name, p in self._model.named_parameters() if p.requires_grad)
        return instruction_owners(self._plan, captured, self._placed, trained)

    def _make(self, part: Batch, outputs: bool) -> Variant:
        loss_fn = evaluating_loss(self._loss_fn, part) if outputs else self._loss_fn
        tensor, home = self._options.tensor, self._home()
        with whole_shapes(self._model), nullcontext() if tensor is None else tensor.whole():
            found = self._tape(part, loss_fn)
            form = self._forms.find((found.dynamic, outputs))
            if form is not None and form.placed is self._placed and found.lengths is not None:
                return self._numbered(form.at(found, found.lengths, home))
            tape = found.tape
            # The loss's own program, in one piece, says what it was divided by.
            planned = tape if outputs else self._in_pieces(tape)
            captured = build_graph(planned, self._model)
            tape = self._with_inputs(tape, part, loss_fn)
            planned = tape if outputs else self._in_pieces(tape)
            captured = replace(captured, tape=planned)
            own = planned if self._options.context is None else self._options.context.local(planned)
            is_sliced = self._plan.slices > 1 and not outputs
            each, keeper = self._slices_of(own) if is_sliced else ((own,), None)
            each = each if tensor is None else tuple(map(tensor.local, each))
            own = each[-1]  # Of slices it is the last one whose sums are whole.
        owners = self._owners(captured)
        owners = [owners[instruction.origin] for instruction in own.instructions]
        shares = LossShares(
            tape,
            self._model,
            self._options.counting,
            LossTrial(loss_fn, part, lambda other: self._tape(other, loss_fn).tape, home),
            home,
            own,
        )
        reads = ReadGuards(tape.reads, tape.decisions)
        cut_tape = partial(
            cut,
            model=self._model,
            owners=owners,
            outputs=outputs,
            stages=len(self._plan.stages),
            homes=self._placed.homes,
        )
        at_any_length = own is found.tape and not is_sliced
        if found.dynamic is not None and at_any_length and shares.holds_at_all_lengths:
            followed = found.dynamic.followed
            if shares.sums:
                followed = with_ratios(followed, shares.sums, followed, shares.ratios)
            base = cut_tape(followed)
            cuts = CutAtLengths(base, found.dynamic.followed)
            form = _Form(self._placed, captured, cuts, shares, reads)
            self._forms.put((found.dynamic, outputs), form)
        if shares.sums:
            weighing = partial(with_ratios, tape, shares.sums, count=shares.ratios)
            each = tuple(map(weighing, each))
        guards = found.guards if tape is found.tape else InputGuards(tape, self._model, home)
        cuts = [*map(cut_tape, each)]
        variant = Variant(0, captured, cuts[-1], guards, shares, reads, home)
        numbered = self._numbered(variant)
        return numbered if keeper is None else self._in_slices(numbered, cuts, keeper)

    def _slices_of(self, tape: Tape) -> tuple[tuple[Tape, ...], SequenceKeeper | None]:
        """Returns the tapes of the slices of a step, as many as the plan has or as divide its tokens, with
        what they share. A batch whose program is not computed in order, as with a mask, goes whole.
        """
        with suppress(BadOption):
            count = most_slices(in_order(tape, self._model, 2).tokens, self._plan.slices)
            if count > 1:
                keeper = SequenceKeeper(count)
                return slice_tapes(tape, self._model, count, keeper.group), keeper
        return (tape,), None

    def _in_slices(self, variant: Variant, cuts: Sequence[Cut], keeper: SequenceKeeper) -> Variant:
        """Returns the variant with its slices, whose numbers are below zero: ranks number what they record in
        one order, and slices are no recordings.
        """
        first = 1 + variant.number * self._plan.slices
        slices = (
            replace(variant, number=-first - at, cut=made, slice=SequenceSlice(at, keeper))
            for at, made in enumerate(cuts)
        )
        return replace(variant, slices=tuple(slices))

    def _numbered(self, variant: Variant) -> Variant:
        self._made += 1
        return replace(variant, number=self._made - 1)

    def _in_pieces(self, tape: Tape) -> Tape:
        return in_pieces(tape, self._model, self._plan.loss_pieces, self._plan.module_pieces)

    def _with_inputs(self, tape: Tape, part: Batch, loss_fn: LossFn | None) -> Tape:
        """Returns the tape with the numbers that keep changing as inputs, as far as they can be followed."""
        read = {(r.kind, id(r.holder), r.key) for r in tape.reads if is_number(r.value)}
        moving = [number for number in self.changes.moving.values() if number.place.identity() in read]
        if not moving:
            return tape
        now = {number.place: number.place.value() for number in moving}
        others = {number.place: another_number(now[number.place], number.former) for number in moving}
        followed = with_number_inputs(tape, now, others, lambda numbers: self._record(part, loss_fn, numbers))
        self.changes.settle(followed.places, now)
        return followed.tape
