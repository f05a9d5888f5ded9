"""Finds tensors that are hidden in arguments: in a closure, or in the attributes of an object (a cache).

A tape refers to tensors among the arguments. A tensor inside an object would be the fake of the recording at
every replay, and an object that a leaf fills would be filled again and again (rule 10).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final, final

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


@final
class ArgumentObjects:
    """The objects that were arguments of recorded calls, and may get tensors."""

    def __init__(self, weights: Container[int]) -> None:
        """Tensors with the ids `weights` may be in objects."""
        self._weights = weights
        # These objects were arguments of leaves; the error is raised if one gets a tensor.
        self._of_leaves: list[tuple[list[Any], Exception]] = []

    def insist_on_open(self, args: Any, problem_of: Callable[[], Exception], *, of_leaf: bool) -> None:
        """Raises the problem where an argument hides a tensor; those of leaves are looked at again at the
        end.
        """
        found = objects(args)
        if not found:
            return
        problem = problem_of()
        if hides_tensor(found, self._weights):
            raise problem
        if of_leaf:
            self._of_leaves.append((found, problem))

    def insist_on_unfilled(self) -> None:
        """Raises the problem of a leaf that has filled its arguments: at replay it gets the filled ones."""
        for found, problem in self._of_leaves:
            if hides_tensor(found, self._weights):
                raise problem

    def leaf_count(self) -> int:
        """Returns how many calls of leaves had such arguments."""
        return len(self._of_leaves)
