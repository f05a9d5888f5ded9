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
from dataclasses import replace
from math import prod
from typing import Any, Final, final

from torch import Tensor, nn

from outsize.program.context_parallel.rows import SequenceRows
from outsize.program.context_parallel.rules import OwnRows, RowStep
from outsize.program.tape import Cost, Instruction, Ref, Tape, Weight
from outsize.program.tensor_parallel.local_tape import renumbered, resized_meta
from outsize.program.tensor_parallel.rule_step import op_name
from outsize.program.tensor_parallel.share import RankPosition, Share
from outsize.program.tree import leaves, map_leaves

# Functions of one tensor that may make it larger, or only turn it.
_SHAPES: Final = frozenset(
    {
        *("view", "reshape", "unsqueeze", "squeeze", "expand", "repeat_interleave"),
        *("getitem", "transpose", "permute", "contiguous", "mT"),
    }
)

Function = Callable[..., Tensor]


class RowCollectives(ABC):
    """Defines what ranks compute together, each by its rows; `place` is this rank's position.

    `share` says how the divided argument is divided. Gradients of whole values are sums over ranks.
    """

    place: RankPosition

    @abstractmethod
    def gather(self, x: Tensor, share: Share) -> Tensor:
        """Returns all rows; the gradient of x is the sum of all ranks' gradients of its rows."""

    @abstractmethod
    def cut(self, x: Tensor, share: Share) -> Tensor:
        """Returns this rank's rows of a whole value."""

    @abstractmethod
    def end(self, loss: Tensor) -> Tensor:
        """Returns the whole loss, whose gradient begins as 1 / ranks on each rank."""

    @abstractmethod
    def attention(self, share: Share, *args: Any, **kwargs: Any) -> Tensor:
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
    def mean(self, share: Share, function: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the mean over all rows."""

    @abstractmethod
    def dropout(self, x: Tensor, p: float, training: bool, inplace: bool, share: Share) -> Tensor:
        """Applies dropout with the mask that one process would draw."""


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
            loss = self._insert(("end",), self._together.end, (loss,), self._metas[loss.slot], last)
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
            return self._insert(("whole", leaf), self._together.gather, (leaf, share), meta, before)
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
        result = next(iter(before.defines()))
        like = self._tape.metas[leaf.slot] if isinstance(leaf, Ref) else self._tape.metas[result]
        meta = resized_meta(like, min(share.dim, len(like.shape) - 1), self._together.place.size(share))
        # A weight is cut again for each user: it may be used in several stages, and travels as a weight.
        key = ("cut", leaf, share.dim, share.parts, before.index if isinstance(leaf, Weight) else None)
        return self._insert(key, self._together.cut, (leaf, share), meta, before)

    def _insert(
        self, key: tuple[Any, ...], target: Any, args: tuple[Any, ...], meta: Any, before: Instruction
    ) -> Ref:
        if key not in self._made:
            self._made[key] = Ref(len(self._metas))
            self._metas.append(meta)
            weights = tuple(a for a in args if isinstance(a, Weight))
            new = replace(
                before, target=target, args=args, kwargs={}, out=self._made[key], weights=weights,
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
        if found.method == "attention":
            return self._together.attention, (found.share, *args), kwargs
        if found.method is not None:
            return getattr(self._together, found.method), (found.share, target, *args), kwargs
        if step.dropout is None:
            return target, args, kwargs
        return self._together.dropout, self._dropout_arguments(instruction, step.dropout), {}

    def _dropout_arguments(self, instruction: Instruction, share: Share) -> tuple[Any, ...]:
        if isinstance(instruction.target, str):
            module = self._modules[instruction.target]
            assert isinstance(module, nn.Dropout)
            return (instruction.args[0], module.p, module.training, module.inplace, share)
        options = {"p": 0.5, "training": True, "inplace": False}
        options |= dict(zip(options, instruction.args[1:], strict=False)) | instruction.kwargs
        return (instruction.args[0], *(options[k] for k in ("p", "training", "inplace")), share)
