"""Finds tensors that are hidden in arguments: in a closure, or in the attributes of an object (a cache).

A tape refers to tensors among the arguments. A tensor inside an object would be the fake of the recording at
every replay, and an object that a leaf fills would be filled again and again (rule 10).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

from torch import Tensor, nn

from outsize.capture.fakes.fake_model import is_fake
from outsize.program.objects import Scope, walk
from outsize.program.tree import leaves, tensors_in
from outsize.program.values.attributes import attributes_of

_SCOPE: Final = Scope(functions=True)


def objects(args: Any) -> list[Any]:
    """Returns the arguments that may hold tensors and are none."""
    candidates = (leaf for leaf in leaves(args) if not isinstance(leaf, Tensor | nn.Module))
    return [leaf for leaf in candidates if _SCOPE.opens(leaf) or attributes_of(leaf)]


def hides_tensor(arguments: list[Any], weights: Container[int]) -> bool:
    """Says whether one of these objects holds a tensor of this forward other than `weights` (ids)."""
    parts = (part for _, part in walk(arguments, _SCOPE) if isinstance(part, Tensor))
    # Those in slots and in registered containers are found as in a batch.
    return any(is_fake(tensor) and id(tensor) not in weights for tensor in (*parts, *tensors_in(arguments)))
