"""Objects walked, compared and changed: every part once at its shortest path; changes rebuild what was there.

Oracle of `diff` and `apply`: the changed objects themselves, compared part by part with a copy that got the
changes alone.
"""

from __future__ import annotations

import copy
import functools
import types
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from outsize.program.objects import (
    ABSENT,
    CLOSED,
    DEPTH,
    NUMBERS_AND_TEXT,
    PLAIN,
    Comparison,
    Scope,
    apply,
    diff,
    fingerprint,
    fits,
    look_up,
    model_copy,
    snapshot,
    walk,
)
from outsize.run.transport.values import value_bytes, value_of_bytes

NAMES = ("a", "b", "c")
EFFECTS = Scope(modules="attributes", writes=True, key_order=True)


class Box:
    """An object with attributes."""


class Color(Enum):
    RED = 1


def box(**attributes: Any) -> Box:
    """A box with these."""
    made = Box()
    vars(made).update(attributes)
    return made


def shape_of(value: Any) -> Any:
    """The parts of an object, and of theirs, as values that can be compared."""
    if isinstance(value, dict):
        return dict, {key: shape_of(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(part) for part in value]
    if isinstance(value, set):
        return set, sorted(value)  # the order of equal sets depends on how they came about
    if isinstance(value, Box):
        return Box, {name: shape_of(part) for name, part in vars(value).items()}
    return type(value), value


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, tuples, dicts, sets and boxes of each other."""

    def holders(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(parts, max_size=3),
            st.lists(parts, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(NAMES), parts, max_size=3),
            st.dictionaries(st.sampled_from(NAMES), parts, max_size=3).map(lambda table: box(**table)),
            st.sets(st.integers(0, 3)),
        )

    return st.recursive(leaves, holders, max_leaves=12)


VALUES = st.one_of(st.integers(-3, 3), st.booleans(), st.none(), st.sampled_from(NAMES), st.floats(width=16))
ROOTS = st.lists(trees(VALUES), min_size=1, max_size=2).map(lambda parts: box(parts=parts))


def holders_in(root: Any) -> list[Any]:
    """The lists, dicts, sets and boxes that can be changed, the root first."""
    below = [value for _, value in walk([root]) if isinstance(value, list | dict | set | Box)]
    return list({id(each): each for each in (root, *below)}.values())


def mutate(data: st.DataObject, root: Any) -> None:
    """One change as a call makes it: something set, added or removed; also what is there already."""
    everything = holders_in(root)
    holder = data.draw(st.sampled_from(everything), label="holder")
    new = data.draw(st.one_of(trees(VALUES), st.sampled_from(everything)), label="value")
    if isinstance(holder, set):
        holder ^= data.draw(st.sets(st.integers(0, 3)))
        return
    table: Any = vars(holder) if isinstance(holder, Box) else holder
    keys = range(len(table)) if isinstance(table, list) else list(table)
    if len(keys) and data.draw(st.booleans(), label="remove"):
        del table[data.draw(st.sampled_from(keys))]
    elif isinstance(table, list):
        table.insert(data.draw(st.integers(0, len(table))), new)
    else:
        table[data.draw(st.sampled_from(NAMES))] = new


def is_a_tree(root: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether no object holds itself, and nothing lies too deep to be looked at."""
    if isinstance(root, list | tuple | dict | Box):
        parts = vars(root) if isinstance(root, Box) else root
        parts = parts.values() if isinstance(parts, dict) else parts
        inside = (*above, id(root))
        return len(inside) <= DEPTH and id(root) not in above and all(is_a_tree(p, inside) for p in parts)
    return True


def test_a_key_that_is_removed_and_added_again_is_last_in_the_copy_too() -> None:
    root, other = box(table={"b": 0, "a": 1}), box(table={"b": 0, "a": 1})
    before = snapshot([root], EFFECTS)
    root.table["b"] = root.table.pop("b")
    apply([other], diff(before, snapshot([root], EFFECTS)))
    assert list(other.table.items()) == [("a", 1), ("b", 0)]


@given(ROOTS, st.data())
def test_the_changes_of_a_call_make_a_copy_the_same(root: Any, data: st.DataObject) -> None:
    assume(is_a_tree(root))
    other, before = copy.deepcopy(root), snapshot([root], EFFECTS)
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(data, root)
    assume(is_a_tree(root))
    changes = diff(before, snapshot([root], EFFECTS))
    apply([other], value_of_bytes(value_bytes(changes)))  # as it travels to other ranks
    assert repr(shape_of(other)) == repr(shape_of(root))


@given(ROOTS)
def test_nothing_changes_without_a_call(root: Any) -> None:
    assert diff(snapshot([root]), snapshot([root])) == []
    assert diff(snapshot([root], EFFECTS), snapshot([root], EFFECTS)) == []


@given(ROOTS)
def test_a_path_leads_to_its_value(root: Any) -> None:
    paths: dict[Any, Any] = {}
    for path, value in walk([root]):
        assert path not in paths
        assert len(path) == 2 or path[:-1] in paths  # parents come first
        paths[path] = value
        if path[-1][0] != "{}" and not isinstance(look_up([root], path[:-1]), set):
            assert look_up([root], path) is value


@given(ROOTS, st.data())
def test_what_is_restored_is_as_before_and_in_the_same_order(root: Any, data: st.DataObject) -> None:
    before, expected = snapshot([root]), repr(shape_of(root))
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(data, root)
    before.restore()
    assert repr(shape_of(root)) == expected


def test_a_cycle_ends_and_an_object_has_its_shortest_path() -> None:
    shared = box(x=1)
    root = box(far=[[shared]], near=shared)
    vars(root)["self"] = root
    paths = [path for path, value in walk([root]) if value == 1]
    assert paths == [(0, (".", "near"), (".", "x"))]


def test_a_walk_ends_at_its_depth() -> None:
    root: list[Any] = []
    last = root
    for _ in range(DEPTH + 3):
        last.append([])
        last = last[0]
    assert max(len(path) for path, _ in walk([root])) == DEPTH + 1


def test_an_object_that_only_became_reachable_by_another_path_has_not_lost_its_parts() -> None:
    inner = box(x=1)
    root = box(b=inner)
    other, before = copy.deepcopy(root), snapshot([root], EFFECTS)
    inner.x, root.a = 2, inner  # pyright: ignore[reportAttributeAccessIssue]
    vars(root)["b"] = vars(root).pop("b")  # behind `a` now
    apply([other], diff(before, snapshot([root], EFFECTS)))
    assert other.a.x == other.b.x == 2  # pyright: ignore[reportAttributeAccessIssue]


def test_new_objects_are_one_change() -> None:
    root = box(layers=[])
    before = snapshot([root])
    vars(root)["layers"].append(box(keys=torch.ones(1)))
    assert [path for path, _ in diff(before, snapshot([root]))] == [(0, (".", "layers"), ("[]", 0))]


def test_changes_are_found_inside_tuples() -> None:
    layer = box(keys=1)
    before = snapshot([(layer,)])
    vars(layer)["keys"] = 2
    assert diff(before, snapshot([(layer,)])) == [((0, ("[]", 0), (".", "keys")), 2)]
    assert before.at((0, ("[]", 0), (".", "keys"))) == 1
    assert before.at((0, ("[]", 0), (".", "values"))) is ABSENT


@pytest.mark.parametrize("writes", [True, False])
def test_a_write_into_a_tensor_counts_where_it_is_asked_for(writes: bool) -> None:
    root, scope = [torch.ones(2)], Scope(writes=writes)
    before = snapshot([root], scope)
    root[0].add_(1)
    assert len(diff(before, snapshot([root], scope))) == int(writes)


def test_equal_values_are_no_change_and_equal_values_of_another_class_are() -> None:
    root = box(a=10**9, b=1, c=("x", 2.5), d=float("nan"))
    before = snapshot([root])
    vars(root).update(a=10**8 * 10, b=True, c=("x", float("2.5")))
    assert diff(before, snapshot([root])) == [((0, (".", "b")), True)]


EXAMPLES: dict[type, Any] = {
    **{kind: kind() for kind in NUMBERS_AND_TEXT},
    type(None): None,
    type(...): ...,
    type: Box,
    Enum: Color.RED,
    torch.dtype: torch.float32,
    torch.device: torch.device("cpu"),
    torch.layout: torch.strided,
    torch.memory_format: torch.contiguous_format,
    Tensor: torch.ones(1),
    nn.Module: nn.Linear(1, 1),
    types.ModuleType: torch,
    types.FunctionType: box,
    types.MethodType: nn.Linear(1, 1).forward,
    functools.partial: functools.partial(box),
}


@pytest.mark.parametrize("kind", CLOSED)
def test_closed_classes_are_not_looked_into(kind: type) -> None:
    example = EXAMPLES[kind]
    assert isinstance(example, kind)
    assert [value for _, value in walk([[example]])] == [example]


def test_functions_are_looked_into_where_they_are_asked_for() -> None:
    hidden = torch.ones(1)

    def closure() -> Tensor:
        return hidden

    method = types.MethodType(closure, box(inside=hidden))
    partial = functools.partial(box, part=hidden)
    for each in (closure, method, partial):
        assert all(value is not hidden for _, value in walk([each, [each]]))
        assert any(value is hidden for _, value in walk([each], Scope(functions=True)))


def test_roots_that_are_modules() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    vars(module)["scale"] = 2
    assert [*walk([module])] == []
    assert {path[1] for path, _ in walk([module], EFFECTS)} == {(".", "training"), (".", "scale")}
    whole = {path[1] for path, _ in walk([module], Scope(modules="attributes and tables"))}
    assert {(".", "_modules"), (".", "_forward_hooks"), (".", "scale")} <= whole


def test_what_cannot_be_changed_is_refused_before_anything_is() -> None:
    roots = [box(items=[1])]
    gone = ((0, (".", "other"), (".", "x")), 1)
    with pytest.raises(LookupError):
        apply(roots, [((0, (".", "items"), ("[]", 0)), 2), gone])
    assert vars(roots[0])["items"] == [1]
    assert not fits(roots, gone[0])


@pytest.mark.parametrize(
    ("step", "expected"), [(("[]", 0), True), (("[]", 1), True), (("[]", 2), False), ((".", "x"), False)]
)
def test_a_list_takes_what_is_in_it_or_next(step: Any, expected: bool) -> None:
    assert fits([[1]], (0, step)) is expected


def test_fingerprints() -> None:
    how = Comparison(by_value=PLAIN, of_tensor=lambda _: Tensor, of_object=id)
    thing = box()
    same: list[tuple[Any, Any]] = [
        ([1, (2, "x")], [1, (2, "x")]),
        ({"a": {1, 2}}, {"a": {2, 1}}),
        (torch.ones(1), torch.zeros(2)),
        (thing, thing),
    ]
    other: list[tuple[Any, Any]] = [
        (1, True),
        ([1], (1,)),
        (box(), thing),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ]
    assert all(fingerprint(a, how) == fingerprint(b, how) for a, b in same)
    assert all(fingerprint(a, how) != fingerprint(b, how) for a, b in other)
    endless: list[Any] = []
    endless.append(endless)
    hash(fingerprint(endless, how))


def test_a_copy_has_the_weights_of_scripted_modules_as_weights() -> None:
    """TorchScript copies them as values of a graph, which no optimizer takes."""
    torch.manual_seed(0)
    tail: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    tail[0].bias.requires_grad_(False)
    model = nn.Sequential(nn.Linear(3, 4), tail)
    assert not all(weight.is_leaf for weight in copy.deepcopy(model).parameters()), "torch copies them so"
    copied = model_copy(model)
    assert all(weight.is_leaf for weight in copied.parameters())
    wants = [weight.requires_grad for weight in model.parameters()]
    assert [weight.requires_grad for weight in copied.parameters()] == wants
    assert all(map(torch.equal, copied.parameters(), model.parameters()))
    optimizer = torch.optim.SGD([w for w in copied.parameters() if w.requires_grad], lr=0.1)
    x, before = torch.ones(2, 3), copied(torch.ones(2, 3)).detach()
    copied(x).sum().backward()
    optimizer.step()
    assert not torch.equal(copied(x), before), "the copy computes with its own weights"
    assert torch.equal(model(x), before)
