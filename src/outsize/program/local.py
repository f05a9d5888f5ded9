"""A rank's own tape: the tape of one device with the sizes of a rank, and with collectives between.

    v18 = view(v17, 2, 9, 32, 64)                    v18 = view(v17, 2, 9, 16, 64)
    v23 = m4(v22)   # o_proj, takes what is divided  v23 = row(v22, o_proj.weight, None)

What every rank has whole and a divided instruction reads is entered first (its gradient is added up once for
all that read it), or cut. Every other instruction stays as it is. Source: Megatron-LM, arXiv 1909.08053, the
conjugate operators f (enter) and g (reduce). Every instruction knows the one that it serves: it draws by that
number and belongs to that one's stage. Complexity: O(instructions). Oracle as for tensor_styles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

from outsize.program.products import Heads, Lookup, Product, is_conv1d
from outsize.program.share import Place, Share
from outsize.program.tape import Cost, Instruction, Meta, Ref, Tape, Weight
from outsize.program.tensor_styles import Act, Derived
from outsize.program.tree import map_leaves


class Collectives(ABC):
    """What ranks do together; `place` is this one's."""

    place: Place

    @abstractmethod
    def enter(self, x: Tensor) -> Tensor:
        """x, whose gradient is the sum of all ranks' gradients."""

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""

    @abstractmethod
    def cut(self, x: Tensor, share: Share) -> Tensor:
        """This rank's part of x."""

    @abstractmethod
    def gather(self, x: Tensor, share: Share) -> Tensor:
        """The whole of which each rank has a part."""

    @abstractmethod
    def scatter(self, x: Tensor, share: Share) -> Tensor:
        """This rank's part of the sum of all ranks' x."""

    @abstractmethod
    def collect(self, x: Tensor, share: Share) -> Tensor:
        """The whole, whose gradient is the sum of all ranks' gradients."""

    @abstractmethod
    def row(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, scatter: Share | None = None
    ) -> Tensor:
        """A product of which each rank has some of the summands, added up; with `scatter` a part of that."""

    @abstractmethod
    def lookup(
        self, index: Tensor, weight: Tensor, share: Share, padding: int | None, scatter: Share | None = None
    ) -> Tensor:
        """An embedding of which each rank has some rows."""

    @abstractmethod
    def attend(
        self,
        module: nn.MultiheadAttention,
        inputs: tuple[Tensor, ...],
        masks: tuple[Any, ...],
        weights: tuple[Any, ...],
        scatter: Share | None = None,
    ) -> tuple[Tensor, None]:
        """An nn.MultiheadAttention of which each rank has some heads."""

    @abstractmethod
    def cross_entropy(
        self, logits: Tensor, target: Tensor, share: Share, ignore_index: int = -100, reduction: str = "mean"
    ) -> Tensor:
        """Of logits (n, classes of this rank)."""

    @abstractmethod
    def dropout(self, x: Tensor, p: float, training: bool, inplace: bool, share: Share) -> Tensor:
        """With the mask that one process would draw."""

    @abstractmethod
    def attention(self, share: Share, *args: Any, **kwargs: Any) -> Tensor:
        """scaled_dot_product_attention whose dropout has the mask that one process would draw."""


def local_tape(
    tape: Tape,
    derived: Derived,
    modules: Mapping[str, nn.Module],
    together: Collectives,
    *,
    gather: bool = True,
) -> Tape:
    """The tape of the rank at `together.place`; with `gather` the outputs of the model are whole."""
    writer = _Writer(tape, derived, modules, together)
    for instruction in tape.instructions:
        writer.add(instruction)
    return writer.finish(gather)


@final
class _Writer:
    def __init__(
        self, tape: Tape, derived: Derived, modules: Mapping[str, nn.Module], together: Collectives
    ) -> None:
        self._tape, self._derived, self._modules, self._together = tape, derived, modules, together
        self._metas = [self._local(slot, meta) for slot, meta in enumerate(tape.metas)]
        self._instructions: list[Instruction] = []
        self._made: dict[tuple[Any, ...], Ref] = {}

    def _local(self, slot: int, meta: Meta) -> Meta:
        share = self._derived.shares.get(slot)
        return meta if share is None else _resized(meta, share.dim, self._together.place.size(share))

    def add(self, instruction: Instruction) -> None:
        act = self._derived.acts.get(instruction.index)
        if act is None:
            self._emit(instruction)
            return
        swap = self._operands(instruction, act)
        if act.kind == "summands":
            self._add_up(instruction, act, swap)
            return
        target, args, kwargs = self._call(instruction, act)
        kwargs = kwargs if act.scatter is None else {**kwargs, "scatter": act.scatter}
        args, kwargs = map_leaves(swap, args), map_leaves(swap, kwargs)
        if (
            act.kind is None
            and act.step.dropout is None
            and not act.step.rewrite
            and target == instruction.target
        ):
            self._emit(replace(instruction, args=args, kwargs=kwargs))
            return
        self._emit(replace(instruction, target=target, args=args, kwargs=kwargs, cost=Cost()))

    def _add_up(self, instruction: Instruction, act: Act, swap: Callable[[Any], Any]) -> None:
        (slot,) = instruction.defines()
        part = Ref(len(self._metas))
        self._metas.append(self._tape.metas[slot])
        self._emit(replace(instruction, args=map_leaves(swap, instruction.args), out=part))
        if act.scatter is None:
            adding, args = self._together.reduce, (part,)
        else:
            adding, args = self._together.scatter, (part, act.scatter)
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

    def _operands(self, instruction: Instruction, act: Act) -> Callable[[Any], Any]:
        """What stands for each tensor among its arguments."""

        def swap(leaf: Any) -> Any:
            if not isinstance(leaf, Ref | Weight):
                return leaf
            share, cut = act.gather.get(leaf), act.step.cut.get(leaf)
            if cut is not None:
                whole = leaf if share is None else self._whole(leaf, share, instruction)
                return self._cut(whole, cut, instruction)
            if share is not None:
                return self._whole(leaf, share, instruction, adding=act.parts)
            whole = isinstance(leaf, Ref) and leaf.slot not in self._derived.shares
            return self._entered(leaf, instruction) if act.parts and whole else leaf

        return swap

    def _entered(self, leaf: Any, before: Instruction) -> Any:
        if not self._metas[leaf.slot].requires_grad:
            return leaf
        return self._insert(("enter", leaf), self._together.enter, (leaf,), self._metas[leaf.slot], before)

    def _whole(self, leaf: Any, share: Share, before: Instruction, adding: bool = False) -> Ref:
        """`adding`: each rank has a part of the gradient of the whole."""
        meta = _resized(self._metas[leaf.slot], share.dim, share.size)
        adding = adding and meta.requires_grad
        target = self._together.collect if adding else self._together.gather
        return self._insert(("whole", leaf, adding), target, (leaf, share), meta, before)

    def _cut(self, leaf: Ref | Weight, share: Share, before: Instruction) -> Ref:
        result = next(iter(before.defines()))
        like = self._metas[leaf.slot] if isinstance(leaf, Ref) else self._tape.metas[result]
        meta = _resized(like, min(share.dim, len(like.shape) - 1), self._together.place.size(share))
        # A weight is cut anew for each user: it may be used in several stages, and travels as a weight.
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
                written_weights=(), writes=frozenset(), random=False, cost=Cost(),
            )  # fmt: skip
            self._emit(new)
        return self._made[key]

    def _emit(self, instruction: Instruction) -> None:
        self._instructions.append(
            replace(instruction, index=len(self._instructions), serves=instruction.index)
        )

    # -- calls ---------------------------------------------------------------------------------------

    def _call(self, instruction: Instruction, act: Act) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        together, of = self._together, act.of
        if act.kind == "row" and isinstance(of, Product):
            return together.row, (of.input, *_weights(of), of.turned), {}
        if act.kind == "column" and isinstance(of, Product):
            module = self._modules[instruction.target] if isinstance(instruction.target, str) else None
            if module is not None and is_conv1d(module):
                return turned_linear, (of.input, *_weights(of)), {}
            return instruction.target, instruction.args, instruction.kwargs
        if act.kind == "vocabulary" and isinstance(of, Lookup):
            table = self._modules[str(instruction.target)]
            share = self._derived.roles[of.weight].share
            return (
                together.lookup,
                (of.index, _weight(of.weight), share, getattr(table, "padding_idx", None)),
                {},
            )
        if act.kind == "heads" and isinstance(of, Heads):
            return together.attend, _heads_arguments(of, instruction), {}
        if act.kind == "loss":
            share = self._derived.shares[instruction.args[0].slot]
            options = {
                k: instruction.kwargs[k] for k in ("ignore_index", "reduction") if k in instruction.kwargs
            }
            return together.cross_entropy, (*instruction.args, share), options
        return self._followed(instruction, act)

    def _followed(self, instruction: Instruction, act: Act) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        step, target = act.step, instruction.target
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
        given = {"p": 0.5, "training": True, "inplace": False}
        given |= dict(zip(given, args[1:], strict=False)) | kwargs
        return (
            self._together.dropout,
            (args[0], *(given[k] for k in ("p", "training", "inplace")), step.dropout),
            {},
        )


def turned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight + bias`."""
    return functional.linear(x, weight.t(), bias)


def _weight(name: str | None) -> Weight | None:
    return None if name is None else Weight(name, "parameter")


def _weights(product: Product) -> tuple[Weight | None, Weight | None]:
    return _weight(product.weight), _weight(product.bias)


def _heads_arguments(heads: Heads, instruction: Instruction) -> tuple[Any, ...]:
    held = set(instruction.parameters())
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    full = [f"{heads.fqn}.{name}" for name in names]
    masks = tuple(heads.arguments[name] for name in ("key_padding_mask", "attn_mask", "is_causal"))
    return heads.module, heads.inputs, masks, tuple(_weight(name) if name in held else None for name in full)


def _resized(meta: Meta, dim: int, size: int) -> Meta:
    """The dim as long as this; strides in the same order, without gaps."""
    shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
    stride, step = list(meta.stride), 1
    for d in sorted(range(len(shape)), key=lambda d: (meta.stride[d], -d)):
        if meta.stride[d]:
            stride[d], step = step, step * shape[d]
    return replace(meta, shape=shape, stride=tuple(stride))
