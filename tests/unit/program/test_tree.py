"""Containers that models take and return are rebuilt as they were."""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from outsize.program.tape import Ref
from outsize.program.tree import (
    accessor,
    key_of,
    leaves,
    map_leaves,
    map_tensors,
    part_at,
    parts,
    paths,
    tensors_in,
)

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Output:
    """A result as transformers and users write them."""

    loss: Any
    extra: Any = None


TREES = [
    (1, 2),
    [1, [2, 3]],
    {"a": 1, "b": {"c": 2}},
    OrderedDict(x=1, y=(2, 3)),
    Pair(1, [2]),
    Output(1, {"k": 2}),
    slice(1, None, 2),
    (None, 3, "s", ()),
    {},
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_mapping_identity_gives_an_equal_tree_of_the_same_types(tree: Any) -> None:
    copy = map_leaves(lambda leaf: leaf, tree)
    assert copy == tree
    assert type(copy) is type(tree)


@pytest.mark.parametrize("tree", [t for t in TREES if not isinstance(t, slice)], ids=repr)
def test_paths_lead_to_the_leaves_in_order(tree: Any) -> None:
    found = list(paths(tree, lambda leaf: isinstance(leaf, int)))
    assert [leaf for _, leaf in found] == [leaf for leaf in leaves(tree) if isinstance(leaf, int)]
    assert all(part_at(tree, steps) == leaf for steps, leaf in found)
    assert all(eval(f"tree{accessor(steps)}", {"tree": tree}) == leaf for steps, leaf in found)


def test_the_original_is_not_changed() -> None:
    tree = {"a": [1, Pair(2, 3)], "o": Output(4)}
    assert map_leaves(lambda leaf: 0, tree) == {"a": [0, Pair(0, 0)], "o": Output(0, 0)}
    assert tree == {"a": [1, Pair(2, 3)], "o": Output(4)}


def test_a_named_tuple_that_checks_its_items_is_rebuilt_with_any() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    found = map_leaves(lambda leaf: "a leaf", packed)
    assert type(found) is type(packed)
    assert found.data == found.batch_sizes == "a leaf"
    assert map_leaves(lambda leaf: leaf, packed).batch_sizes is packed.batch_sizes


def test_references_are_leaves_though_they_are_dataclasses() -> None:
    assert list(leaves((Ref(3), [Ref(4)]))) == [Ref(3), Ref(4)]


def test_objects_of_other_types_are_leaves() -> None:
    thing = object()
    assert list(leaves([thing, {1, 2}])) == [thing, {1, 2}]


# -- batches -------------------------------------------------------------------------------------------


@final
class Slotted:
    """An object without a dict."""

    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


@final
class Hidden:
    """Shows its fields through `__getattr__` alone, as atomistic models' batches do."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name == "_fields" or name not in self._fields:
            raise AttributeError(name)
        return self._fields[name]


@final
class Registered:
    """Known to torch's registry of containers, and without attributes of its own."""

    def __init__(self, first: Any, second: Any) -> None:
        self.table = {"first": first, "second": second, "sum": None}


@pytest.fixture
def registry() -> Iterator[None]:
    _pytree.register_pytree_node(
        Registered,
        lambda value: ([value.table["first"], value.table["second"]], "pair"),
        lambda items, _: Registered(*items),
    )
    yield
    _pytree.SUPPORTED_NODES.pop(Registered)


def of_shape(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype


def test_tensors_are_found_however_deep_they_are() -> None:
    batch = [Slotted({"k": [Hidden(a=torch.ones(1), b=Slotted(torch.ones(2)))]}), (torch.ones(3),)]
    names = [accessor(steps) for steps, _ in parts(batch)]
    assert names == ["[0].x['k'][0]._fields['a']", "[0].x['k'][0]._fields['b'].x", "[1][0]"]
    assert [tuple(t.shape) for t in tensors_in(batch)] == [(1,), (2,), (3,)]


def test_a_changed_part_gives_a_copy_and_leaves_the_object_as_it_was() -> None:
    inner = Slotted(torch.ones(2))
    batch = {"one": Hidden(inner=inner, same=[inner]), "options": Hidden(flag=True)}
    found = map_tensors(lambda tensor: tensor + 1, batch)
    assert torch.equal(found["one"].inner.x, torch.full((2,), 2.0))
    assert found["one"].same[0] is found["one"].inner
    assert torch.equal(inner.x, torch.ones(2))
    assert found["options"] is batch["options"]  # nothing in it has changed
    assert not hasattr(found["one"].inner, "y")


class Fields(dict[str, Any]):
    """Has its items as attributes, as many configurations and batches do."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.__dict__ = self


class Table(dict[str, Any]):
    """Has attributes beside its items."""


class Rows(list[Any]):
    """Is made from something else than its items."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))


class Box(tuple[Any, ...]):
    """Has attributes beside its items."""


def with_attributes(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


@pytest.mark.parametrize(
    "make",
    [lambda: Table(x=1), lambda: UserDict(x=1), lambda: Rows(2), lambda: Box((1, 2)), lambda: Output(1)],
    ids=["dict", "UserDict", "list", "tuple", "dataclass"],
)
def test_attributes_of_containers_are_parts_if_they_hold_tensors(make: Any) -> None:
    text, lock = ["a"], threading.Lock()
    value = with_attributes(make(), mask=torch.ones(2), deep=[{"t": torch.ones(3)}], text=text, lock=lock)
    if not isinstance(value, tuple):
        value.deep.append(value)
    new = map_tensors(lambda tensor: tensor * 2, value)
    assert type(new) is type(value)
    assert list(leaves(new)) == list(leaves(value))
    assert [t.tolist() for t in (new.mask, new.deep[0]["t"])] == [[2, 2], [2, 2, 2]]
    assert [t.tolist() for t in tensors_in(value)] == [[1, 1], [1, 1, 1]], "it is as it was"
    assert new.text is text
    assert new.lock is lock
    assert isinstance(value, tuple) or new.deep[1] is new
    assert key_of(value, of_shape) == key_of(new, of_shape)
    with_attributes(value, mask=torch.ones(4))
    assert key_of(value, of_shape) != key_of(new, of_shape)


def test_items_that_are_attributes_as_well_are_one_part() -> None:
    value = Fields(x=torch.ones(2), text="a")
    new = map_tensors(lambda tensor: tensor * 2, value)
    assert len(tensors_in(value)) == 1
    assert new.x is new["x"]
    assert new.x.tolist() == [2, 2]
    new.y = 1
    assert new["y"] == 1
    assert "y" not in value


def test_what_leads_back_to_a_copied_object_leads_to_its_copy() -> None:
    one = Slotted(torch.ones(2))
    parent = Hidden(child=one)
    parent._fields["parent"] = weakref.ref(parent)
    parent._fields["itself"] = parent
    found = map_tensors(lambda tensor: tensor + 1, parent)
    assert found is not parent
    assert found.parent() is found.itself is found


def test_the_functions_of_torchs_registry_come_first(registry: None) -> None:
    found = map_tensors(lambda tensor: tensor * 2, [Registered(torch.ones(1), torch.ones(2))])
    assert [t.tolist() for t in (found[0].table["first"], found[0].table["second"])] == [[2.0], [2.0, 2.0]]
    assert [accessor(steps) for steps, _ in parts(Registered(1, 2))] == ["[0]", "[1]"]


def test_the_key_tells_apart_what_is_no_tensor() -> None:
    def key(value: Any) -> Any:
        return key_of([Hidden(x=torch.randn(2), facts=value)], of_shape)

    values = [1, True, 1.0, -0.0, 0.0, "1", b"1", None, [1], (1,), {"a": 1}, {1, 2}, np.ones(2), np.zeros(2)]
    values += [np.float32(1), Slotted(1), Slotted(2), torch.float32, range(2), int]
    assert len({key(value) for value in values}) == len(values)
    assert all(key(copy.deepcopy(value)) == key(value) for value in values)


def test_an_object_without_parts_counts_by_identity_and_stays_alive() -> None:
    keys = {key_of([object()], of_shape) for _ in range(20)}
    assert len(keys) == 20  # none has got the address of another
    lock = threading.Lock()
    assert key_of([lock], of_shape) == key_of([lock], of_shape)


def test_a_reference_to_a_part_of_the_batch_counts_by_which_part_it_is() -> None:
    def batch() -> Any:
        parent = Hidden(x=torch.randn(2))
        parent._fields["me"] = weakref.ref(parent)
        return parent

    assert key_of(batch(), of_shape) == key_of(batch(), of_shape)
    one = batch()
    one._fields["me"] = weakref.ref(registry)
    assert key_of(one, of_shape) != key_of(batch(), of_shape)
