"""Measuring a subject: sizes that the model rejects, models that cannot be timed, precisions in earnest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_models import batch, linear, two
from torch import Tensor, nn

import outsize
from outsize.capture.measure.units import UnitTimingOptions
from outsize.errors import BadOption, ExampleRejected
from outsize.ir.cluster import parse_cluster
from outsize.train.batch.batch import Batch
from outsize.train.measure.training_case import TrainingCase
from outsize.train.measure.units import how_on, measure_sizes, with_values_in

QUICK = UnitTimingOptions(repeats=1)


def subject(model: nn.Module) -> TrainingCase:
    return TrainingCase.of(model, Batch((batch(),), {}, (torch.zeros(4, 4),)), F.mse_loss, None)


def test_small_sizes_that_the_model_rejects_are_left_out() -> None:
    normed = subject(nn.Sequential(linear(), nn.BatchNorm1d(4)))  # which refuses one sample
    assert measure_sizes(normed, [4, 1, 2, 2], QUICK, needed=4).sizes == (2, 4)
    with pytest.raises(ExampleRejected):
        measure_sizes(normed, [1, 2], QUICK)


@pytest.mark.parametrize("sizes", [[], [0, 2]])
def test_sizes_that_make_no_sense(sizes: list[int]) -> None:
    with pytest.raises(BadOption, match="make no sense"):
        measure_sizes(subject(linear()), sizes, QUICK)


def test_a_model_that_runs_by_modules_is_not_timed() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(y) if y.sum() > 0 else m.b(-y)

    with pytest.raises(BadOption, match="runs by modules, whose units are not timed"):
        measure_sizes(subject(two(run)), [4], QUICK)


def test_under_bf16_the_weights_are_converted_and_under_autocast_they_are_not() -> None:
    mixed = with_values_in(subject(nn.Sequential(linear())), "bf16-mixed")
    assert {p.dtype for p in mixed.module.parameters()} == {torch.float32}
    half = with_values_in(subject(nn.Sequential(linear())), "bf16")
    assert {p.dtype for p in half.module.parameters()} == {torch.bfloat16}
    assert half.batch.args[0].dtype is torch.bfloat16
    found = [measure_sizes(mixed, [2], QUICK), measure_sizes(half, [2], QUICK)]
    assert [f.profiles[0].precision for f in found] == ["bf16-mixed", "bf16"]


def test_threads_are_shared_among_the_processes_of_a_machine() -> None:
    assert how_on(parse_cluster("1xcpu")).threads <= torch.get_num_threads()
    assert how_on(parse_cluster("4096xcpu")).threads == 1


def test_a_plan_takes_what_measure_found() -> None:
    model, x = nn.Sequential(linear(), nn.Tanh(), linear()), batch()
    how = {"loss_fn": F.mse_loss, "target": torch.zeros(4, 4)}
    found = outsize.measure(model, (x,), **how, sizes=[1, 2], how=QUICK)
    plan = outsize.plan(model, (x,), **how, cluster="2xcpu", exact=True, measured=found)
    assert plan.expected is not None
    assert (plan.expected.source, plan.microbatches >= 2) == ("measured", True)
    with pytest.raises(BadOption, match="says nothing about microbatches of 4"):
        outsize.plan(model, (x,), **how, cluster="2xcpu", exact=True, microbatches=1, measured=found)
