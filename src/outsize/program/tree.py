"""Walks the containers that models take and return: tuple, list, dict, dataclass, named tuple, slice.

`map_leaves(fn, tree)` rebuilds the same structure with `fn` applied to every leaf. Containers keep their
type, so a transformers `ModelOutput` or `BatchEncoding` comes back as one. Objects of other types are leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from torch import Tensor

from outsize.program.values.containers import refill

Fn = Callable[[Any], Any]
ITEM: Final = "[]"
FIELD: Final = "."
Step = tuple[str, Any]
"""Is ITEM with an index or a key, or FIELD with a name."""
Steps = tuple[Step, ...]


def map_leaves(fn: Fn, tree: Any) -> Any:
    """Returns the tree with `fn(leaf)` for every leaf."""
    if _walk_of(type(tree)) is None:
        return fn(tree)
    if isinstance(tree, tuple | list):
        return _sequence(fn, tree)
    if isinstance(tree, dict | UserDict):
        return _mapping(fn, tree)
    if isinstance(tree, slice):
        return slice(map_leaves(fn, tree.start), map_leaves(fn, tree.stop), map_leaves(fn, tree.step))
    return _record(fn, tree)


def _sequence(fn: Fn, tree: tuple[Any, ...] | list[Any]) -> Any:
    items = [map_leaves(fn, item) for item in tree]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # A subclass may check or compute in its own `__new__`, so that of tuple is called.
        return tuple.__new__(type(tree), items)
    kind = type(tree)
    return kind(items) if kind in (tuple, list) or isinstance(tree, list) else tuple(items)


def _mapping(fn: Fn, tree: dict[Any, Any] | UserDict[Any, Any]) -> Any:
    items = {key: map_leaves(fn, value) for key, value in tree.items()}
    if type(tree) is dict:
        return items
    if dataclasses.is_dataclass(tree):
        # A ModelOutput is a dict and a dataclass: None fields are no items, so it is rebuilt by name.
        return type(tree)(**items)
    clone = copy.copy(tree)
    if isinstance(clone, dict):
        refill(clone, items)
    else:
        clone.update(items)
    return clone


def _record(fn: Fn, tree: Any) -> Any:
    clone = copy.copy(tree)
    for field in dataclasses.fields(tree):
        object.__setattr__(clone, field.name, map_leaves(fn, getattr(tree, field.name)))
    return clone


def _is_ref(tree: Any) -> bool:
    return getattr(type(tree), "__tape_leaf__", False)


def leaves(tree: Any) -> Iterator[Any]:
    """Yields all leaves in order."""
    items: list[Any] = []
    _gather(tree, items)
    return iter(items)


def _gather(tree: Any, items: list[Any]) -> None:
    """Collects leaves as map_leaves walks, without rebuilding: this is the most called function of a
    recording.
    """
    walk = _walk_of(type(tree))
    if walk is None:
        items.append(tree)
    else:
        for item in walk(tree):
            _gather(item, items)


@lru_cache(maxsize=1024)
def _walk_of(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Returns a function from such a container to its items; None for a leaf."""
    if issubclass(kind, tuple | list):
        return iter
    if issubclass(kind, dict | UserDict):
        return lambda tree: tree.values()
    if kind is slice:
        return lambda tree: (tree.start, tree.stop, tree.step)
    if dataclasses.is_dataclass(kind) and not getattr(kind, "__tape_leaf__", False):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda tree: [getattr(tree, name) for name in names]
    return None


def children(tree: Any) -> list[tuple[Step, Any]]:
    """Returns (step, item) of a container: `(("[]", 0), x)`, `((".", "loss"), y)`; of a leaf, none."""
    if isinstance(tree, tuple | list):
        return [((ITEM, index), item) for index, item in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [((ITEM, key), item) for key, item in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not _is_ref(tree):
        return [((FIELD, field.name), getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return []


def paths(tree: Any, wanted: Callable[[Any], bool], steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """Yields (steps, part) of the parts, containers too, that are wanted."""
    if wanted(tree):
        yield steps, tree
    for step, item in children(tree):
        yield from paths(item, wanted, (*steps, step))


def part_at(tree: Any, steps: Steps) -> Any:
    """Returns the part to which the steps of `paths` lead, in a tree of the same structure."""
    for kind, key in steps:
        tree = tree[key] if kind == ITEM else getattr(tree, key)
    return tree


def accessor(steps: Steps) -> str:
    """Returns steps as a reader writes them: `[0].loss`. It is a name, and nothing runs it."""
    return "".join(f"[{key!r}]" if kind == ITEM else f".{key}" for kind, key in steps)


def with_copied_tensors(tree: Any) -> Any:
    """Returns the tree with copies of its tensors; tensors that share memory share it in the copy, too."""
    copies: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.grad_fn is not None:  # torch copies no tensor of a graph
            return leaf.detach().clone().requires_grad_()
        return copy.deepcopy(leaf, copies)

    return map_leaves(copied, tree)
