"""Walks the containers that models take and return: tuple, list, dict, dataclass, named tuple, slice.

`map_leaves(fn, tree)` rebuilds the same structure with `fn` applied to every leaf. Containers keep their
type, so a transformers `ModelOutput` or `BatchEncoding` comes back as one. Objects of other types are leaves.
`parts(batch)` and `map_parts` walk a whole batch, the arguments of a step, and open such objects as well.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import hashlib
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from types import MethodType, ModuleType, NoneType
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from outsize.program.values.attributes import attributes_of, blank_like, is_plain_class, with_attributes
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
    return map_items(partial(map_leaves, fn), tree)


def map_items(fn: Fn, tree: Any) -> Any:
    """Returns the container with `fn(item)` for each of its own items, which may be containers."""
    if isinstance(tree, tuple | list):
        return _sequence(fn, tree)
    if isinstance(tree, dict | UserDict):
        return _mapping(fn, tree)
    if isinstance(tree, slice):
        return slice(fn(tree.start), fn(tree.stop), fn(tree.step))
    return _record(fn, tree)


def is_container(tree: Any) -> bool:
    """Returns whether this is one of the containers that are walked, and no leaf."""
    return _walk_of(type(tree)) is not None


def _sequence(fn: Fn, tree: tuple[Any, ...] | list[Any]) -> Any:
    items = [fn(item) for item in tree]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # A subclass may check or compute in its own `__new__`, so that of tuple is called.
        return tuple.__new__(type(tree), items)
    kind = type(tree)
    return kind(items) if kind in (tuple, list) or isinstance(tree, list) else tuple(items)


def _mapping(fn: Fn, tree: dict[Any, Any] | UserDict[Any, Any]) -> Any:
    items = {key: fn(value) for key, value in tree.items()}
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
        object.__setattr__(clone, field.name, fn(getattr(tree, field.name)))
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


# -- batches -------------------------------------------------------------------------------------------
#
#     (args, kwargs, target)
#     args[0]              a Data of torch_geometric   an object: its attributes and slots
#     args[0]._store       a storage                   an object in it
#     args[0]._store['x']  a tensor                    a part
#
# What is given to a model is opened further than what its own calls pass on, which may be an object that is
# written in the call (a cache) and must stay the same one. Types in torch's pytree registry are opened by the
# functions that their authors have registered, containers as above, and other objects of Python classes by
# their attributes and slots. So are attributes of a user's own list or dict, if they hold tensors. An object
# is copied only where a part of it changes.

IsWhole = Callable[[Steps, Any], bool]
_BUILT_IN: Final = (tuple, list, dict, OrderedDict, defaultdict)  # Opened here, with subclasses of their own.
_CLOSED: Final = (Tensor, nn.Module, Enum, type, ModuleType, PurePath)
_VALUES: Final = (str, bytes, int, bool, NoneType, torch.dtype, torch.device, torch.layout, Enum, type, range)
_OF_SLICE: Final = ("start", "stop", "step")
_BACK: Final = (weakref.ref, MethodType)  # They lead back to an object that may be a part of the batch.
_ROUNDED: Final = (float, complex)  # 0.0 == -0.0, and NaN != NaN, but not for a program.


@final
class _Node(NamedTuple):
    """Holds what the walk has opened: items with their steps, how it is made again, and what else it says.

    An object, which may lead back to itself, is made in two steps: `blank()`, and `rebuilt` on that with the
    new items. Of what has no `blank`, `rebuilt` gets None.
    """

    items: list[tuple[Step, Any]]
    rebuilt: Callable[[Any, list[Any]], Any]
    facts: Any = None
    blank: Callable[[], Any] | None = None


def parts(batch: Any, is_whole: IsWhole | None = None) -> list[tuple[Steps, Any]]:
    """Returns the parts of a batch in order, with the steps to each; a node that `is_whole` is one part."""
    found: list[tuple[Steps, Any]] = []

    def keep(steps: Steps, part: Any) -> Any:
        found.append((steps, part))
        return part

    _BatchWalk(keep, is_whole).of(batch)
    return found


def tensors_in(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in the order of its parts."""
    return [part for _, part in parts(batch) if isinstance(part, Tensor)]


def map_parts(fn: Callable[[Steps, Any], Any], batch: Any, is_whole: IsWhole | None = None) -> Any:
    """Returns the batch with `fn(steps, part)` in place of each part; `parts` has them in the same order."""
    return _BatchWalk(fn, is_whole).of(batch)


def map_tensors(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """Returns the batch with `fn(tensor)` in place of each tensor."""
    return map_parts(lambda _, part: fn(part) if isinstance(part, Tensor) else part, batch)


def with_copied_tensors(batch: Any) -> Any:
    """Returns the batch with copies of its tensors; tensors that share memory share it in the copy, too."""
    copies: dict[int, Any] = {}

    def copied(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:  # torch copies no tensor of a graph
            return tensor.detach().clone().requires_grad_()
        return copy.deepcopy(tensor, copies)

    return map_tensors(copied, batch)


def key_of(batch: Any, of_tensor: Callable[[Tensor], Hashable]) -> Hashable:
    """Returns what is equal for batches of one structure whose tensors agree in `of_tensor`.

    Numbers, texts and arrays count by value. An object that cannot be looked into counts by identity, and
    lives as long as the key.
    """
    numbers: dict[int, int] = {}

    def key(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return of_tensor(value)
        node = _opened(value)
        if node is None:
            return _key_of_leaf(value, numbers)
        if node.blank is not None:
            if id(value) in numbers:
                return numbers[id(value)]
            numbers[id(value)] = len(numbers)
        if type(value) in (tuple, list):
            return type(value), *(key(item) for _, item in node.items)
        facts = None if node.facts is None else key(node.facts)
        return type(value), facts, *((step, key(item)) for step, item in node.items)

    return key(batch)


def _key_of_leaf(value: Any, numbers: Mapping[int, int]) -> Hashable:
    kind = type(value)
    if isinstance(value, _VALUES):
        return kind, value
    if isinstance(value, _ROUNDED):
        return kind, repr(value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            return kind, value.shape, tuple(_key_of_leaf(item, numbers) for item in np.ravel(value))
        return kind, value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).digest()
    if isinstance(value, bytearray | array.array | memoryview):
        return kind, bytes(value)
    if isinstance(value, set | frozenset):
        return kind, frozenset(_key_of_leaf(item, numbers) for item in value)
    if isinstance(value, _BACK):
        owner = _owner_of(value)
        return kind, numbers.get(id(owner), Identity(owner)), getattr(value, "__func__", None)
    return kind, Identity(value)


def _owner_of(value: weakref.ref[Any] | MethodType) -> Any:
    """Returns the object of a weak reference or of a bound method."""
    return value() if isinstance(value, weakref.ref) else value.__self__


@final
class Identity:
    """Equals itself for one and the same object alone, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@final
class _BatchWalk:
    """Walks one batch and applies `fn` to its parts; an object that is met again is the same copy."""

    def __init__(self, fn: Callable[[Steps, Any], Any], is_whole: IsWhole | None) -> None:
        self._fn, self._is_whole = fn, is_whole
        self._met: dict[int, tuple[Any, Any]] = {}  # An object's id: the object, and what stands for it.
        self._changes = 0

    def of(self, value: Any, steps: Steps = ()) -> Any:
        if self._is_whole is not None and self._is_whole(steps, value):
            return self._noted(value, self._fn(steps, value))
        node = _opened(value)
        if node is None:
            part = self._followed(value) if isinstance(value, _BACK) else self._fn(steps, value)
            return self._noted(value, part)
        if node.blank is not None:
            return self._object(value, node, node.blank, steps)
        return node.rebuilt(None, [self.of(item, (*steps, step)) for step, item in node.items])

    def _noted(self, old: Any, new: Any) -> Any:
        self._changes += new is not old
        return new

    def _object(self, value: Any, node: _Node, blank: Callable[[], Any], steps: Steps) -> Any:
        if id(value) in self._met:
            return self._noted(value, self._met[id(value)][1])
        clone, before = blank(), self._changes
        self._met[id(value)] = value, clone
        items = [self.of(item, (*steps, step)) for step, item in node.items]
        if self._changes == before:
            self._met[id(value)] = value, value
            return value
        return node.rebuilt(clone, items)

    def _followed(self, value: Any) -> Any:
        """Returns a weak reference to, or a method of, what stands for its object in the new batch."""
        owner = _owner_of(value)
        met, clone = self._met.get(id(owner), (None, None))
        if met is not owner or owner is None or clone is owner:
            return value
        return weakref.ref(clone) if isinstance(value, weakref.ref) else MethodType(value.__func__, clone)


def _opened(value: Any) -> _Node | None:
    """Returns what is in a value, or None for a part that is not looked into."""
    kind = type(value)
    registered = None if kind in _BUILT_IN else _pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        return _of_registered(value, registered)
    if is_container(value):
        return _of_container(value)
    if isinstance(value, _CLOSED) or not is_plain_class(kind):
        return None
    attributes = attributes_of(value)
    if not attributes:
        return None
    pairs = [((FIELD, name), item) for name, item in attributes.items()]
    return _Node(pairs, partial(_with_fields, attributes), blank=partial(blank_like, value))


def _with_fields(names: Iterable[str], clone: Any, new: Iterable[Any]) -> Any:
    with_attributes(clone, dict(zip(names, new, strict=True)))
    return clone


def _of_container(value: Any) -> _Node:
    """Opens a container: its items, and those attributes of one of a user's own class that hold tensors."""
    if type(value) is slice:
        items: list[tuple[Step, Any]] = [((FIELD, name), getattr(value, name)) for name in _OF_SLICE]
    else:
        items = children(value)
    attributes = {} if type(value) in _BUILT_IN else attributes_of(value)
    known = {key: item for (kind, key), item in items if kind == ITEM}
    same = [name for name, item in attributes.items() if name in known and known[name] is item]
    held = {id(value), *(id(item) for _, item in items)}
    beside = [(name, item) for name, item in attributes.items() if name not in same]
    extra = [name for name, item in beside if _holds_tensors(item, set(held))]
    if not same and not extra:
        return _Node(items, lambda _, new: map_items(_next_of(new), value))

    def rebuilt(blank: Any, new: list[Any]) -> Any:
        fresh = dict(zip((key for (_, key), _ in items), new, strict=False))
        clone = _refilled(blank, value, fresh)
        with_attributes(clone, {name: fresh[name] for name in same})
        with_attributes(clone, dict(zip(extra, new[len(items) :], strict=True)))
        return clone

    pairs = [*items, *(((FIELD, name), attributes[name]) for name in extra)]
    is_fixed = isinstance(value, tuple)
    return _Node(pairs, rebuilt, blank=None if is_fixed else partial(copy.copy, value))


def _refilled(clone: Any, value: Any, items: Mapping[Any, Any]) -> Any:
    """Returns the clone of a container with these items; of a tuple there is none yet."""
    if isinstance(value, tuple):
        clone = tuple.__new__(type(value), items.values())
        with_attributes(clone, attributes_of(value))
    elif isinstance(value, list):
        refill(clone, items.values())
    elif isinstance(value, dict):
        refill(clone, items)
    elif isinstance(value, UserDict):
        clone.data = dict(items)
    else:
        for name, item in items.items():
            object.__setattr__(clone, name, item)
    if getattr(value, "__dict__", None) is value:  # Its keys are its attributes.
        object.__setattr__(clone, "__dict__", clone)
    return clone


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Returns whether there is a tensor in a value, but for what was `seen`."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _CLOSED) or not (is_container(value) or is_plain_class(type(value))):
        return False
    held = (*(item for _, item in children(value)), *attributes_of(value).values())
    return any(_holds_tensors(item, seen) for item in held)


def _of_registered(value: Any, registered: Any) -> _Node:
    """Opens a value by the functions that are registered for its type."""
    items, context = registered.flatten_fn(value)
    steps: list[Step] = [(ITEM, number) for number in range(len(items))]
    if registered.flatten_with_keys_fn is not None:
        steps = [_step(key) for key, _ in registered.flatten_with_keys_fn(value)[0]]
    pairs = list(zip(steps, items, strict=True))
    return _Node(pairs, lambda _, new: registered.unflatten_fn(new, context), context)


def _step(key: Any) -> Step:
    """Returns the step of a key of torch's pytree: an attribute, an index or a key of a mapping."""
    if hasattr(key, "name"):
        return FIELD, key.name
    return ITEM, key.idx if hasattr(key, "idx") else getattr(key, "key", key)


def _next_of(items: list[Any]) -> Fn:
    left = iter(items)
    return lambda _: next(left)
