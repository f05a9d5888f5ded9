"""Problem: record a model of 80 equal blocks in the time of a few, with the tape of a full recording.

    block 1   recorded
    block 2   recorded; is it block 1 with other names and slots? then the two are proven
    block 3.. not run: the instructions of block 1, renamed

Calls are compared when they are alike: modules built alike (likeness.py), weights of the same names and
metas, arguments of the same metas and aliasing, all in the same state to the cost meter (saved before? used
before?), called from the same line. Attributes in which blocks differ do not matter if no code reads them, or
only as the index of what it fills in an argument: block 7 puts its keys into `cache.layers[7]`.
A block is run each time when it decides on values, keeps state, has hooks, draws from Python's generators,
writes into its arguments, mentions tensors that are not its own, or returns views.

Complexity: O(instructions) per copy, no op is run.
Oracle: tests/unit/capture/test_repeats.py compares with tapes for which every block was run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from outsize.capture.block import Block, Call, Read, Renamed, Unlike
from outsize.capture.costs import CostMeter
from outsize.capture.fakes import FakeModel, is_fake
from outsize.capture.holders import ABSENT, Path, changed, contents, look_up, put
from outsize.capture.intercept import inside_transform, really
from outsize.capture.leaves import LeafRule
from outsize.capture.likeness import Attribute, Kinds, Log, frozen, watched
from outsize.capture.place import here
from outsize.capture.slots import Slots
from outsize.program.modes import current_modes
from outsize.program.tape import Instruction, Ref
from outsize.program.tree import leaves, map_leaves

Footprint = Callable[[], Any]


@final
class Repeats:
    """Runs the blocks of one recording, or copies them."""

    def __init__(
        self, fakes: FakeModel, rule: LeafRule, slots: Slots, meter: CostMeter, tape: list[Instruction]
    ) -> None:
        self._fakes, self._rule, self._slots, self._meter, self._tape = fakes, rule, slots, meter, tape
        self._kinds = Kinds(fakes.modules)
        self._blocks: dict[Any, list[Block]] = {}
        self._log = Log()  # of the outermost block
        self._depth = 0
        named = sorted((w.name, id(t), t) for w, t in fakes.fakes_of_weights())
        self._names, self._weights = [n for n, *_ in named], [t for *_, t in named]
        self._paths = sorted(fakes.modules)

    def run(self, fqn: str, run: Callable[[], Any], args: Any, kwargs: Any, footprint: Footprint) -> Any:
        """What `run()` returns, its instructions on the tape; `footprint()` is what else it may change."""
        try:
            with torch._C.DisableTorchFunction():  # or each look at a tensor would be watched as well
                call = self._call(fqn, (args, kwargs))
        except Unlike:
            return run()
        alike = self._blocks.setdefault(call.key, [])
        block = next((b for b in alike if self._reads(fqn, b.reads) == b.reads), None)
        if block is not None and block.proven:
            try:
                with torch._C.DisableTorchFunction():
                    return self._copy(block, call)
            except Unlike:
                return run()
        out, found = self._recorded(call, run, footprint)
        if block is None:
            alike.extend([found] if found else [])
        elif found is not None:
            found.proven = self._same(block, found)
            alike[alike.index(block)] = found
        return out

    # -- what is alike -----------------------------------------------------------------------------

    def _call(self, fqn: str, given: Any) -> Call:
        kind = self._kinds.repeated(fqn)
        if kind is None or inside_transform() or _has_any_global_hook() or not self._is_settled(fqn):
            raise Unlike
        inputs = tuple({id(t): t for t in leaves(given) if isinstance(t, Tensor)}.values())
        names = self._names[_below(self._names, fqn)]
        objects = list({id(x): x for x in leaves(given) if isinstance(frozen(x), int)}.values())
        weights = tuple(self._weights[_below(self._names, fqn)])
        order = {id(x): n for n, x in enumerate((*inputs, *objects))}
        known = tuple(map(self._slots.number_of, (*inputs, *weights)))
        pattern = [known.index(number) if number is not None else None for number in known]
        key = (
            kind,
            tuple(map(id, objects)),
            _shape(given, order),
            tuple(map(self._state, (*inputs, *weights))),
            tuple(pattern),
            tuple(name[len(fqn) :] for name in names),
            current_modes(),
            here(),
        )
        slots = tuple(map(self._slot, inputs))
        return Call(
            fqn, key, inputs, objects, weights, slots, known, len(self._slots.metas), self._slots.storages
        )

    def _is_settled(self, fqn: str) -> bool:
        """The modules are as they were before the forward, and no rung of the ladder is in them."""
        inside = self._paths[_below(self._paths, fqn)]
        rungs = {*self._rule.forced, *self._rule.walked}
        if self._rule.traced or not rungs.isdisjoint(inside):
            return False
        return all(map(self._fakes.is_settled, (fqn, *inside)))

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
        """The values that these attributes have in this block."""
        given = ((read, vars(self._fakes.modules[fqn + read[0]])) for read in names)
        return {read: frozen(held.get(read[1], ABSENT)) for read, held in given}

    # -- record --------------------------------------------------------------------------------------

    def _recorded(self, call: Call, run: Callable[[], Any], footprint: Footprint) -> tuple[Any, Block | None]:
        first, before, held = len(self._tape), footprint(), contents(call.objects)
        with self._watching() as read:
            out = run()
        if footprint() != before or not self._is_settled(call.fqn):
            return out, None
        try:
            with torch._C.DisableTorchFunction():
                return out, self._block(call, first, out, held, read())
        except Unlike:
            return out, None

    @contextmanager
    def _watching(self) -> Iterator[Callable[[], tuple[set[Attribute], set[Attribute]]]]:
        """Afterwards the function tells what was read as a value, and as an index."""
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

    def _block(self, call: Call, first: int, out: Any, held: Any, read: Any) -> Block:
        values, indices = read
        filled = changed(held, contents(call.objects))
        out = out, list(filled.values())
        numbers = tuple(map(self._slots.number_of, (*call.inputs, *call.weights)))
        results = self._results(call, out)
        written = {n for i in self._tape[first:] for n in i.writes if n < call.storages}
        if not written <= set(numbers[len(call.inputs) :]):
            raise Unlike
        paths = {id(self._fakes.modules[name]): name[len(call.fqn) :] for name in self._inside(call.fqn)}
        if ABSENT in filled.values() or not {module for module, _ in (*values, *indices)} <= paths.keys():
            raise Unlike
        return Block(
            call=call,
            instructions=self._tape[first:],
            metas=self._slots.metas[call.slots :],
            storages=self._slots.storages - call.storages,
            numbers=numbers,
            slots_of_inputs=tuple(map(self._slot, call.inputs)),
            out=map_leaves(self._reference, out),
            marks=[self._meter.mark_of(t) for t in (*call.inputs, *call.weights, *results)],
            put={path: frozen(held.get(path, ABSENT)) for path in filled},
            reads=self._reads(call.fqn, [(paths[module], name) for module, name in values]),
            indices=self._reads(call.fqn, [(paths[module], name) for module, name in indices - values]),
        )

    def _inside(self, fqn: str) -> list[str]:
        return [fqn, *self._paths[_below(self._paths, fqn)]]

    def _results(self, call: Call, out: Any) -> list[Tensor]:
        """The tensors that the call has made and returns, each with memory of its own."""
        given = {id(t) for t in call.inputs}
        made = {id(t): t for t in leaves(out) if isinstance(t, Tensor) and id(t) not in given}
        numbers = [self._slots.number_of(t) for t in made.values()]
        whole = all(map(_has_own_memory, made.values())) and len({*numbers}) == len(numbers)
        if not whole or any(n is None or n < call.storages for n in numbers):
            raise Unlike
        return list(made.values())

    def _reference(self, leaf: Any) -> Any:
        return Ref(self._slot(leaf)) if isinstance(leaf, Tensor) else leaf

    # -- copy ----------------------------------------------------------------------------------------

    def _same(self, block: Block, other: Block) -> bool:
        """Is the other what a copy of this one would be?"""
        try:
            renamed = Renamed(block, other.call)
            ours = renamed.instructions(other.instructions[0].index), renamed.metas(), renamed.out()
            rest = block.storages, block.marks, tuple(map(renamed.storage, block.numbers))
            rest = *rest, self._moved(block, other.call)
            slots = tuple(map(renamed.slot, block.slots_of_inputs))
            theirs = other.instructions, other.metas, other.out
            left = other.storages, other.marks, other.numbers, other.put, other.slots_of_inputs
            return ours == theirs and (*rest, slots) == left
        except (Unlike, IndexError, ValueError, RuntimeError):  # nothing there, or no answer to ==
            return False

    def _moved(self, block: Block, call: Call) -> dict[Path, Any]:
        """Where a copy fills its objects. Raises Unlike where two indices would become one."""
        now = self._reads(call.fqn, block.indices)
        pairs = {(old[1], new[1]) for old, new in zip(block.indices.values(), now.values(), strict=True)}
        places = dict(pairs)
        if len(places) < len(pairs):
            raise Unlike
        return {
            tuple((places.get(s[0], s[0]),) if isinstance(s, tuple) else s for s in path): before
            for path, before in block.put.items()
        }

    def _copy(self, block: Block, call: Call) -> Any:
        renamed, filled = Renamed(block, call), self._moved(block, call)
        if any(frozen(look_up(call.objects, path)) != before for path, before in filled.items()):
            raise Unlike
        self._tape += renamed.instructions(len(self._tape))
        self._slots.extend(renamed.metas(), block.storages)
        for tensor, number in zip((*call.inputs, *call.weights), block.numbers, strict=True):
            self._slots.know(tensor, renamed.storage(number))
        given = dict(zip(map(renamed.slot, block.slots_of_inputs), call.inputs, strict=True))
        for slot, tensor in given.items():
            self._slots.stand_for(slot, tensor)
        out = renamed.out()
        new = dict.fromkeys(ref.slot for ref in leaves(out) if isinstance(ref, Ref))
        made = {slot: self._result(slot) for slot in new if slot not in given}
        for tensor, mark in zip((*call.inputs, *call.weights, *made.values()), block.marks, strict=True):
            self._meter.mark(tensor, mark)
        tensors = given | made
        returned, put_there = map_leaves(lambda x: tensors[x.slot] if isinstance(x, Ref) else x, out)
        for path, value in zip(filled, put_there, strict=True):
            put(call.objects, path, value)
        for reads, log in ((block.reads, self._log.values), (block.indices, self._log.indices)):
            log += [(id(self._fakes.modules[call.fqn + path]), name) for path, name in reads]
        return returned

    def _result(self, slot: int) -> Tensor:
        """A fake for a slot that a copy defines, with a history: only leaves may not be written."""
        meta = self._slots.metas[slot]
        with really(), self._fakes.mode, torch.enable_grad():
            fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            fake = fake.requires_grad_().clone() if meta.requires_grad else fake
        self._slots.stand_for(slot, fake)
        return fake


def _below(names: list[str], fqn: str) -> slice:
    """Where the sorted names stand that begin with `fqn` and a dot."""
    return slice(bisect_left(names, f"{fqn}."), bisect_left(names, f"{fqn}/"))


def _shape(tree: Any, order: dict[int, int]) -> Any:
    """Structure and plain values of arguments; tensors by their places in `order`."""
    if isinstance(tree, Tensor):
        return Tensor, order[id(tree)]
    if isinstance(tree, list | tuple):
        return type(tree), *(_shape(item, order) for item in tree)
    if isinstance(tree, dict):
        return type(tree), *((key, _shape(item, order)) for key, item in tree.items())
    value = frozen(tree)
    return ("object", order[id(tree)]) if isinstance(value, int) else value


def _has_own_memory(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.storage_offset() == 0 and not tensor._is_view()
    return (
        dense
        and is_fake(tensor)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
        and tensor.is_leaf != tensor.requires_grad
    )
