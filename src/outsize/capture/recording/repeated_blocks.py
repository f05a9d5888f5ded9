"""Problem: record a model of 80 equal blocks in the time of a few, with the tape of a full recording.

    block 1   recorded
    block 2   recorded; is it block 1 with other names and slots? then the two are proven
    block 3.. not run: the instructions of block 1, renamed

A recording of the same model, at another batch size or with fewer blocks, goes on from there
(`LeafRule.blocks`): of blocks that were proven once the first alone is recorded, and a block whose call had
the same key before is not run at all, unless it is given objects.

Calls are compared when their keys are equal: modules built the same (module_equality.py), weights of the same
names and metas, arguments of the same metas and aliasing, all in the same state to the cost meter (saved
before? used before?), called from the same line. Attributes in which blocks differ do not matter if no code
reads them, or only as the index of what it fills in an argument: block 7 puts its keys into
`cache.layers[7]`. A block is run each time when it decides on values, stores state, has hooks, draws from
Python's generators, writes into its arguments, mentions tensors that are not its own, or returns views. Of
the leaves that retries make, a copy may have those that write only into what they make anew at each call.

Complexity: O(instructions) per copy, no op is run. Oracle:
tests/unit/capture/recording/test_repeated_blocks.py compares with tapes for which every block was run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from outsize.capture.costs.meter import CostMeter
from outsize.capture.fakes.fake_model import FakeModel, fake_of, is_fake
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.symbolic_numbers import has_symbolic
from outsize.capture.recording.intercept import inside_transform, on_real_tensors
from outsize.capture.recording.leaf_rule import LeafRule
from outsize.capture.recording.module_equality import Attribute, Kinds, Log, frozen, watched
from outsize.capture.recording.slots import Slots
from outsize.program.objects import ABSENT, ITEM, Path, Scope, Step, apply, diff, fits, look_up, snapshot
from outsize.program.python_reads import NumberDecision, NumberInput, SizeOf
from outsize.program.replaying.modes import current_modes
from outsize.program.source_line import calling_line
from outsize.program.tape import Cost, Instruction, Meta, Ref, Weight
from outsize.program.tree import leaves, map_leaves

Footprint = Callable[[], Any]
_SCOPE = Scope()
Read = tuple[str, str]  # The fields are the module, relative to its block, and the attribute.


@final
class Unlike(Exception):
    """Says that a block cannot be compared or copied."""


@final
@dataclass(frozen=True, slots=True)
class BlockCall:
    """Describes one call of a block; calls that may be copies of each other have the same `key`."""

    fqn: str
    key: Any
    inputs: tuple[Tensor, ...]
    objects: list[Any]  # These other arguments may hold tensors.
    weights: tuple[Tensor, ...]
    slots_of_inputs: tuple[int, ...]
    known: tuple[int | None, ...]  # These are the storage numbers of inputs and weights before the call.
    slots: int  # The number of slots before the call.
    storages: int


@final
@dataclass(slots=True)
class RecordedBlock:
    """Holds what a call has recorded; `marks` are the meter's notes on inputs, weights and results
    after it.
    """

    call: BlockCall
    instructions: list[Instruction]
    metas: list[Meta]
    storages: int
    numbers: tuple[int | None, ...]  # These are the numbers of `known` after the call.
    # These are the slots after the call: a call of Identity gives a tensor another one.
    slots_of_inputs: tuple[int, ...]
    out: Any  # The result includes what the call has put into `objects`.
    put: dict[Path, Any]  # The table maps the path of a filled entry to what was there before.
    marks: list[Any]
    reads: dict[Read, Any]
    indices: dict[Read, Any]  # These attributes are used as indices alone.
    accesses: list[Any]  # These are the Python values that its code has read, for `Notes.repeat`.
    decisions: list[NumberDecision]  # These were made on lengths that are followed.
    proven: bool = False


@final
class RepeatedBlocks:
    """Runs the blocks of one recording, or copies them."""

    def __init__(
        self,
        fakes: FakeModel,
        rule: LeafRule,
        slots: Slots,
        meter: CostMeter,
        tape: list[Instruction],
        notes: Notes,
    ) -> None:
        self._notes = notes
        # The lengths that are followed, if any.
        self._sizes = rule.numbers if rule.numbers is not None and rule.numbers.follows else None
        self._fakes, self._rule, self._slots, self._meter, self._tape = fakes, rule, slots, meter, tape
        self._kinds = Kinds(fakes.modules)
        self._blocks: dict[Any, list[RecordedBlock]] = {}
        self._log = Log()  # The log is that of the outermost block.
        self._depth = 0
        named = sorted((w.name, id(t), t) for w, t in fakes.fakes_of_weights())
        self._names, self._weights = [n for n, *_ in named], [t for *_, t in named]
        self._paths = sorted(fakes.modules)

    def run(self, fqn: str, run: Callable[[], Any], args: Any, kwargs: Any, footprint: Footprint) -> Any:
        """Returns what `run()` returns, with its instructions on the tape; `footprint()` is what else it
        changes.
        """
        try:
            with torch._C.DisableTorchFunction():  # Otherwise each look at a tensor would be watched as well.
                call = self._call(fqn, (args, kwargs))
        except Unlike:
            return run()
        candidates = self._blocks.setdefault(call.key, [])
        block = next((b for b in candidates if self._reads(fqn, b.reads) == b.reads), None)
        repeats = block is not None and (block.proven or block.call.fqn in self._rule.blocks.repeated)
        again = block if repeats else self._recorded_before(call)
        if again is not None:
            try:
                with torch._C.DisableTorchFunction():
                    out = self._copy(again, call)
                candidates.extend([again] if block is None else [])
                return out
            except Unlike:
                return run()
        out, recorded = self._recorded(call, run, footprint)
        if recorded is not None:
            self._know(recorded, block, candidates)
        return out

    def _recorded_before(self, call: BlockCall) -> RecordedBlock | None:
        """Returns what an earlier recording has of a call; its reads are gone, so not where these count."""
        return None if self._rule.guards_reads else self._rule.blocks.recorded.get(_call_of(call))

    def _know(
        self, recorded: RecordedBlock, block: RecordedBlock | None, candidates: list[RecordedBlock]
    ) -> None:
        """Keeps what a call has recorded; `block` is one that it may be a copy of."""
        if block is None:
            candidates.append(recorded)
        else:
            recorded.proven = self._same(block, recorded)
            candidates[candidates.index(block)] = recorded
            if recorded.proven:
                self._rule.found.repeated.update((block.call.fqn, recorded.call.fqn))
        if not recorded.call.objects:
            # Its tensors are of this recording alone, and so are the objects whose values it has read.
            call = replace(recorded.call, inputs=(), weights=())
            self._rule.found.recorded[_call_of(call)] = replace(recorded, call=call, accesses=[])

    # -- which calls may be copies -------------------------------------------------------------------

    def _call(self, fqn: str, arguments: Any) -> BlockCall:
        kind = self._kinds.repeated(fqn)
        if kind is None or inside_transform() or _has_any_global_hook() or not self._is_settled(fqn):
            raise Unlike
        inputs = tuple({id(t): t for t in leaves(arguments) if isinstance(t, Tensor)}.values())
        names = self._names[_below(self._names, fqn)]
        objects = list({id(x): x for x in leaves(arguments) if isinstance(frozen(x), int)}.values())
        weights = tuple(self._weights[_below(self._names, fqn)])
        order = {id(x): n for n, x in enumerate((*inputs, *objects))}
        known = tuple(map(self._slots.number_of, (*inputs, *weights)))
        pattern = [known.index(number) if number is not None else None for number in known]
        key = (
            kind,
            tuple(map(id, objects)),
            _shape(arguments, order),
            tuple(map(self._state, (*inputs, *weights))),
            tuple(pattern),
            tuple(name[len(fqn) :] for name in names),
            current_modes(),
            calling_line(),
            self._renewing(fqn),
        )
        slots = tuple(map(self._slot, inputs))
        if self._sizes is not None:
            if has_symbolic(arguments):
                raise Unlike
            key = *key, tuple(map(self._sizes.varying_dims, slots))
        return BlockCall(
            fqn, key, inputs, objects, weights, slots, known, len(self._slots.metas), self._slots.storages
        )

    def _is_settled(self, fqn: str) -> bool:
        """Returns whether the modules are as before the forward, and no leaf rule of a retry
        concerns them.
        """
        inside = self._paths[_below(self._paths, fqn)]
        # What such a leaf writes, no other call finds.
        rungs = {*self._rule.forced, *self._rule.walked} - self._rule.renewing.keys()
        if self._rule.traced or not rungs.isdisjoint(inside):
            return False
        return all(map(self._fakes.is_settled, (fqn, *inside)))

    def _renewing(self, fqn: str) -> tuple[str, ...]:
        """Returns the parts of a block that a retry has made leaves, as names in it."""
        inside = self._paths[_below(self._paths, fqn)] if self._rule.renewing else []
        return tuple(name[len(fqn) :] for name in inside if name in self._rule.renewing)

    def _slot(self, tensor: Tensor) -> int:
        slot = self._slots.slot_of(tensor)
        if slot is None or not is_fake(tensor) or tensor.is_inference():
            raise Unlike
        return slot

    def _state(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            raise Unlike
        memory = tensor.untyped_storage().nbytes()
        place = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, memory
        history = tensor.requires_grad, tensor.is_leaf, tensor._is_view()
        return place, history, self._meter.mark_of(tensor)

    def _reads(self, fqn: str, names: Iterable[Read]) -> dict[Read, Any]:
        """Returns the values that these attributes have in this block."""
        attributes = ((read, vars(self._fakes.modules[fqn + read[0]])) for read in names)
        return {read: frozen(values.get(read[1], ABSENT)) for read, values in attributes}

    # -- record --------------------------------------------------------------------------------------

    def _recorded(
        self, call: BlockCall, run: Callable[[], Any], footprint: Footprint
    ) -> tuple[Any, RecordedBlock | None]:
        first, before, contents_before = len(self._tape), footprint(), snapshot(call.objects)
        mark, decided = self._notes.mark(), len(self._decided())
        with self._watching() as read:
            out = run()
        if footprint() != before or not self._is_settled(call.fqn):
            return out, None
        try:
            with torch._C.DisableTorchFunction():
                block = self._block(call, first, out, contents_before, read())
                block.accesses = self._notes.since(mark)
                block.decisions = [*self._decided()[decided:]]
                return out, block
        except Unlike:
            return out, None

    def _decided(self) -> Sequence[NumberDecision]:
        return () if self._sizes is None else self._sizes.decided

    @contextmanager
    def _watching(self) -> Iterator[Callable[[], tuple[set[Attribute], set[Attribute]]]]:
        """Collects attribute reads; the function returns what was read as a value, and as an index."""
        with ExitStack() as stack:
            if not self._depth:
                self._log = Log()
                stack.enter_context(watched(self._kinds.varying, self._log))
            self._depth += 1
            stack.callback(self._leave)
            log = self._log
            values, indices = len(log.values), len(log.indices)
            yield lambda: ({*log.values[values:]}, {*log.indices[indices:]})

    def _leave(self) -> None:
        self._depth -= 1

    def _block(self, call: BlockCall, first: int, out: Any, contents_before: Any, read: Any) -> RecordedBlock:
        values, indices = read
        filled = dict(diff(contents_before, snapshot(call.objects)))
        out = out, list(filled.values())
        numbers = tuple(map(self._slots.number_of, (*call.inputs, *call.weights)))
        results = self._results(call, out)
        written = {n for i in self._tape[first:] for n in i.writes if n < call.storages}
        if not written <= set(numbers[len(call.inputs) :]):
            raise Unlike
        paths = {id(self._fakes.modules[name]): name[len(call.fqn) :] for name in self._inside(call.fqn)}
        # Each copy would need its own new object.
        new = any(value is ABSENT or _SCOPE.opens(value) for value in leaves(out[1]))
        if has_symbolic(out):
            raise Unlike
        if new or not {module for module, _ in (*values, *indices)} <= paths.keys():
            raise Unlike
        return RecordedBlock(
            call=call,
            instructions=self._tape[first:],
            metas=self._slots.metas[call.slots :],
            storages=self._slots.storages - call.storages,
            numbers=numbers,
            slots_of_inputs=tuple(map(self._slot, call.inputs)),
            out=map_leaves(self._reference, out),
            marks=[self._meter.mark_of(t) for t in (*call.inputs, *call.weights, *results)],
            put={path: frozen(contents_before.at(path)) for path in filled},
            reads=self._reads(call.fqn, [(paths[module], name) for module, name in values]),
            indices=self._reads(call.fqn, [(paths[module], name) for module, name in indices - values]),
            accesses=[],
            decisions=[],
        )

    def _inside(self, fqn: str) -> list[str]:
        return [fqn, *self._paths[_below(self._paths, fqn)]]

    def _results(self, call: BlockCall, out: Any) -> list[Tensor]:
        """Returns the tensors that the call has made and returns, each with its own memory."""
        input_ids = {id(t) for t in call.inputs}
        made = {id(t): t for t in leaves(out) if isinstance(t, Tensor) and id(t) not in input_ids}
        numbers = [self._slots.number_of(t) for t in made.values()]
        whole = all(map(_has_own_memory, made.values())) and len({*numbers}) == len(numbers)
        if not whole or any(n is None or n < call.storages for n in numbers):
            raise Unlike
        return list(made.values())

    def _reference(self, leaf: Any) -> Any:
        return Ref(self._slot(leaf)) if isinstance(leaf, Tensor) else leaf

    # -- copy ----------------------------------------------------------------------------------------

    def _same(self, block: RecordedBlock, other: RecordedBlock) -> bool:
        """Returns whether the other block equals a copy of this one."""
        try:
            renamed = RenamedBlock(block, other.call)
            copied = renamed.instructions(other.instructions[0].index), renamed.metas(), renamed.out()
            rest = block.storages, block.marks, tuple(map(renamed.storage, block.numbers))
            rest = *rest, self._moved(block, other.call)
            slots = tuple(map(renamed.slot, block.slots_of_inputs)), renamed.decisions()
            recorded = other.instructions, other.metas, other.out
            recorded_rest = other.storages, other.marks, other.numbers, other.put
            return copied == recorded and (*rest, *slots) == (
                *recorded_rest,
                other.slots_of_inputs,
                other.decisions,
            )
        # An empty block, or values without `==`, cannot be compared.
        except (Unlike, IndexError, ValueError, RuntimeError):
            return False

    def _moved(self, block: RecordedBlock, call: BlockCall) -> dict[Path, Any]:
        """Returns where a copy fills its objects. Raises Unlike where two indices would become one."""
        now = self._reads(call.fqn, block.indices)
        pairs = {(old[1], new[1]) for old, new in zip(block.indices.values(), now.values(), strict=True)}
        places = dict(pairs)
        if len(places) < len(pairs):
            raise Unlike

        def moved(step: Step) -> Step:
            kind, key = step
            return kind, places.get(key, key) if kind == ITEM else key

        return {(path[0], *map(moved, path[1:])): before for path, before in block.put.items()}

    def _copy(self, block: RecordedBlock, call: BlockCall) -> Any:
        renamed, filled = RenamedBlock(block, call), self._moved(block, call)
        if any(frozen(look_up(call.objects, path)) != before for path, before in filled.items()):
            raise Unlike
        if not all(fits(call.objects, path) for path in filled):
            raise Unlike
        decisions = renamed.decisions()
        self._notes.repeat(block.accesses, block.call.fqn, call.fqn)
        for decision in decisions:
            assert self._sizes is not None, "only lengths that are followed are decided on"
            self._sizes.decide(decision)
        self._tape += renamed.instructions(len(self._tape))
        self._slots.extend(renamed.metas(), block.storages)
        for tensor, number in zip((*call.inputs, *call.weights), block.numbers, strict=True):
            self._slots.know(tensor, renamed.storage(number))
        inputs = dict(zip(map(renamed.slot, block.slots_of_inputs), call.inputs, strict=True))
        for slot, tensor in inputs.items():
            self._slots.stand_for(slot, tensor)
        out = renamed.out()
        new = dict.fromkeys(ref.slot for ref in leaves(out) if isinstance(ref, Ref))
        made = {slot: self._result(slot) for slot in new if slot not in inputs}
        for tensor, mark in zip((*call.inputs, *call.weights, *made.values()), block.marks, strict=True):
            self._meter.mark(tensor, mark)
        tensors = inputs | made
        returned, put_there = map_leaves(lambda x: tensors[x.slot] if isinstance(x, Ref) else x, out)
        apply(call.objects, zip(filled, put_there, strict=True))
        for reads, log in ((block.reads, self._log.values), (block.indices, self._log.indices)):
            log += [(id(self._fakes.modules[call.fqn + path]), name) for path, name in reads]
        return returned

    def _result(self, slot: int) -> Tensor:
        """Returns a fake for a slot that a copy defines, with a history: only leaves may not be written."""
        meta = self._slots.metas[slot]
        fake = fake_of(meta, self._fakes.mode)
        if meta.requires_grad:
            with on_real_tensors(), self._fakes.mode, torch.enable_grad():
                fake = fake.requires_grad_().clone()
        self._slots.stand_for(slot, fake)
        return fake


def _call_of(call: BlockCall) -> Any:
    """Returns what is equal for calls of one block in two recordings of a model; without objects it has no
    identity of anything in it.
    """
    _, *key = call.key  # Numbers of kinds are those of one recording.
    return call.fqn, *key


def _below(names: list[str], fqn: str) -> slice:
    """Returns the slice of the sorted names that begin with `fqn` and a dot."""
    return slice(bisect_left(names, f"{fqn}."), bisect_left(names, f"{fqn}/"))


def _shape(tree: Any, order: dict[int, int]) -> Any:
    """Returns structure and plain values of arguments; tensors are represented by their index in `order`.

    Raises Unlike for a container that is neither a list, a tuple nor a dict.
    """
    if isinstance(tree, Tensor):
        return Tensor, order[id(tree)]
    if isinstance(tree, list | tuple):
        return type(tree), *(_shape(item, order) for item in tree)
    if isinstance(tree, dict):
        return type(tree), *((key, _shape(item, order)) for key, item in tree.items())
    value = frozen(tree)
    if isinstance(value, int) and id(tree) not in order:
        raise Unlike  # It is a container of another kind, such as a UserDict that layers fill.
    return ("object", order[id(tree)]) if isinstance(value, int) else value


def _has_own_memory(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.storage_offset() == 0 and not tensor._is_view()
    return (
        dense
        and is_fake(tensor)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
        and tensor.is_leaf != tensor.requires_grad
    )


@final
class RenamedBlock:
    """Renames a block for another call with the same key. Raises Unlike for names that neither call has."""

    def __init__(self, block: RecordedBlock, call: BlockCall) -> None:
        self._block, self._call = block, call
        self._slots = dict(zip(block.call.slots_of_inputs, call.slots_of_inputs, strict=True))
        self._known = dict(zip(block.call.known, call.known, strict=True))

    def instructions(self, first: int) -> list[Instruction]:
        """Returns the instructions, numbered from `first`."""
        return [self._instruction(first + n, i) for n, i in enumerate(self._block.instructions)]

    def metas(self) -> list[Meta]:
        """Returns the metas of the new slots."""
        return [replace(m, storage=self.storage(m.storage)) for m in self._block.metas]

    def out(self) -> Any:
        """Returns the result, tensors as references."""
        return map_leaves(self._leaf, self._block.out)

    def decisions(self) -> list[NumberDecision]:
        """Returns what was decided on lengths."""
        return [replace(d, number=self._leaf(d.number)) for d in self._block.decisions]

    def storage(self, number: int | None) -> Any:
        """Returns the corresponding storage number of the other call."""
        if number is None:
            return None
        if number >= (old := self._block.call.storages):
            return number - old + self._call.storages
        return _renamed(self._known, number)

    def slot(self, slot: int) -> int:
        """Returns the corresponding slot of the other call."""
        new = slot - self._block.call.slots
        return new + self._call.slots if new >= 0 else _renamed(self._slots, slot)

    def _instruction(self, index: int, one: Instruction) -> Instruction:
        return Instruction(
            index=index,
            target=self._name(one.target) if isinstance(one.target, str) else one.target,
            args=map_leaves(self._leaf, one.args),
            kwargs=map_leaves(self._leaf, one.kwargs),
            out=map_leaves(self._leaf, one.out),
            frame=self._name(one.frame),
            modes=one.modes,
            random=one.random,
            writes=frozenset(map(self.storage, one.writes)),
            weights=tuple(map(self._leaf, one.weights)),
            written_weights=tuple(map(self._leaf, one.written_weights)),
            where=one.where,
            casts=tuple((self._name(name), dtype) for name, dtype in one.casts),
            cost=self._cost(one.cost),
        )

    def _cost(self, cost: Cost) -> Cost:
        if not cost.saved_storages and cost.on_accelerator is None:
            return cost
        return replace(
            cost,
            saved_storages=frozenset(map(self.storage, cost.saved_storages)),
            on_accelerator=None if cost.on_accelerator is None else self._cost(cost.on_accelerator),
        )

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return Ref(self.slot(leaf.slot))
        if isinstance(leaf, SizeOf):
            return replace(leaf, slot=self.slot(leaf.slot))
        if isinstance(leaf, NumberInput):
            return replace(leaf, operands=tuple(map(self._leaf, leaf.operands)))
        return Weight(self._name(leaf.name), leaf.kind) if isinstance(leaf, Weight) else leaf

    def _name(self, name: str) -> str:
        old = self._block.call.fqn
        if name != old and not name.startswith(f"{old}."):
            raise Unlike
        return self._call.fqn + name[len(old) :]


def _renamed(table: dict[Any, Any], key: Any) -> Any:
    if key not in table:
        raise Unlike
    return table[key]
