"""Writes the tape of a rank that holds rows: the tape of one device with the sizes of its rows, and
collectives.

    v31 = repeat(k, 4)            g = gather(k); r = repeat(g, 4)
    v40 = sdpa(q, v31, ..)        v40 = attention(q, r, ..)

What attention reads of all ranks is gathered where it is smallest: before heads are repeated, which every
rank then does for itself. Every instruction knows the one of the whole tape that it serves, as in
tensor_parallel/local_tape.py. Complexity: O(instructions). Oracle: tests/dist/test_context.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, final

from torch import Tensor, nn
from torch.nn import functional

from outsize.program.replaying.replay import Relocatable
from outsize.program.sharding.context_parallel.rows import SequenceRows
from outsize.program.sharding.context_parallel.rules import AddsUpOverRows, OwnRows, RowStep
from outsize.program.sharding.propagate import follow
from outsize.program.sharding.rank_step import (
    NeedsParts,
    NotPropagated,
    RuleInput,
    Step,
    WrappedCall,
    op_name,
)
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.sharding.tensor_parallel.local_tape import renumbered, resized_meta
from outsize.program.tape import Cost, Instruction, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves

# Functions of one tensor that may make it larger, or only turn it.
_SHAPES: Final = frozenset(
    {
        *("view", "reshape", "unsqueeze", "squeeze", "expand", "repeat_interleave"),
        *("getitem", "transpose", "permute", "contiguous", "mT"),
    }
)

Function = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class RowCall(WrappedCall, Relocatable):
    """A call of a collective of ranks that have rows; `share` is how they are divided.

    `run` is given the share and, where there is one, `function` before the arguments of the model's own call.
    """

    run: Callable[..., Any]
    share: Share
    function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            return self.run(self.share, *args, **kwargs)
        return self.run(self.share, self.function, *args, **kwargs)

    def relocated(self, move: Callable[[Instruction], Instruction]) -> RowCall:
        function = self.function
        return replace(self, function=function.relocated(move)) if isinstance(function, Relocatable) else self

    def inner(self, instruction: Instruction) -> Instruction | None:
        return None if self.function is None else replace(instruction, target=self.function)

    def around(self, function: Callable[..., Any]) -> RowCall:
        return replace(self, function=function)

    def follow(self, call: RuleInput) -> Step:
        if self.function is not None:
            inner = replace(call, instruction=replace(call.instruction, target=self.function))
            return _with_mask_of_both(follow(inner, None), call)
        share = call.alone()
        if share.dim == self.share.dim:
            raise NotPropagated("rows of the sequence and parts of a layer are along one dim")
        return call.same(share)


def _with_mask_of_both(step: Step, call: RuleInput) -> Step:
    """Returns the step of a dropout whose mask is drawn for all rows and all parts of a layer."""
    share, args, kwargs = step.dropout, call.args, call.instruction.kwargs
    if share is None:
        return step
    return replace(step, dropout=None, rewrite=lambda place: ((*args, (share, place)), kwargs))


class RowCollectives(ABC):
    """Defines what ranks compute together, each by its rows; `place` is this rank's position.

    `share` says how the divided argument is divided, and `function` is the model's own. Gradients of whole
    values are sums over ranks.
    """

    place: RankPosition

    @abstractmethod
    def gather(self, share: Share, x: Tensor) -> Tensor:
        """Returns all rows; the gradient of x is the sum of all ranks' gradients of its rows."""

    @abstractmethod
    def cut(self, share: Share, x: Tensor) -> Tensor:
        """Returns this rank's rows of a whole value."""

    @abstractmethod
    def end(self, share: Share, loss: Tensor) -> Tensor:
        """Returns the whole loss, whose gradient begins as 1 / ranks on each rank."""

    @abstractmethod
    def attention(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Runs scaled_dot_product_attention with rows of the query, all keys and values, rows of the mask."""

    @abstractmethod
    def cross_entropy(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the cross entropy of all rows from this rank's logits and targets."""

    @abstractmethod
    def average(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes a loss that is a mean (or sum) over all elements from this rank's."""

    @abstractmethod
    def sum(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Adds up over all rows."""

    @abstractmethod
    def add_up(self, share: Share, function: AddsUpOverRows, *operands: Tensor) -> Any:
        """Returns the results of the sums over all ranks of what a function computes of its rows."""

    @abstractmethod
    def mean(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the mean over all rows."""

    @abstractmethod
    def dropout(
        self,
        share: Share,
        function: Function,
        x: Tensor,
        p: float,
        training: bool,
        inplace: bool,
        *others: tuple[Share, RankPosition],
    ) -> Tensor:
        """Applies dropout with the mask that one process would draw.

        `others`: along which other dims x is divided, among which other ranks.
        """


def row_tape(
    tape: Tape, rows: SequenceRows, modules: Mapping[str, nn.Module], together: RowCollectives
) -> Tape:
    """Returns the tape of the rank at `together.place`; its loss and the outputs of the model are whole."""
    writer = _RowTapeWriter(tape, rows, modules, together)
    for instruction in tape.instructions:
        writer.add(instruction)
    return writer.finish()


@final
class _RowTapeWriter:
    def __init__(
        self, tape: Tape, rows: SequenceRows, modules: Mapping[str, nn.Module], together: RowCollectives
    ) -> None:
        self._tape, self._rows, self._modules, self._together = tape, rows, modules, together
        self._metas = list(tape.metas)
        for slot, share in rows.shares.items():
            self._metas[slot] = resized_meta(tape.metas[slot], share.dim, together.place.size(share))
        self._instructions: list[Instruction] = []
        self._made: dict[tuple[Any, ...], Ref] = {}

    def add(self, instruction: Instruction) -> None:
        """Writes what the rank runs for an instruction."""
        found = self._rows.steps.get(instruction.index)
        if found is None:
            self._emit(instruction)
            return
        target, args, kwargs = self._call(instruction, found)

        def swap(leaf: Any) -> Any:
            if isinstance(leaf, OwnRows):
                return leaf.value
            if not isinstance(leaf, Ref | Weight):
                return leaf
            if leaf in found.step.cut:
                return self._cut(leaf, found.step.cut[leaf], instruction)
            if isinstance(leaf, Weight) or leaf not in found.gather:
                return leaf
            return self._whole(leaf, found.gather[leaf], instruction)

        args, kwargs = map_leaves(swap, args), map_leaves(swap, kwargs)
        self._emit(replace(instruction, target=target, args=args, kwargs=kwargs))

    def finish(self) -> Tape:
        """Returns the tape."""
        last, loss = self._tape.instructions[-1], self._tape.loss
        shares = {s: self._rows.shares[s] for s in self._tape.output_slots() if s in self._rows.shares}
        whole = {slot: self._whole(Ref(slot), share, last) for slot, share in shares.items()}
        output = map_leaves(lambda x: whole.get(x.slot, x) if isinstance(x, Ref) else x, self._tape.output)
        if loss is not None:
            end = RowCall(self._together.end, Share(0, (1,)))
            loss = self._insert(("end",), end, loss, self._metas[loss.slot], last)
        return replace(
            self._tape,
            instructions=tuple(self._instructions),
            metas=tuple(self._metas),
            output=output,
            loss=loss,
        )

    # -- operands ------------------------------------------------------------------------------------

    def _whole(self, leaf: Ref, share: Share, before: Instruction) -> Ref:
        """Returns all rows of a value: gathered, or made from a smaller value that is gathered."""
        smallest = self._smallest(leaf)
        if smallest is leaf:
            meta = self._tape.metas[leaf.slot]
            gather = RowCall(self._together.gather, share)
            return self._insert(("whole", leaf), gather, leaf, meta, before)
        return self._made_again(leaf, smallest, before)

    def _smallest(self, leaf: Ref) -> Ref:
        """Returns the smallest of the divided values from which `leaf` is made by its shape alone."""
        smallest = at = leaf
        while (above := self._shaped_from(at)) is not None:
            at = above
            smallest = at if self._size(at) < self._size(smallest) else smallest
        return smallest

    def _shaped_from(self, leaf: Ref) -> Ref | None:
        index = self._tape.producer.get(leaf.slot)
        instruction = None if index is None else self._tape.instructions[index]
        if instruction is None or instruction.is_leaf or op_name(instruction) not in _SHAPES:
            return None
        reads = [each for each in leaves((instruction.args, instruction.kwargs)) if isinstance(each, Ref)]
        divided = len(reads) == 1 and reads[0].slot in self._rows.shares and not instruction.writes
        return reads[0] if divided else None

    def _size(self, leaf: Ref) -> int:
        return prod(self._tape.metas[leaf.slot].shape)

    def _made_again(self, leaf: Ref, smallest: Ref, before: Instruction) -> Ref:
        if leaf == smallest:
            return self._whole(leaf, self._rows.shares[leaf.slot], before)
        key = ("whole", leaf)
        if key not in self._made:
            instruction = self._tape.instructions[self._tape.producer[leaf.slot]]
            above = self._shaped_from(leaf)
            assert above is not None
            whole = self._made_again(above, smallest, before)
            self._made[key] = Ref(len(self._metas))
            self._metas.append(self._tape.metas[leaf.slot])
            args, kwargs = map_leaves(
                lambda x: whole if x == above else x, (instruction.args, instruction.kwargs)
            )
            new = replace(instruction, args=args, kwargs=kwargs, out=self._made[key], index=before.index)
            self._emit(replace(new, cost=Cost()))
        return self._made[key]

    def _cut(self, leaf: Ref | Weight, share: Share, before: Instruction) -> Ref:
        key = ("cut", leaf, share.dim, share.parts)
        if isinstance(leaf, Ref) and key not in self._made:
            self._cut_operands(leaf, share, before, key)
        if key in self._made:
            return self._made[key]
        result = next(iter(before.defines()))
        like = self._tape.metas[leaf.slot] if isinstance(leaf, Ref) else self._tape.metas[result]
        meta = resized_meta(like, min(share.dim, len(like.shape) - 1), self._together.place.size(share))
        # A weight is cut again for each user: it may be used in several stages, and travels as a weight.
        key = (*key, before.index) if isinstance(leaf, Weight) else key
        return self._insert(key, RowCall(self._together.cut, share), leaf, meta, before)

    def _cut_operands(self, leaf: Ref, share: Share, before: Instruction, key: tuple[Any, ...]) -> None:
        """Makes this rank's rows of a value of tokens x tokens, such as a mask, from rows of its operands.

        So no rank holds all of it. Other values are made whole, and cut.
        """
        index = self._tape.producer.get(leaf.slot)
        made_by = None if index is None else self._tape.instructions[index]
        if made_by is None or made_by.is_leaf or self._size(leaf) < share.size**2:
            return
        step = _step_back(made_by, share, self._tape)
        if step is None:
            return
        args, kwargs = made_by.args, made_by.kwargs
        if step.rewrite is not None:
            args, kwargs = step.rewrite(self._together.place)
        cut = {operand: self._cut(operand, part, before) for operand, part in step.cut.items()}
        args, kwargs = map_leaves(lambda x: cut.get(x, x) if isinstance(x, Ref) else x, (args, kwargs))
        self._made[key] = Ref(len(self._metas))
        size = self._together.place.size(share)
        self._metas.append(resized_meta(self._tape.metas[leaf.slot], share.dim, size))
        self._emit(replace(made_by, args=args, kwargs=kwargs, out=self._made[key], index=before.index))

    def _insert(
        self,
        key: tuple[Any, ...],
        target: RowCall,
        leaf: Ref | Weight,
        meta: Any,
        before: Instruction,
    ) -> Ref:
        if key not in self._made:
            self._made[key] = Ref(len(self._metas))
            self._metas.append(meta)
            weights = (leaf,) if isinstance(leaf, Weight) else ()
            new = replace(
                before, target=target, args=(leaf,), kwargs={}, out=self._made[key], weights=weights,
                written_weights=(), writes=frozenset(), random=False, cost=Cost(), casts=(),
            )  # fmt: skip
            self._emit(new)
        return self._made[key]

    def _emit(self, instruction: Instruction) -> None:
        self._instructions.append(renumbered(instruction, len(self._instructions)))

    # -- calls ---------------------------------------------------------------------------------------

    def _call(self, instruction: Instruction, found: RowStep) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        step, target = found.step, instruction.target
        args, kwargs = instruction.args, instruction.kwargs
        if step.rewrite is not None:
            args, kwargs = step.rewrite(self._together.place)
        if found.method is not None:
            assert found.share is not None
            target = target if found.target is None else found.target(self._together.place)
            assert not isinstance(target, str)
            return RowCall(getattr(self._together, found.method), found.share, target), args, kwargs
        if step.dropout is None:
            return target if found.target is None else found.target(self._together.place), args, kwargs
        dropout = RowCall(self._together.dropout, step.dropout, functional.dropout)
        return dropout, self._dropout_arguments(instruction), {}

    def _dropout_arguments(self, instruction: Instruction) -> tuple[Any, ...]:
        if isinstance(instruction.target, str):
            module = self._modules[instruction.target]
            assert isinstance(module, nn.Dropout)
            return (instruction.args[0], module.p, module.training, module.inplace)
        options = {"p": 0.5, "training": True, "inplace": False}
        options |= dict(zip(options, instruction.args[1:], strict=False)) | instruction.kwargs
        return (instruction.args[0], *(options[k] for k in ("p", "training", "inplace")))


def _step_back(instruction: Instruction, share: Share, tape: Tape) -> Step | None:
    """Returns the step of an instruction whose result is divided so; `cut` says how its operands are.

    None where no way to divide its operands gives that.
    """
    if instruction.random or instruction.writes or instruction.weights:
        return None
    operands = [
        leaf
        for leaf in dict.fromkeys(leaves((instruction.args, instruction.kwargs)))
        if isinstance(leaf, Ref)
    ]
    for operand in operands:
        for dim, size in enumerate(tape.metas[operand.slot].shape):
            if size != share.size:
                continue
            shares = {operand.slot: share.at(dim)}
            try:
                step = follow(RuleInput(instruction, tape.metas, shares, {}), None)
            except (NotPropagated, NeedsParts):
                continue
            if step.dropout is None and [s and (s.dim, s.parts) for s in step.out] == [
                (share.dim, share.parts)
            ]:
                return replace(step, cut={**step.cut, operand: share.at(dim)})
    return None
