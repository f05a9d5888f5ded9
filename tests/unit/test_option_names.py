"""The keyword arguments of the public functions: their signatures, their names, and the record they make."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.options import request_of
from outsize.capture.fakes.precision import with_values_in_precision
from outsize.capture.models.planned_precision import PrecisionNote, warn_of_precision
from outsize.errors import BadOption
from outsize.ir.answers.request import PlanRequest, RequestOptions
from outsize.ir.schedule import Schedule

MISSPELT = [
    (outsize.plan, "microbatch", "microbatches"),
    (outsize.fit, "precison", "precision"),
    (outsize.check, "stage", "stages"),
    (outsize.parallelize, "clipnorm", "clip_norm"),
    (outsize.parallelize, "microbatch", "microbatches"),
    (outsize.tune, "trial", "trials"),
    (outsize.measure, "size", "sizes"),
]


@pytest.mark.parametrize(("function", "name", "nearest"), MISSPELT)
def test_a_misspelt_option_names_the_nearest(function: Callable[..., Any], name: str, nearest: str) -> None:
    with pytest.raises(BadOption) as caught:
        function(nn.Linear(2, 2), (torch.zeros(4, 2),), **{name: 4})
    assert caught.value.what == f"no option `{name}`; did you mean `{nearest}`?"
    assert caught.value.next_step.startswith(f"{nearest}=")


def test_an_option_like_no_other_is_named_alone() -> None:
    with pytest.raises(BadOption, match=r"no option `zzzz` of outsize.plan\. Next: help\(outsize\.plan\)"):
        outsize.plan(nn.Linear(2, 2), (torch.zeros(4, 2),), zzzz=1)  # pyright: ignore[reportCallIssue]


def test_a_model_that_is_one_module_is_planned() -> None:
    loss: Callable[..., torch.Tensor] = torch.sum
    plan = outsize.plan(nn.Linear(4, 4), (torch.zeros(8, 4),), loss_fn=loss, cluster="4xcpu")
    assert plan.stages[0].units[0] == ""


def test_signatures_show_every_option() -> None:
    shown = inspect.signature(outsize.plan).parameters
    assert [*shown][:3] == ["model", "args", "kwargs"]
    assert {"cluster", "measured", "request", "loss_fn", "target", "batch_dims"} <= shown.keys()
    assert shown["microbatches"].annotation == "int | None"


def test_the_options_of_a_request_are_its_fields() -> None:
    # A schedule of the user's own becomes actions; a run says that it has every device.
    assert {*RequestOptions.__annotations__, "actions", "every_device"} == {*PlanRequest.model_fields}


def test_none_is_as_if_it_were_not_given() -> None:
    nothing: RequestOptions = {"bn": None, "tp": None, "optimizer": None, "batch_size": None}
    assert request_of(nothing, 8) == PlanRequest(batch_size=8)


def test_a_value_that_makes_no_sense_is_named() -> None:
    with pytest.raises(BadOption, match=r"tp=0 makes no sense; .*Next: tp=2, or none"):
        request_of({"tp": 0}, 8)


def test_a_schedule_of_ones_own_fixes_stages_and_microbatches() -> None:
    own = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    request = request_of({"schedule": own}, 8)
    assert (request.schedule, request.stages, request.microbatches, len(request.actions)) == (
        "custom",
        2,
        2,
        2,
    )
    with pytest.raises(BadOption, match="stages=3 contradicts the schedule, which has 2"):
        request_of({"schedule": own, "stages": 3}, 8)


def test_statistics_of_the_whole_batch_want_one_microbatch_and_one_replica() -> None:
    assert request_of({"bn": "sync"}, 8).microbatches == 1
    with pytest.raises(BadOption, match="replicas split the batch; dp_replicate 2, dp_shard 1"):
        request_of({"bn": "sync", "dp_replicate": 2}, 8)


def test_a_record_that_contradicts_itself_cannot_be_made() -> None:
    with pytest.raises(BadOption, match="sequence_parallel=True, tp=1"):
        PlanRequest(batch_size=8, sequence_parallel=True, axes="pp")


def test_a_plan_in_eight_bits_needs_no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    how: Any = {"precision": "fp8", "cluster": "2xh100"}
    assert outsize.plan(nn.Linear(16, 16), (torch.zeros(4, 16),), **how).precision == "fp8"
    with pytest.raises(BadOption, match=r"no nn\.Linear has two sides that are multiples of 16"):
        outsize.plan(nn.Linear(16, 5), (torch.zeros(4, 16),), **how)


def test_units_are_timed_with_layers_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(BadOption, match="pip install --no-deps torchao"):
        with_values_in_precision(nn.Linear(16, 16), "fp8")
    with pytest.raises(BadOption, match="outsize plan MODEL --precision mxfp8"):
        with_values_in_precision(nn.Linear(16, 16), "mxfp8")


@pytest.mark.parametrize(
    ("precision", "cluster", "nearest"),
    [
        ("fp8", "2xa100-80gb", "bf16"),
        ("mxfp8", "2xh100-80gb", "fp8"),
        ("nvfp4", "2xh100-80gb", "fp8"),
        ("nvfp4", "2xa100-80gb", "bf16"),
        ("nvfp4", "2xcpu", "fp8"),
    ],
)
def test_a_device_that_lacks_a_precision_is_told_at_once(precision: Any, cluster: str, nearest: str) -> None:
    with pytest.raises(
        BadOption, match=rf"'{precision}' needs .* has not; its peaks are of .*--precision {nearest}$"
    ):
        outsize.plan(nn.Linear(32, 32), (torch.zeros(4, 32),), precision=precision, cluster=cluster)


def test_a_model_in_another_precision_than_its_plan_is_named() -> None:
    x = torch.zeros(4, 16)
    how: Any = {
        "cluster": "2xcpu",
        "stages": 2,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD,
    }
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.warns(PrecisionNote, match=r"4 of 4 parameters are torch.float32.*model.bfloat16\(\)"):
        outsize.parallelize(model, (x,), target=x, plan=outsize.Request(precision="bf16"), **how)
    half = x.bfloat16()
    plan = outsize.plan(
        model.bfloat16(), (half,), target=half, loss_fn=how["loss_fn"], cluster="2xcpu", stages=2
    )
    eight = plan.model_copy(update={"precision": "fp8"})
    with pytest.warns(PrecisionNote, match="no layer of the model computes so; torchao"):
        warn_of_precision(eight, model)


def test_experts_that_a_plan_has_in_eight_bits_are_named() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 32, 32, dtype=torch.bfloat16))

    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    linear = nn.Linear(32, 32, dtype=torch.bfloat16)
    plan = outsize.plan(linear, (x,), target=x, loss_fn=nn.functional.mse_loss, cluster="2xcpu", stages=1)
    layer = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch"})()
    with pytest.warns(PrecisionNote, match="and those of 1 are multiplied in the type of their weights"):
        warn_of_precision(plan.model_copy(update={"precision": "mxfp8"}), nn.Sequential(layer, Stack()))
