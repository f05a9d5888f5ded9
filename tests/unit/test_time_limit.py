"""`Request(time_limit_s=)` and `on_better`, from Python and from the command line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from findings_of import findings
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.ir.findings import TimeLimitEnded
from outsize.ir.plan import Axes
from outsize.planner.search.incumbents import Incumbent
from outsize.report.wording import incumbent_text, sentence

# Over before the first candidate is priced, on any machine.
AT_ONCE_S = 1e-9


def subject() -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        return model, (torch.empty(64, 256),)


def planned(**asked: Any) -> outsize.Plan:
    return outsize.plan(*subject(), loss_fn=Tensor.mean, cluster="4xcpu", request=outsize.Request(**asked))


def test_a_plan_says_that_its_limit_ended_the_search() -> None:
    plan = planned(time_limit_s=AT_ONCE_S)
    (said,) = findings(plan, TimeLimitEnded)
    assert plan.expected is not None
    assert (said.limit_s, said.gap) == (AT_ONCE_S, plan.expected.gap)
    assert outsize.Plan.model_validate_json(plan.to_json()) == plan
    ended = "the search ended at its time limit of 20.0 s, with its best plan so far"
    assert sentence(TimeLimitEnded(limit_s=20)) == ended
    assert sentence(TimeLimitEnded(limit_s=20, gap=0.353)) == f"{ended}, 35.3 % above the least bound"


def test_a_limit_that_is_not_reached_is_not_told() -> None:
    assert planned(time_limit_s=1e6).to_json() == planned().to_json()


def test_a_function_is_told_of_each_better_plan() -> None:
    told: list[Incumbent] = []
    planned(on_better=told.append)
    steps = [found.step_s for found in told]
    assert steps
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_is_no_limit(seconds: float) -> None:
    with pytest.raises(BadOption, match=r"time_limit_s=.* makes no sense.*--time-limit 60"):
        outsize.Request(time_limit_s=seconds)


@pytest.mark.parametrize("field", [{"time_limit_s": 5.0}, {"on_better": print}])
def test_a_run_and_fit_refuse_what_is_about_a_search(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(BadOption, match=name):
        outsize.parallelize(nn.Linear(2, 2), (torch.zeros(4, 2),), plan=outsize.Request(**field))
    with pytest.raises(BadOption, match=name):
        outsize.fit(*subject(), request=outsize.Request(**field))


def test_the_line_of_the_best_plan_so_far() -> None:
    axes = Axes(pp=4, tp=4)
    assert incumbent_text(Incumbent(axes, 4.56, 0.098, 12.4)) == (
        "12.4 s  pp 4 x tp 4: 4.56 s a step, 9.8 % above the least bound"
    )
    assert incumbent_text(Incumbent(axes, 4.56, None, 0.25)) == "0.2 s  pp 4 x tp 4: 4.56 s a step"
