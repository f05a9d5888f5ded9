"""Which state a model is in: every kind of change is seen, a forward's own changes are not, walks are few."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from torch import nn

from outsize.train.variants import model_state
from outsize.train.variants.model_state import Look, StructureVersions


class How(StrEnum):
    EAGER = "eager"
    FLASH = "flash"


def model() -> Any:
    found: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(0.5)))
    found.config, found.how, found.tag = SimpleNamespace(scale=1.0), How.EAGER, None
    return found


@final
class Doubled(nn.Linear):
    """Another class for a module."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "frozen": lambda m: m[0].weight.requires_grad_(False),
    "forward hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "backward hook": lambda m: m[0].register_full_backward_hook(lambda *_: None),
    "head": lambda m: setattr(m, "0", nn.Linear(2, 3)),
    "dtype": lambda m: m[0].half(),
    "tied": lambda m: setattr(m[1], "weight", m[1].bias),
    "removed": lambda m: m.pop(2),
    "class": lambda m: setattr(m[0], "__class__", Doubled),
}
PLAIN: dict[str, Callable[[Any], Any]] = {
    "mode": lambda m: m[1].eval(),
    "attribute": lambda m: setattr(m[2][0], "p", 0.1),
    "enumeration": lambda m: setattr(m, "how", How.FLASH),
    "new attribute": lambda m: setattr(m[0], "scale", 2),
    "renamed attribute": lambda m: (delattr(m[1], "eps"), setattr(m[1], "epsilon", 1e-5)),
    "config": lambda m: setattr(m.config, "scale", 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_structure_is_another_state(change: Callable[[Any], Any]) -> None:
    m = model()
    found = StructureVersions(m, plain=False)
    first = found.number()
    found.ran()
    assert found.number() == first
    change(m)
    assert found.number() != first


@pytest.mark.parametrize("change", PLAIN.values(), ids=PLAIN)
def test_a_value_is_another_state_only_where_reads_are_not_known(change: Callable[[Any], Any]) -> None:
    m = model()
    states = StructureVersions(m, plain=True), StructureVersions(m, plain=False)
    assert [state.number() for state in states] == [0, 0]
    change(m)
    assert [state.number() for state in states] == [1, 0]


def test_the_user_goes_back_to_a_state_that_is_known() -> None:
    m = model()
    found = StructureVersions(m, plain=True)
    first = found.number()
    m.eval()
    assert found.number() != first
    m.train()
    assert found.number() == first


def test_loaded_parameters_are_no_other_state() -> None:
    m = model()
    found = StructureVersions(m)
    first, changes = found.number(), found.looks
    m.load_state_dict(model().state_dict(), assign=True)
    assert found.number() == first
    assert found.looks > changes  # but what they hold is looked at once more


def test_what_a_forward_changes_is_no_other_state() -> None:
    m = model()
    found, m.calls = StructureVersions(m, plain=True), 0
    for _ in range(5):
        assert found.number() == 0
        m.calls += 1
        found.ran()


def test_a_forward_that_begins_late_to_change_something_makes_one_state_more() -> None:
    m = model()
    found, m.calls, seen = StructureVersions(m, plain=True), 0, []
    for step in range(9):
        seen.append(found.number())
        m.calls += step >= 4
        found.ran()
    assert seen == [0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_a_model_that_stays_as_it_is_is_not_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    closely: list[Any] = []
    real = model_state.snapshot
    monkeypatch.setattr(model_state, "snapshot", lambda m, plain: closely.append(m) or real(m, plain=plain))
    found = StructureVersions(model())
    for _ in range(20):
        found.number()
        found.ran()
    assert len(closely) == 4  # before and after two steps


def test_a_hook_that_was_put_there_by_hand_is_seen_at_last() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    look = Look(model, plain=False)
    model[0]._forward_hooks[0] = print
    assert not all(look.is_same() for _ in range(model_state._HOOKS_EVERY))


def test_hooks_that_come_and_go_are_no_change() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    look = Look(model, plain=False)
    handle = model[0].register_forward_hook(print)
    assert not look.is_same()
    handle.remove()
    assert look.is_same()


@pytest.mark.parametrize("size", [1, 3])
def test_an_equal_parameter_is_another_one(size: int) -> None:
    model = nn.Sequential(nn.Linear(size, 1))
    look = Look(model, plain=False)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert not look.is_same()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
        lambda m: setattr(m[1], "bias", nn.Parameter(torch.zeros(1))),
        lambda m: m[0].register_parameter("more", nn.Parameter(torch.ones(()))),
        lambda m: m.append(nn.ReLU()),
        lambda m: m.__setitem__(2, nn.Tanh()),
        lambda m: m[0].requires_grad_(False),
        lambda m: m[0].half(),
        lambda m: m[2].register_forward_hook(print),
    ],
)
def test_a_look_sees_each_change_of_the_structure(change: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.ReLU())
    look = Look(model, plain=False)
    assert look.is_same()
    change(model)
    assert not look.is_same()


def test_a_scripted_module_has_its_tables_in_cpp() -> None:
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    versions = StructureVersions(scripted, plain=False)
    first = versions.number()
    assert (versions.number(), versions.looks) == (first, 1)
    getattr(scripted, "0").weight.requires_grad_(False)
    assert versions.number() != first
