"""Notes which calls read a parameter only in the copy that autocast makes of it.

    call                    its ATen ops                             the call reads the weight
    Linear(x)               _to_copy(w) = c, addmm(b, x, c)          as a cast alone
    Linear(x) once more     addmm(b, x, c), since autocast keeps c   as a cast alone
    embedding(w, tokens)    embedding(w, tokens)                     as it is
    w.to(bfloat16)          _to_copy(w) = c, and c is the result     as it is: the user casts it
    a leaf that asks        _to_copy(w) = c, addmm(b, x, c)          in an unknown way: with the copy it
    for w.dtype                                                      may compute something else

A stage gives a call of the first kind a copy that is made once per step (run/stage/cast_weights.py). All
calls that cast one weight in one forward share one copy, in whose precision its gradients are added up; so a
weight that some call casts in an unknown way is left to autocast everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor

from outsize.program.tape import Instruction, Weight
from outsize.program.tree import leaves

_COPY = torch.ops.aten._to_copy
# What a tensor has in common with its copy of another dtype.
_SAME = frozenset({"shape", "size", "ndim", "dim", "numel", "device", "is_cuda", "requires_grad", "layout"})
Casts = tuple[tuple[str, torch.dtype | None], ...]


@final
class WeightCasts:
    """Watches the ATen ops of the calls of one recording."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], Weight]] = {}
        self.begin(casting=False)

    def begin(self, *, casting: bool) -> None:
        """Begins a call; `casting` says whether autocast is on."""
        self.casting = casting
        self._cast: dict[Weight, Tensor] = {}
        self._plain: set[Weight] = set()
        self._unwatched: tuple[Weight, ...] = ()
        self._has_run = False  # An op has run since the last function of a leaf.

    def look(self, op: Any, read: Iterable[Any], weights: Mapping[int, Weight], out: Any) -> None:
        """Notes the weights and copies among the tensors that an op reads."""
        if not self.casting or op.namespace == "prim":  # Such an op asks a tensor for its device.
            return
        self._has_run = True
        for tensor in read:
            weight = weights.get(id(tensor))
            if weight is None:
                copy, copied = self._copies.get(id(tensor), (None, None))
                if copy is not None and copied is not None and copy() is tensor:
                    self._cast.setdefault(copied, tensor)
            elif op.overloadpacket is _COPY and _is_lower(tensor, out):
                self._cast[weight] = out
                self._copies[id(out)] = weakref.ref(out), weight
            else:
                self._plain.add(weight)

    def asked(self, function: Any, read: Iterable[Any], weights: Mapping[int, Weight], out: Any) -> None:
        """Notes a function that a leaf has called: one that returns the copy, one of the user's, or one that
        has run no op, may tell the weight from its copy.
        """
        if not self.casting:
            return
        self._plain |= self._returned(out)
        getter = getattr(function, "__self__", None) if _name(function) == "__get__" else None
        has_run, self._has_run = self._has_run, False
        if (has_run and is_of_torch(function)) or _name(getter or function) in _SAME:
            return
        self._plain |= {weights[id(tensor)] for tensor in read if id(tensor) in weights}

    def leave(self, weights: Iterable[Weight]) -> None:
        """Notes that the call was not watched to its end; it may cast these weights."""
        self._unwatched = tuple(weights) if self.casting else ()

    def end(self, out: Any, takes_copy: Callable[[Weight], bool]) -> Casts:
        """Returns the parameters that the call casts, with the dtype, or None where it is not known to read
        them in no other way.

        `takes_copy` says whether the call computes the same with the copy of a weight in place of the weight.
        """
        if not (self._cast or self._unwatched):
            return ()
        for weight in self._returned(out):
            del self._cast[weight]
        casts = dict[str, torch.dtype | None]()
        for weight, copy in self._cast.items():
            alone = weight not in self._plain and takes_copy(weight)
            casts[weight.name] = copy.dtype if alone else None
        return tuple((casts | dict.fromkeys((weight.name for weight in self._unwatched), None)).items())

    def copies(self, casts: Casts) -> list[Tensor]:
        """Returns the copies of the running call that `end` has returned with a dtype."""
        alone = {name for name, dtype in casts if dtype is not None}
        return [copy for weight, copy in self._cast.items() if weight.name in alone]

    def _returned(self, out: Any) -> set[Weight]:
        """Returns the weights whose copies are among results: the user has cast them, and not autocast."""
        returned = {id(leaf) for leaf in leaves(out) if isinstance(leaf, Tensor)}
        weights = {weight for weight, copy in self._cast.items() if id(copy) in returned}
        for weight in weights:
            self._copies.pop(id(self._cast[weight]), None)
        return weights


def known_casts(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Returns the instructions of a tape; a weight that some call casts in an unknown way has no dtype in all
    of them, and autocast casts it.
    """
    unknown = {name for i in instructions for name, dtype in i.casts if dtype is None}
    if not unknown:
        return tuple(instructions)
    return tuple(
        replace(i, casts=tuple((name, None if name in unknown else dtype) for name, dtype in i.casts))
        for i in instructions
    )


def is_of_torch(function: Any) -> bool:
    """Returns whether a function is torch's own, and not the `apply` of a user's autograd function."""
    home = getattr(function, "__module__", None) or "torch"
    return home.partition(".")[0] == "torch" and not isinstance(function, MethodType)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _is_lower(weight: Tensor, copy: Any) -> bool:
    """Returns whether a copy is one that autocast may have made."""
    lower = isinstance(copy, Tensor) and copy.is_floating_point() and copy.dtype.itemsize < 4
    return lower and weight.dtype is torch.float32
