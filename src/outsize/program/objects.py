"""Walks what Python objects hold, compares it before and after a call, and changes or restores it.

    cache.layers[3].keys    roots = [cache]    path (0, (".", "layers"), ("[]", 3), (".", "keys"))

A path is the number of a root and the steps from it. `walk` goes breadth first, so that parents come before
their children, and looks into each object once, at its shortest path; cycles therefore end. `diff` compares
objects by identity: what an object held before with what the same object holds now. A new object belongs to
the change that brings it in and is no change of its own.
`tree` is the neighbour for the containers that models take and return, which it rebuilds.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.program.values.containers import builtin_type, elements_of, items_of, refill
from outsize.program.values.shared_storage import copies_that_share
from outsize.program.values.wrapper_tensors import copied_by_parts, is_wrapper

Step = tuple[str, Any]
Path = tuple[Any, ...]  # the number of a root, then steps
Change = tuple[Path, Any]  # the value that is there now, or ABSENT

ATTRIBUTE: Final = "."
ITEM: Final = "[]"
MEMBER: Final = "{}"  # of a set, by number; a change of a set has number 0 and brings all members
KEY_ORDER: Final = (
    "<"  # of a dict (ITEM) or of attributes (ATTRIBUTE): a change that brings their keys in order
)
HELD_BY_CODE: Final = "()"  # closures, bound objects and arguments, by number

# A root is at depth 1. transformers' EncoderDecoderCache holds caches, which hold lists of layers, which hold
# dicts of tensors.
DEPTH: Final = 6

NUMBERS_AND_TEXT: Final = (bool, int, float, complex, str, bytes)
# Compared by value.
PLAIN: Final = (
    *NUMBERS_AND_TEXT,
    *(NoneType, EllipsisType, type, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Classes whose objects have attributes that are never looked into, with the reason for each.
CLOSED: Final[Mapping[type, str]] = {
    **dict.fromkeys(PLAIN, "it is a value without parts"),
    Tensor: "it is a value; its elements are the business of whoever asks",
    nn.Module: "a model's modules are visited by their names, not as parts of something else",
    ModuleType: "its globals belong to the process, not to a call",
    FunctionType: "it is code; Scope.functions opens what it holds",
    MethodType: "it is code; Scope.functions opens what it holds",
    functools.partial: "it is code; Scope.functions opens what it holds",
}

_CLOSED: Final = tuple(CLOSED)
_CODE: Final = (FunctionType, MethodType, functools.partial)
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
# Most attributes of modules have these very classes, which need no other question.
_WITHOUT_PARTS: Final = frozenset((*NUMBERS_AND_TEXT, NoneType))
_BARE: Final = frozenset((dict, list, tuple, set, frozenset, deque))  # Their own objects have no attributes.
_BUILT_IN: Final = _BARE | {OrderedDict}
# What torch itself keeps in every module: tables and hooks. `training` is the user's.
MODULE_TABLES: Final = frozenset(vars(nn.Module())) - {"training"}


@final
class _Absent(Enum):
    ABSENT = 0


ABSENT: Final = _Absent.ABSENT


@final
@dataclass(frozen=True, slots=True)
class Scope:
    """Says what a walk looks into besides lists, tuples, dicts and sets.

    `attributes`: the attributes of objects whose class is not closed. `functions`: what code holds, namely
    closures, the objects of bound methods, and the arguments of partials; such parts cannot be changed.
    `modules`: whether a root that is a module is closed too, or has its attributes looked into without or
    with torch's own tables (parameters, buffers, children, hooks). `writes`: whether a tensor that was
    written in place counts as a change. `key_order`: whether keys in another order count as a change, as when
    a key is removed and added again. `tensors`: the attributes that somebody has set on tensors, such as
    `weight.scale`.
    """

    attributes: bool = True
    functions: bool = False
    modules: Literal["closed", "attributes", "attributes and tables"] = "closed"
    writes: bool = False
    key_order: bool = False
    tensors: bool = False

    def opens(self, value: Any, *, is_root: bool = False) -> bool:
        """Whether a walk looks into this value."""
        kind = type(value)
        if kind in _WITHOUT_PARTS:
            return False
        if kind in _BUILT_IN or isinstance(value, _CONTAINERS):
            return True
        if isinstance(value, Tensor):
            return self.tensors and bool(vars(value))
        if isinstance(value, _CODE):
            return self.functions
        if isinstance(value, nn.Module):
            return is_root and self.modules != "closed"
        return self.attributes and not isinstance(value, _CLOSED) and hasattr(value, "__dict__")

    def attributes_of(self, value: Any, *, is_root: bool) -> dict[str, Any] | None:
        """The attributes of an opened object that the walk sees; None where it sees none of them."""
        if type(value) in _BARE:
            return None
        if isinstance(value, nn.Module) and is_root:
            hidden = MODULE_TABLES if self.modules == "attributes" else frozenset[str]()
            return {name: part for name, part in vars(value).items() if name not in hidden}
        if isinstance(value, Tensor):
            return dict(vars(value)) if self.tensors else None
        is_open = self.attributes and not isinstance(value, _CLOSED) and hasattr(value, "__dict__")
        return dict(vars(value)) if is_open else None


_DEFAULT: Final = Scope()


@final
class Holder(NamedTuple):
    """An object that a walk has looked into, and its parts.

    A model of 80 layers has ten thousands of them, of which a tuple is made in a third of a dataclass's time.
    """

    path: Path
    value: Any
    parts: dict[Step, Any]


@final
@dataclass(frozen=True, slots=True)
class ObjectSnapshot:
    """Holds what the objects below some roots contain at one moment, by the id of the object."""

    scope: Scope
    holders: dict[int, Holder]
    versions: dict[int, int] = field(default_factory=dict[int, int])  # of tensors, by id, for Scope.writes

    def at(self, path: Path) -> Any:
        """The value that was at the path of a change, or ABSENT."""
        held = next((each for each in self.holders.values() if each.path == path[:-1]), None)
        return ABSENT if held is None else held.parts.get(path[-1], ABSENT)

    def restore(self) -> None:
        """Gives every container and object that has other parts now those back that it had, in their order.

        What is as it was is not touched: another thread may be using it.
        """
        for holder in self.holders.values():
            value, parts, is_root = holder.value, holder.parts, len(holder.path) == 1
            if not parts and _is_bare(value):
                continue
            if _are_same(parts, _parts(value, self.scope, is_root=is_root)):
                continue
            attributes = self.scope.attributes_of(value, is_root=is_root)
            if attributes is not None:
                for name in attributes:
                    del vars(value)[name]
                vars(value).update(_keyed(parts, ATTRIBUTE))
            if isinstance(value, list | deque):
                refill(value, _keyed(parts, ITEM).values())
            elif isinstance(value, dict | set):
                refill(value, _keyed(parts, ITEM) if isinstance(value, dict) else _members(parts))


def holders(roots: Iterable[Any], scope: Scope = _DEFAULT) -> Iterator[Holder]:
    """Every object that can be looked into, once, parents first."""
    seen: set[int] = set()
    left = deque[tuple[Path, Any]](
        ((n,), root) for n, root in enumerate(roots) if scope.opens(root, is_root=True)
    )
    while left:
        path, value = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_bare(value):
            yield Holder(path, value, {})
            continue
        holder = Holder(path, value, _parts(value, scope, is_root=len(path) == 1))
        yield holder
        if len(path) < DEPTH:
            for step, part in holder.parts.items():
                if id(part) not in seen and scope.opens(part):
                    left.append(((*path, step), part))


def _is_bare(value: Any) -> bool:
    """Whether it is an empty container without attributes, as nearly all tables of hooks are."""
    kind = type(value)
    return (kind in _BARE or (kind is OrderedDict and not vars(value))) and not value


def walk(roots: Iterable[Any], scope: Scope = _DEFAULT) -> Iterator[tuple[Path, Any]]:
    """Path and value of everything below the roots, parents first."""
    for holder in holders(roots, scope):
        yield from (((*holder.path, step), part) for step, part in holder.parts.items())


def snapshot(roots: Iterable[Any], scope: Scope = _DEFAULT) -> ObjectSnapshot:
    """Returns what everything below the roots holds now, and keeps these objects alive."""
    held = {id(holder.value): holder for holder in holders(roots, scope)}
    if not scope.writes:
        return ObjectSnapshot(scope, held)
    tensors = (part for holder in held.values() for part in holder.parts.values() if isinstance(part, Tensor))
    return ObjectSnapshot(scope, held, {id(t): t._version for t in tensors if not t.is_inference()})


def diff(before: ObjectSnapshot, after: ObjectSnapshot) -> list[Change]:
    """The changes that make of the first what the second is; paths are those of the first."""
    versions = before.versions, after.versions
    changes: list[Change] = []
    for key, old in before.holders.items():
        if key in after.holders:
            new = after.holders[key].parts
            steps = _changes(old.value, old.parts, new, versions)
            steps += _moved_keys(old.parts, new) if before.scope.key_order else []
            changes += (((*old.path, step), value) for step, value in steps)
    return changes


def model_copy(model: nn.Module) -> nn.Module:
    """A deep copy of the model, also where a module holds a tensor of a graph, which torch refuses to copy.

    Such a tensor (the weight that torch.nn.utils.weight_norm has computed) is copied as a value. Weights that
    share memory share that of the copy, and have copies of the attributes that were set on them. Quantized
    ones are copied by what they are made of: not each of them can be cloned. A module of TorchScript copies
    its weights as values of a graph: they become weights again.
    """
    weights = (*model.parameters(), *model.buffers())
    copies: dict[int, Any] = dict(copies_that_share(weights))
    copies |= {id(weight): copied_by_parts(weight) for weight in weights if is_wrapper(weight)}
    for _, part in walk(list(model.modules()), Scope(modules="attributes and tables")):
        if isinstance(part, Tensor) and part.grad_fn is not None:
            copies[id(part)] = part.detach().clone().requires_grad_(part.requires_grad)
    copied = copy.deepcopy(model, copies)
    copy_attributes(weights, copies)
    for weight in copied.parameters():
        if weight.grad_fn is not None:
            weight.detach_().requires_grad_()
    return copied


def copy_attributes(tensors: Iterable[Tensor], copies: dict[int, Any]) -> None:
    """Gives the copies of tensors, by the ids of these, copies of attributes such as `weight.scale`.

    The deep copy of a torch.nn.Parameter leaves them out. `copies` is the memo of that deep copy.
    """
    for tensor in tensors:
        twin = copies.get(id(tensor))
        for name, value in vars(tensor).items() if twin is not None and twin is not tensor else ():
            if name not in vars(twin):
                vars(twin)[name] = copy.deepcopy(value, copies)


def look_up(roots: Sequence[Any], path: Path) -> Any:
    """Returns what is at a path of attributes and items, or ABSENT."""
    value: Any = roots[path[0]]
    for kind, key in path[1:]:
        try:
            value = vars(value)[key] if kind == ATTRIBUTE else value[key]
        except (LookupError, TypeError):
            return ABSENT
    return value


def fits(roots: Sequence[Any], path: Path) -> bool:
    """Whether there is an object at the path's end that `apply` can change."""
    holder, (kind, key) = look_up(roots, path[:-1]), path[-1]
    if kind == ATTRIBUTE:
        return holder is not ABSENT and hasattr(holder, "__dict__")
    if isinstance(holder, list | deque):
        return isinstance(key, int) and key <= len(holder)
    return isinstance(holder, set if kind == MEMBER else dict)


def apply(roots: Sequence[Any], changes: Iterable[Change]) -> None:
    """Makes the changes on these objects; all paths are those before the first change.

    Raises LookupError, before anything is changed, where nothing is at a path.
    """
    to_change = [(look_up(roots, path[:-1]), path, value) for path, value in changes]
    for holder, path, _ in to_change:
        if holder is ABSENT:
            raise LookupError(f"no object at {path[:-1]}")
    for holder, path, value in to_change:
        _change(holder, path[-1], value)


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """How `fingerprint` compares: which classes by value, tensors by what, and all other objects by what."""

    by_value: tuple[type, ...]
    of_tensor: Callable[[Tensor], Any]
    of_object: Callable[[Any], Any]


def fingerprint(value: Any, how: Comparison, depth: int = DEPTH) -> Any:
    """A hashable value that is equal for equal numbers, texts, and containers of them."""
    if isinstance(value, how.by_value):
        return type(value), value
    if isinstance(value, Tensor):
        return how.of_tensor(value)
    if not isinstance(value, _CONTAINERS) or not depth:
        return how.of_object(value)
    if isinstance(value, dict):
        if not dict.__len__(value):
            return (type(value),)  # Each module has ten tables of hooks, nearly all of them empty.
        items = items_of(value)
        return type(value), *((fingerprint(k, how), fingerprint(v, how, depth - 1)) for k, v in items)
    parts = (fingerprint(part, how, depth - 1) for part in elements_of(value))
    return type(value), *([frozenset(parts)] if isinstance(value, set | frozenset) else parts)


def _parts(value: Any, scope: Scope, *, is_root: bool) -> dict[Step, Any]:
    parts: dict[Step, Any] = {}
    if isinstance(value, dict):
        parts = {(ITEM, key): part for key, part in items_of(value)}
    elif isinstance(value, list | tuple | deque):
        parts = {(ITEM, index): part for index, part in enumerate(elements_of(value))}
    elif isinstance(value, set | frozenset):
        parts = {(MEMBER, number): part for number, part in enumerate(elements_of(value))}
    elif isinstance(value, _CODE):
        return {(HELD_BY_CODE, number): part for number, part in enumerate(_held_by(value))}
    attributes = scope.attributes_of(value, is_root=is_root)
    if attributes:
        parts.update({(ATTRIBUTE, name): part for name, part in attributes.items()})
    return parts


def _held_by(code: Any) -> list[Any]:
    if isinstance(code, functools.partial):
        return [code.func, *code.args, *code.keywords.values()]
    if isinstance(code, MethodType):
        return [code.__self__]
    return [cell.cell_contents for cell in code.__closure__ or () if is_filled(cell)]


def is_filled(cell: Any) -> bool:
    """Returns whether a closure's cell has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _keyed(parts: Mapping[Step, Any], kind: str) -> dict[Any, Any]:
    return {key: part for (kind_of_part, key), part in parts.items() if kind_of_part == kind}


def _members(parts: Mapping[Step, Any]) -> frozenset[Any]:
    return frozenset(_keyed(parts, MEMBER).values())


def _are_same(before: Mapping[Step, Any], now: Mapping[Step, Any]) -> bool:
    """Whether two tables have the same keys in one order, and the same objects under them."""
    pairs = zip(before.items(), now.items(), strict=False)
    return len(before) == len(now) and all(a == b and one is other for (a, one), (b, other) in pairs)


def _changes(
    holder: Any, before: Mapping[Step, Any], after: Mapping[Step, Any], versions: Any
) -> list[tuple[Step, Any]]:
    """The steps of one object that lead to other values now."""
    if isinstance(holder, set):
        members = _members(after)
        return [] if members == _members(before) else [((MEMBER, 0), members)]
    is_fixed = isinstance(holder, (tuple, frozenset, *_CODE))
    steps = (step for step in (*after, *reversed([*before])) if step[0] == ATTRIBUTE or not is_fixed)
    pairs = {step: (before.get(step, ABSENT), after.get(step, ABSENT)) for step in steps}
    return [(step, new) for step, (old, new) in pairs.items() if not _is_same(old, new, *versions)]


def _moved_keys(before: Mapping[Step, Any], after: Mapping[Step, Any]) -> list[tuple[Step, Any]]:
    """The order of the keys of one object, where setting and removing them would leave another order."""
    kinds = {kind for kind, _ in after} & {ITEM, ATTRIBUTE}
    orders = {kind: list(_keyed(after, kind)) for kind in sorted(kinds)}
    moved = list[tuple[Step, Any]]()
    for kind, order in orders.items():
        present = set(order)
        left = [key for key in _keyed(before, kind) if key in present]
        if list(dict.fromkeys([*left, *order])) != order:
            moved.append(((KEY_ORDER, kind), tuple(order)))
    return moved


def _is_same(old: Any, new: Any, versions_before: Mapping[int, int], versions: Mapping[int, int]) -> bool:
    if old is new:
        return versions_before.get(id(old)) == versions.get(id(new))
    if isinstance(old, tuple) and type(old) is type(new):
        pairs = zip(old, new, strict=False)
        return len(old) == len(new) and all(_is_same(a, b, {}, {}) for a, b in pairs)
    return type(old) is type(new) and isinstance(old, PLAIN) and old == new


def _change(holder: Any, step: Step, value: Any) -> None:
    kind, key = step
    of_attributes = kind == ATTRIBUTE or step == (KEY_ORDER, ATTRIBUTE)
    table = vars(holder) if of_attributes else holder
    base = builtin_type(table)
    if kind == KEY_ORDER:
        moved = {name: table[name] for name in value}
        refill(table, {name: part for name, part in table.items() if name not in moved} | moved)
    elif kind == MEMBER:
        refill(holder, value)
    elif value is ABSENT:
        base.__delitem__(table, key)
    elif isinstance(table, list | deque) and key == len(table):
        base.append(table, value)
    else:
        base.__setitem__(table, key, value)
