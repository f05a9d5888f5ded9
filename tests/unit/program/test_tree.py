"""Containers that models take and return are rebuilt as they were."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from outsize.program.tape import Ref
from outsize.program.tree import accessor, leaves, map_leaves, part_at, paths

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
