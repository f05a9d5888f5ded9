"""Every way of setting an item of a dict is noticed, with Python's versions of dicts and without them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outsize.capture.guards import dict_versions as versions_file
from outsize.capture.guards.check import Contents, DictItems, WholeDicts
from outsize.capture.guards.dict_versions import DictVersions

WRITES: dict[str, Callable[[Any], Any]] = {
    "statement": lambda o: setattr(o, "width", 9),
    "item": lambda o: vars(o).__setitem__("width", 9),
    "update": lambda o: vars(o).update(width=9),
    "removed": lambda o: delattr(o, "width"),
    "cleared": lambda o: vars(o).clear(),
    "past the class": lambda o: object.__setattr__(o, "width", 9),
    "merged": lambda o: vars(o).__ior__({"width": 9}),
}


@pytest.fixture(params=[True, False], ids=["versions", "none"])
def _by_versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(versions_file, "_version_of", None)


@pytest.mark.usefixtures("_by_versions")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_noticed_by_every_kind_of_look(write: Callable[[Any], Any]) -> None:
    held, other = SimpleNamespace(width=8, depth=2), SimpleNamespace(width=8)
    items = DictItems((vars(o), "width", 8) for o in (held, other))
    whole, contents = WholeDicts([vars(held), vars(other)]), Contents([vars(held), [1]])
    looks = (items, whole, contents)
    assert all(look.are_same() for look in looks)
    write(held)
    assert not any(look.are_same() for look in looks)
    assert not any(look.are_same() for look in looks)  # A no is no new state.


@pytest.mark.usefixtures("_by_versions")
def test_other_items_and_the_same_object_again_are_no_change_of_an_item() -> None:
    width, held = object(), SimpleNamespace(width=None)
    held.width = width
    items = DictItems([(vars(held), "width", width), (vars(held), "height", None)][:1])
    for depth in range(3):
        held.depth, held.width = depth, width
        assert items.are_same()
    held.width = object()
    assert not items.are_same()
    held.width = width
    assert items.are_same()


@pytest.mark.usefixtures("_by_versions")
def test_whole_dicts_count_order_names_and_what_is_added() -> None:
    table: OrderedDict[str, Any] = OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1))
    look = WholeDicts([table])
    table.move_to_end("a")
    assert not look.are_same()
    table.move_to_end("b")
    assert look.are_same()
    table["c"] = None
    assert not look.are_same()
    del table["c"]
    assert look.are_same()


@pytest.mark.usefixtures("_by_versions")
def test_parameters_are_told_apart_by_identity() -> None:
    layer = nn.Linear(1, 1)
    look = WholeDicts([layer._parameters])
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert not look.are_same()


def test_only_what_was_written_is_looked_at() -> None:
    layers = [nn.Linear(1, 1) for _ in range(4)]
    versions = DictVersions([vars(layer) for layer in layers] * 2)
    torch.stack([layer(torch.ones(1)) for layer in layers]).sum().backward()
    assert versions.written() == []
    layers[2].train()  # As it was: that counts where a watcher of dicts counts, from Python 3.12 on.
    assert [id(each) for each in versions.written()] in ([], [id(vars(layers[2]))])
    layers[2].eval()
    assert [id(each) for each in versions.written()] == [id(vars(layers[2]))]
    versions.renew()
    assert versions.written() == []


def test_the_versions_are_there_and_one_that_misses_writes_is_not_used() -> None:
    assert versions_file._usable_version() is not None
    assert not versions_file._follows_writes(lambda _: 0)
    assert not versions_file._follows_writes(lambda d: hash(frozenset(map(str, d))))


def test_a_torch_without_versions_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "dict_version")
    assert versions_file._usable_version() is None
