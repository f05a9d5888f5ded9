"""Computes tensors of others whose values are read later, and only the box that is asked for.

A library's own conversion of weights is run once on `DeferredTensor`s: they have shapes and dtypes, and
write down which operator made which from which. Asked for a box of a result, they go back to the boxes of the
files:

    gate_up = cat([stack([gate.0, gate.1]), stack([up.0, up.1])], 1)
    gate_up[1:2, :]  reads  gate.1 and up.1 alone

Operators that move values (cat, stack, transpose, split, slice and their like) pass boxes on. For any other
operator all of its inputs are read. A change of dtype is left out: who copies a box into a weight converts
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ATEN: Any = torch.ops.aten


@final
class ReadBox(NamedTuple):
    """A box of a tensor: where it begins, and its size, along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Read = Callable[[ReadBox], Tensor]


@final
class DeferredTensor(Tensor):
    """A tensor whose values `read` returns box by box; `twin` has its shape and dtype, on meta. One that
    `divides` reads rows without the others.
    """

    twin: Tensor
    read: Read
    leaves: frozenset[str]
    divides: bool

    @staticmethod
    def __new__(cls: Any, twin: Tensor, read: Read, leaves: frozenset[str]) -> DeferredTensor:
        """Makes the tensor; `leaves` are the names of the tensors from which it is computed."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=torch.device("cpu")
        )
        made.twin, made.read, made.leaves, made.divides = twin, read, leaves, False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns shape and dtype; there are no values to show."""
        return f"DeferredTensor({tuple(self.twin.shape)}, {self.twin.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Writes down the call: its results are deferred as well."""
        call = _DeferredCall(func, tuple(args), dict(kwargs or {}))
        if func is _ATEN._to_copy.default:
            return _same(args[0])
        twins = func(*_twins(call.args), **_twins(call.kwargs))
        if isinstance(twins, Tensor):
            return call.result(twins, None)
        return type(twins)(call.result(twin, at) for at, twin in enumerate(twins))

    def whole(self) -> ReadBox:
        """Returns the box of the whole tensor."""
        return ReadBox((0,) * self.twin.ndim, tuple(self.twin.shape))


@final
@dataclass(frozen=True)
class _DeferredCall:
    """One call of an operator, some of whose arguments are deferred."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def result(self, twin: Tensor, at: int | None) -> DeferredTensor:
        """Returns a result of the call, or its item `at`, as a deferred tensor."""
        inputs = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if _is_deferred(leaf)]
        rule = _RULES.get(self.func)

        def read(box: ReadBox) -> Tensor:
            if rule is not None:
                return rule(self, at or 0, box)
            values = self.func(*_values(self.args), **_values(self.kwargs))
            return _cut(values if at is None else values[at], box)

        leaves = frozenset[str]().union(*(tensor.leaves for tensor in inputs))
        made = DeferredTensor(twin, read, leaves)
        made.divides = self._keeps_rows() and all(tensor.divides for tensor in inputs)
        return made

    def _keeps_rows(self) -> bool:
        """Returns whether rows of the result are rows of the inputs, and not columns of all rows."""
        return self.func in _RULES and self.func not in _TRANSPOSES and _step_of(self) == 1


def deferred_file(twin: Tensor, read: Read, name: str, *, divides: bool) -> DeferredTensor:
    """Returns a tensor of a file, by its name there; it `divides` where rows are read without the others."""
    made = DeferredTensor(twin, read, frozenset((name,)))
    made.divides = divides
    return made


def _is_deferred(value: Any) -> bool:
    return isinstance(value, DeferredTensor)


def _same(tensor: DeferredTensor) -> DeferredTensor:
    made = DeferredTensor(tensor.twin, tensor.read, tensor.leaves)
    made.divides = tensor.divides
    return made


def _twins(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.twin if isinstance(leaf, DeferredTensor) else leaf, tree)


def _values(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _laid_out(leaf) if isinstance(leaf, DeferredTensor) else leaf, tree)


def _laid_out(tensor: DeferredTensor) -> Tensor:
    """Returns all values in the strides that the operator was told; `view`, for one, depends on them."""
    values, strides = tensor.read(tensor.whole()), tensor.twin.stride()
    if values.stride() == strides:
        return values
    return torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)


def _cut(tensor: Tensor, box: ReadBox) -> Tensor:
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _dim(call: _DeferredCall, position: int, ndim: int, default: int = 0) -> int:
    given = call.args[position] if len(call.args) > position else call.kwargs.get("dim", default)
    return given % ndim


def _moved(box: ReadBox, dim: int, by: int) -> ReadBox:
    """Returns the box, `by` further along `dim`."""
    return ReadBox((*box.offsets[:dim], box.offsets[dim] + by, *box.offsets[dim + 1 :]), box.sizes)


def _along(box: ReadBox, dim: int, offset: int, size: int) -> ReadBox:
    """Returns the box with another range along `dim`."""
    return ReadBox(
        (*box.offsets[:dim], offset, *box.offsets[dim + 1 :]), (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
    )


def _without(box: ReadBox, dim: int) -> ReadBox:
    return ReadBox((*box.offsets[:dim], *box.offsets[dim + 1 :]), (*box.sizes[:dim], *box.sizes[dim + 1 :]))


def _with(box: ReadBox, dim: int, offset: int) -> ReadBox:
    return ReadBox((*box.offsets[:dim], offset, *box.offsets[dim:]), (*box.sizes[:dim], 1, *box.sizes[dim:]))


# -- how a box of a result is made from boxes of the inputs -------------------------------------------


def _pass(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    return call.args[0].read(box)


def _cat(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    tensors = call.args[0]
    dim = _dim(call, 1, tensors[0].ndim)
    return torch.cat([t.read(part) for t, part in _pieces(tensors, box, dim)], dim)


def _pieces(tensors: Sequence[Any], box: ReadBox, dim: int) -> Iterator[tuple[Any, ReadBox]]:
    """Yields the tensors, concatenated along `dim`, in which the box lies, and the box in each."""
    begin, end, at = box.offsets[dim], box.offsets[dim] + box.sizes[dim], 0
    for tensor in tensors:
        size = tensor.shape[dim]
        start, stop = max(begin, at), min(end, at + size)
        if start < stop:
            yield tensor, _along(box, dim, start - at, stop - start)
        at += size


def _stack(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    tensors = call.args[0]
    dim = _dim(call, 1, tensors[0].ndim + 1)
    first, inner = box.offsets[dim], _without(box, dim)
    return torch.stack([t.read(inner) for t in tensors[first : first + box.sizes[dim]]], dim)


def _permuted(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    """transpose, t and permute: finds out where each dim comes from by a trial on the dims' numbers."""
    ndim = call.args[0].ndim
    trial = call.func(torch.empty(tuple(range(1, ndim + 1)), device="meta"), *call.args[1:])
    source = [size - 1 for size in trial.shape]
    offsets, sizes = [0] * ndim, [0] * ndim
    for dim, origin in enumerate(source):
        offsets[origin], sizes[origin] = box.offsets[dim], box.sizes[dim]
    return call.args[0].read(ReadBox(tuple(offsets), tuple(sizes))).permute(source)


def _step_of(call: _DeferredCall) -> int:
    """Returns the step of a slice; 1 for any other call."""
    return call.args[4] if call.func is _ATEN.slice.Tensor and len(call.args) > 4 else 1


def _slice(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    given: Any = (*call.args, *(0, None, None, 1)[len(call.args) - 1 :])
    tensor, dim, start, end, _ = given
    if _step_of(call) != 1:
        return _cut(call.func(tensor.read(tensor.whole()), *call.args[1:]), box)
    dim %= tensor.ndim
    begin = slice(start, end).indices(tensor.shape[dim])[0]
    return tensor.read(_moved(box, dim, begin))


def _split(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    tensor, sizes = call.args[:2]
    dim = _dim(call, 2, tensor.ndim)
    before = at * sizes if isinstance(sizes, int) else sum(sizes[:at])
    return tensor.read(_moved(box, dim, before))


def _unbind(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    dim = _dim(call, 1, call.args[0].ndim)
    return call.args[0].read(_with(box, dim, at)).squeeze(dim)


def _select(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    tensor, dim, index = call.args
    dim %= tensor.ndim
    return tensor.read(_with(box, dim, index % tensor.shape[dim])).squeeze(dim)


def _squeeze(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    tensor, dim = call.args
    dim %= tensor.ndim
    return tensor.read(box if tensor.shape[dim] != 1 else _with(box, dim, 0)).reshape(box.sizes)


def _unsqueeze(call: _DeferredCall, at: int, box: ReadBox) -> Tensor:
    tensor, dim = call.args
    return tensor.read(_without(box, dim % (tensor.ndim + 1))).reshape(box.sizes)


_TRANSPOSES = (_ATEN.transpose.int, _ATEN.t.default, _ATEN.permute.default)
_RULES: dict[Any, Callable[[_DeferredCall, int, ReadBox], Tensor]] = {
    **dict.fromkeys((_ATEN.alias.default, _ATEN.detach.default, _ATEN.clone.default), _pass),
    **dict.fromkeys(_TRANSPOSES, _permuted),
    **dict.fromkeys((_ATEN.split.Tensor, _ATEN.split_with_sizes.default), _split),
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.slice.Tensor: _slice,
    _ATEN.unbind.int: _unbind,
    _ATEN.select.int: _select,
    _ATEN.squeeze.dim: _squeeze,
    _ATEN.unsqueeze.default: _unsqueeze,
}
