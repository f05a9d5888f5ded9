"""Writes a rank's own tape: the tape of one device with the sizes of a rank, and with collectives between.

    v18 = view(v17, 2, 9, 32, 64)                    v18 = view(v17, 2, 9, 16, 64)
    v23 = m4(v22)      # o_proj, takes sharded input v23 = row(v22, o_proj.weight, None)

A value that every rank has whole and a sharded instruction reads is entered first (its gradient is added up
once for all that read it), or cut. Every other instruction is unchanged. Source: Megatron-LM, arXiv
1909.08053, the conjugate operators f (enter) and g (reduce). Every instruction knows the one of the whole
tape that it serves: it draws random numbers by that number and belongs to that one's stage. Complexity:
O(instructions). Oracle: tests/dist/test_tensor_parallel.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

from outsize.program.sharding.products import Heads, Lookup, Product, is_conv1d
from outsize.program.sharding.rank_step import WrappedCall, inner_call
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.sharding.tensor_parallel.styles import Derived, RankInstruction
from outsize.program.tape import Cost, Instruction, Meta, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves

ColumnProduct = tuple[Tensor, Tensor | None, bool]
"""The weight, the bias, and whether the weight is turned (transformers' Conv1D)."""


class Collectives(ABC):
    """Defines the collectives of a tensor-parallel group; `place` is this rank's position."""

    place: RankPosition

    @abstractmethod
    def enter(self, x: Tensor) -> Tensor:
        """Returns x, whose gradient is the sum of all ranks' gradients."""

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x."""

    @abstractmethod
    def cut(self, x: Tensor, share: Share) -> Tensor:
        """Returns this rank's shard of x."""

    @abstractmethod
    def gather(self, x: Tensor, share: Share) -> Tensor:
        """Returns the whole of which each rank has a shard."""

    @abstractmethod
    def scatter(self, x: Tensor, share: Share) -> Tensor:
        """Returns this rank's shard of the sum of all ranks' x."""

    @abstractmethod
    def collect(self, x: Tensor, share: Share) -> Tensor:
        """Returns the whole, whose gradient is the sum of all ranks' gradients."""

    @abstractmethod
    def columns(
        self, x: Tensor, share: Share | None, products: tuple[ColumnProduct, ...]
    ) -> tuple[Tensor, ...]:
        """Returns the entered x (with a share, the whole of which x is this rank's shard), and its products.

        Ranks add up the gradient of x while each computes the gradients of its weights.
        """

    @abstractmethod
    def row(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, scatter: Share | None = None
    ) -> Tensor:
        """Adds up a product of which each rank has some summands; with `scatter` returns a shard of
        the sum.
        """

    @abstractmethod
    def lookup(
        self, index: Tensor, weight: Tensor, share: Share, padding: int | None, scatter: Share | None = None
    ) -> Tensor:
        """Looks up an embedding of which each rank has some rows."""

    @abstractmethod
    def attend(
        self,
        module: nn.MultiheadAttention,
        inputs: tuple[Tensor, ...],
        masks: tuple[Any, ...],
        weights: tuple[Any, ...],
        scatter: Share | None = None,
        share: Share | None = None,
    ) -> tuple[Tensor, None]:
        """Runs an nn.MultiheadAttention of which each rank has some heads.

        `inputs` are query, key and value, or one tensor for all of them, which is entered by `columns`.
        """

    @abstractmethod
    def cross_entropy(
        self, logits: Tensor, target: Tensor, share: Share, ignore_index: int = -100, reduction: str = "mean"
    ) -> Tensor:
        """Computes the cross entropy of logits (n, classes of this rank)."""

    @abstractmethod
    def dropout(self, x: Tensor, p: float, training: bool, inplace: bool, share: Share) -> Tensor:
        """Applies dropout with the mask that one process would draw."""

    @abstractmethod
    def attention(self, share: Share, *args: Any, **kwargs: Any) -> Tensor:
        """Runs scaled_dot_product_attention, whose dropout has the mask that one process would draw."""


def local_tape(
    tape: Tape,
    derived: Derived,
    modules: Mapping[str, nn.Module],
    together: Collectives,
    *,
    gather: bool = True,
) -> Tape:
    """Returns the tape of the rank at `together.place`; with `gather` the outputs of the model are whole."""
    writer = _LocalTapeWriter(tape, derived, modules, together)
    for instruction in tape.instructions:
        writer.add(instruction)
    return writer.finish(gather)


@final
class _LocalTapeWriter:
    def __init__(
        self, tape: Tape, derived: Derived, modules: Mapping[str, nn.Module], together: Collectives
    ) -> None:
        self._tape, self._derived, self._modules, self._together = tape, derived, modules, together
        self._metas = [self._local(slot, meta) for slot, meta in enumerate(tape.metas)]
        self._instructions: list[Instruction] = []
        self._made: dict[tuple[Any, ...], Ref] = {}

    def _local(self, slot: int, meta: Meta) -> Meta:
        share = self._derived.shares.get(slot)
        return meta if share is None else resized_meta(meta, share.dim, self._together.place.size(share))

    def add(self, instruction: Instruction) -> None:
        local = self._derived.rank_instructions.get(instruction.index)
        if local is None:
            self._emit(instruction)
            return
        swap = self._operands(instruction, local)
        if local.kind == "experts":
            self._add_up(instruction, local, swap)
            return
        target, args, kwargs = self._call(instruction, local)
        kwargs = kwargs if local.scatter is None else {**kwargs, "scatter": local.scatter}
        args, kwargs = map_leaves(swap, args), map_leaves(swap, kwargs)
        if (
            local.kind is None
            and local.step.dropout is None
            and not local.step.rewrite
            and target == instruction.target
        ):
            self._emit(replace(instruction, args=args, kwargs=kwargs))
            return
        self._emit(replace(instruction, target=target, args=args, kwargs=kwargs, cost=Cost()))

    def _add_up(self, instruction: Instruction, local: RankInstruction, swap: Callable[[Any], Any]) -> None:
        (slot,) = instruction.defines()
        part = Ref(len(self._metas))
        self._metas.append(self._tape.metas[slot])
        self._emit(replace(instruction, args=map_leaves(swap, instruction.args), out=part))
        if local.scatter is None:
            adding, args = self._together.reduce, (part,)
        else:
            adding, args = self._together.scatter, (part, local.scatter)
        bare = replace(instruction, kwargs={}, weights=(), random=False, cost=Cost())
        self._emit(replace(bare, target=adding, args=args))

    def finish(self, gather: bool) -> Tape:
        output = self._tape.output
        if gather and self._derived.gathered:
            last, shares = self._tape.instructions[-1], self._derived.gathered
            whole = {slot: self._whole(Ref(slot), share, last) for slot, share in shares.items()}
            output = map_leaves(lambda x: whole.get(x.slot, x) if isinstance(x, Ref) else x, output)
        return replace(
            self._tape,
            instructions=tuple(self._instructions),
            metas=tuple(self._metas),
            output=output,
            through=dict.fromkeys(sorted(self._derived.entered), self._together.enter),
        )

    # -- operands ------------------------------------------------------------------------------------

    def _operands(self, instruction: Instruction, local: RankInstruction) -> Callable[[Any], Any]:
        """Returns the function that replaces each tensor among an instruction's arguments."""

        def swap(leaf: Any) -> Any:
            if not isinstance(leaf, Ref | Weight):
                return leaf
            share, cut = local.gather.get(leaf), local.step.cut.get(leaf)
            if cut is not None:
                whole = leaf if share is None else self._whole(leaf, share, instruction)
                return self._cut(whole, cut, instruction)
            if share is not None:
                return self._whole(leaf, share, instruction, adding=local.parts)
            whole = isinstance(leaf, Ref) and leaf.slot not in self._derived.shares
            return self._entered(leaf, instruction) if local.parts and whole else leaf

        return swap

    def _entered(self, leaf: Any, before: Instruction) -> Any:
        if not self._metas[leaf.slot].requires_grad:
            return leaf
        return self._insert(("enter", leaf), self._together.enter, (leaf,), self._metas[leaf.slot], before)

    def _whole(self, leaf: Any, share: Share, before: Instruction, adding: bool = False) -> Ref:
        """Inserts a gather; `adding` says that each rank has a summand of the gradient of the whole."""
        meta = resized_meta(self._metas[leaf.slot], share.dim, share.size)
        adding = adding and meta.requires_grad
        target = self._together.collect if adding else self._together.gather
        return self._insert(("whole", leaf, adding), target, (leaf, share), meta, before)

    def _cut(self, leaf: Ref | Weight, share: Share, before: Instruction) -> Ref:
        result = next(iter(before.defines()))
        like = self._metas[leaf.slot] if isinstance(leaf, Ref) else self._tape.metas[result]
        meta = resized_meta(like, min(share.dim, len(like.shape) - 1), self._together.place.size(share))
        # A weight is cut again for each user: it may be used in several stages, and travels as a weight.
        key = ("cut", leaf, share.dim, share.parts, before.index if isinstance(leaf, Weight) else None)
        return self._insert(key, self._together.cut, (leaf, share), meta, before)

    def _insert(
        self, key: tuple[Any, ...], target: Any, args: tuple[Any, ...], meta: Meta, before: Instruction
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

    def _call(
        self, instruction: Instruction, local: RankInstruction
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        together, of = self._together, local.of
        if local.kind == "row" and isinstance(of, Product):
            return together.row, (of.input, *_weights(of), of.turned), {}
        if local.kind == "column" and isinstance(of, Product):
            module = self._modules[instruction.target] if isinstance(instruction.target, str) else None
            if module is not None and is_conv1d(module):
                return turned_linear, (of.input, *_weights(of)), {}
            return instruction.target, instruction.args, instruction.kwargs
        if local.kind == "vocabulary" and isinstance(of, Lookup):
            table = self._modules[str(instruction.target)]
            share = self._derived.roles[of.weight].share
            return (
                together.lookup,
                (of.index, _weight(of.weight), share, getattr(table, "padding_idx", None)),
                {},
            )
        if local.kind == "heads" and isinstance(of, Heads):
            return together.attend, _heads_arguments(of, instruction), {}
        if local.kind == "loss":
            share = self._derived.shares[inner_call(instruction).args[0].slot]
            options = {
                k: instruction.kwargs[k] for k in ("ignore_index", "reduction") if k in instruction.kwargs
            }
            if isinstance(instruction.target, WrappedCall):
                within = partial(together.cross_entropy, share=share)
                return instruction.target.around(within), instruction.args, options
            return together.cross_entropy, (*instruction.args, share), options
        return self._followed(instruction, local)

    def _followed(
        self, instruction: Instruction, local: RankInstruction
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        step, target = local.step, instruction.target
        args, kwargs = instruction.args, instruction.kwargs
        if step.rewrite is not None:
            args, kwargs = step.rewrite(self._together.place)
        if step.dropout is None:
            return target, args, kwargs
        if target is functional.scaled_dot_product_attention:
            return self._together.attention, (step.dropout, *args), kwargs
        if isinstance(target, str):
            module = self._modules[target]
            assert isinstance(module, nn.Dropout)
            return (
                self._together.dropout,
                (args[0], module.p, module.training, module.inplace, step.dropout),
                {},
            )
        options = {"p": 0.5, "training": True, "inplace": False}
        options |= dict(zip(options, args[1:], strict=False)) | kwargs
        return (
            self._together.dropout,
            (args[0], *(options[k] for k in ("p", "training", "inplace")), step.dropout),
            {},
        )


def renumbered(instruction: Instruction, number: int) -> Instruction:
    """Returns the instruction as the `number`-th of a rank's tape, with the casts of weights that it still
    reads by itself.
    """
    named = {leaf.name for leaf in leaves((instruction.args, instruction.kwargs)) if isinstance(leaf, Weight)}
    casts = tuple(cast for cast in instruction.casts if instruction.is_leaf or cast[0] in named)
    return replace(instruction, index=number, serves=instruction.origin, casts=casts)


def turned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight + bias`."""
    return functional.linear(x, weight.t(), bias)


def _weight(name: str | None) -> Weight | None:
    return None if name is None else Weight(name, "parameter")


def _weights(product: Product) -> tuple[Weight | None, Weight | None]:
    return _weight(product.weight), _weight(product.bias)


def _heads_arguments(heads: Heads, instruction: Instruction) -> tuple[Any, ...]:
    parameters = set(instruction.parameters())
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    full = [f"{heads.fqn}.{name}" for name in names]
    masks = tuple(heads.arguments[name] for name in ("key_padding_mask", "attn_mask", "is_causal"))
    return (
        heads.module,
        heads.inputs,
        masks,
        tuple(_weight(name) if name in parameters else None for name in full),
    )


def resized_meta(meta: Meta, dim: int, size: int) -> Meta:
    """Returns the meta with another size of one dim; strides keep their order, without gaps."""
    shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
    stride, step = list(meta.stride), 1
    for d in sorted(range(len(shape)), key=lambda d: (meta.stride[d], -d)):
        if meta.stride[d]:
            stride[d], step = step, step * shape[d]
    return replace(meta, shape=shape, stride=tuple(stride))
