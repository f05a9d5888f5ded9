"""Weights that are freed or replaced: nothing keeps the old ones, and what was one tensor stays one."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from small_models import Written
from torch import nn

from outsize.errors import BadOption
from outsize.run.weights.freed import FreedWeight, on_every_rank
from outsize.run.weights.ownership import free_foreign, like, move_weights, places, replace

CPU = torch.device("cpu")


def test_a_freed_lstm_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.LSTM(3, 4))
    alive = [weakref.ref(p) for p in model.parameters()]
    free_foreign(model, {name: "rank 1" for _, _, name in places(model)}, CPU)
    assert [ref() for ref in alive] == [None] * 4
    assert all(p.is_meta for p in model.parameters())


def test_only_what_is_foreign_is_freed_and_tied_names_stay_one() -> None:
    model = Written(lambda self, x: x, a=nn.Linear(2, 2), b=nn.Linear(2, 2), norm=nn.BatchNorm1d(2))
    model.b.weight = model.a.weight
    model.a.weight.requires_grad_(False)
    free_foreign(model, {"a.weight": "rank 1", "norm.running_mean": "rank 2"}, CPU)
    on_meta = {n for n, t in model.state_dict(keep_vars=True).items() if t.is_meta}
    assert on_meta == {"a.weight", "b.weight", "norm.running_mean"}
    assert model.b.weight is model.a.weight
    assert not model.a.weight.requires_grad


def test_attributes_that_hold_a_weight_get_the_new_one() -> None:
    model = nn.Linear(2, 2)
    model.kept = {"both": [model.weight, (model.bias, 1)]}  # pyright: ignore[reportAttributeAccessIssue]
    replace(model, {id(p): like(p, torch.zeros_like(p)) for p in model.parameters()})
    assert model.kept["both"][0] is model.weight  # pyright: ignore[reportIndexIssue]
    assert model.kept["both"][1][0] is model.bias  # pyright: ignore[reportIndexIssue]
    assert not model.weight.any()


def test_a_freed_weight_is_not_none_and_its_values_are_asked_for_in_vain() -> None:
    """HQQ's layers look for None among their weights."""
    model = nn.Linear(2, 2)
    free_foreign(model, {"weight": "rank 1"}, CPU)
    assert None not in [model.weight]
    with pytest.raises(BadOption, match="of rank 1 and has no values on this rank; `__eq__`"):
        _ = model.weight == 0


class Codes(nn.Parameter):
    """A library's own parameter."""


def test_a_freed_weight_is_what_it_was_for_code_that_asks() -> None:
    """Libraries count and place tensors by the class and the device of a weight."""
    model = nn.Linear(2, 2)
    model.weight = Codes(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    free_foreign(model, {"weight": "rank 1", "bias": "rank 1"}, CPU)
    for weight in (model.weight, copy.deepcopy(model).weight):
        assert isinstance(weight, Codes)
        assert isinstance(weight, FreedWeight)
        assert weight.is_meta
        assert {weight.device, weight.data.device, model.bias.device} == {CPU}
        assert torch.zeros(2, device=weight.device).sum() == 0
    assert not isinstance(model.bias, Codes)
    assert isinstance(model.bias, nn.Parameter)


class Scaled(nn.Module):
    """A weight of codes as libraries keep it: with scales in an object, and the codes a second time."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.zeros(1024, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = {"absmax": torch.ones(512), "table": torch.ones(256)}
        self.state = {"CB": self.weight.data}
        vars(self.weight)["quant_state"] = self.scales
        self.read = SimpleNamespace(absmax=torch.ones(512))


def two_layers() -> tuple[nn.Sequential, Scaled, Scaled]:
    layers = Scaled(), Scaled()
    return nn.Sequential(*layers), *layers


def test_what_is_beside_a_freed_weight_is_freed_but_for_its_tables() -> None:
    model, first, second = two_layers()
    alive = weakref.ref(first.scales["absmax"])
    free_foreign(model, {"0.weight": "rank 1"}, CPU)
    assert alive() is None
    assert isinstance(first.state["CB"], FreedWeight)
    assert float(first.scales["table"].sum()) == 256
    assert float(first.read.absmax.sum()) == 512  # The layer's own Python may have read it.
    with pytest.raises(BadOption, match=r"0.weight \(absmax\) is a weight of rank 1"):
        first.scales["absmax"].sum()
    assert float(second.scales["absmax"].sum()) == 512


def test_what_is_beside_a_weight_moves_with_it_and_one_memory_stays_one() -> None:
    model, stays, moved = two_layers()
    move_weights(model, {"1.weight": torch.device("meta")})
    assert not stays.weight.is_meta
    assert not stays.scales["absmax"].is_meta
    assert moved.scales["absmax"].is_meta
    assert moved.state["CB"].untyped_storage()._cdata == moved.weight.untyped_storage()._cdata


def test_a_list_from_before_has_no_values_of_a_weight_that_another_rank_trains() -> None:
    """An average of weights that was begun before the model was split would follow none of them."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    weight, bias, scale = model.weight, model.bias, nn.Parameter(torch.ones(()))
    model.register_parameter("scale", scale)
    free_foreign(model, {"weight": "rank 1", "bias": "rank 1", "scale": "rank 1"}, CPU)
    assert weight is not model.weight
    assert (weight.shape, scale.shape) == ((2, 2), ())
    for use in (lambda: weight.detach().sum(), lambda: torch.zeros(2, 2).lerp_(weight, 0.1)):
        with pytest.raises(BadOption, match="weight is a weight of rank 1 and has no values on this rank"):
            use()
    assert bool(bias.isfinite().all())  # What is frozen is the same on all ranks.


def test_callbacks_of_all_ranks_leave_arithmetic_to_the_rank_that_has_all_of_it() -> None:
    """A teacher that follows a student, as people write it."""
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    for each, bias in ((teacher, "rank 1"), (student, "rank 2")):
        free_foreign(each, {"weight": "rank 1", "bias": bias}, CPU)
    with pytest.raises(BadOption, match="`mul_` uses them"):
        teacher.weight.data.mul_(0.9)
    with on_every_rank():
        teacher.weight.data.mul_(0.9).add_(student.weight.data, alpha=0.1)
        teacher.weight.data = teacher.weight.data * 0.9 + 0.1 * student.weight.data
        torch.lerp(teacher.weight, student.weight, 0.1)
        with pytest.raises(BadOption, match=r"bias is a weight of rank 1 .* `add_` uses them"):
            teacher.bias.data.mul_(0.9).add_(student.bias.data, alpha=0.1)
        with pytest.raises(BadOption, match="`add_` uses them"):
            torch.zeros(2, 2).add_(student.weight.data)
        with pytest.raises(BadOption, match="`sum` uses them"):
            (teacher.weight * 0.9).sum()
    assert teacher.weight.is_meta
    assert isinstance(teacher.weight, FreedWeight)
