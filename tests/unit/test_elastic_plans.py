"""Plans of a run whose number of ranks may change: same microbatches, exact where one fits, kept on disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from outsize.api.elastic import ElasticRun, elastic_plan, request_like
from outsize.api.options import request_of
from outsize.api.problem import Profiler, case_of, cluster_of
from outsize.errors import TooManyStages
from outsize.ir.answers.request import LayoutOptions
from outsize.ir.plan import Plan
from outsize.train.checkpoint.loop.attached import ResumeNote

BATCH = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def run(
    ranks: int, folder: Path | None = None, before: Plan | None = None, *, prefers_exact: bool = True
) -> ElasticRun:
    return ElasticRun(
        ranks=ranks,
        sizes=(1, 2, 3, 4),
        cluster=lambda count: cluster_of(f"{count}xcpu"),
        folder=folder,
        before=before,
        prefers_exact=prefers_exact,
    )


def planned(elastic: ElasticRun, options: LayoutOptions | None = None) -> Plan:
    case = case_of(model(), (torch.randn(BATCH, 4),), None, {"loss_fn": lambda out: out.sum()})
    request = request_of(options or {}, BATCH).model_copy(update={"every_device": True})
    plan = elastic_plan(case, request, Profiler(), elastic)
    for thread in threading.enumerate():
        if thread.name == "outsize-plans":
            thread.join()
    return plan


def test_each_number_of_ranks_has_the_same_microbatches_and_the_bits_of_one_device(tmp_path: Path) -> None:
    first = planned(run(4, tmp_path), {"microbatches": 4})
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "plans").iterdir())
    assert names == ["1", "2", "3", "4"], "the others are made ahead"
    for ranks in (1, 2, 3, 4):
        plan = planned(run(ranks, tmp_path), {"microbatches": 4})
        assert (plan.axes.world_size, plan.microbatches, plan.batch_size) == (ranks, 4, BATCH)
        assert plan.bit_identical
    assert planned(run(4, tmp_path), {"microbatches": 4}) == first


def test_a_plan_that_is_kept_is_one_of_the_same_model_and_wishes(tmp_path: Path) -> None:
    planned(run(2, tmp_path))
    kept = len(list((tmp_path / "plans").iterdir()))
    planned(run(2, tmp_path), {"microbatches": 2})
    assert len(list((tmp_path / "plans").iterdir())) == 2 * kept
    for path in (tmp_path / "plans").iterdir():
        path.write_text("{")
    assert planned(run(2, tmp_path)).axes.world_size == 2, "a damaged file is made again"


def test_a_plan_for_other_ranks_is_made_again_with_its_microbatches() -> None:
    given = planned(run(4), {"microbatches": 2})
    with pytest.warns(ResumeNote, match="the plan was for 4 ranks, and the run has 3: planned again, pp 3"):
        plan = planned(run(3, before=given))
    assert (plan.axes.pp, plan.microbatches) == (3, 2)
    assert request_like(given).batch_size == BATCH


def test_axes_that_do_not_fit_are_given_up() -> None:
    """dp_replicate 2 has no place on three ranks; the run goes on with all samples of the batch."""
    with pytest.warns(ResumeNote, match="dp_replicate 2 does not fit 3 ranks and is given up: pp 3"):
        plan = planned(run(3), {"dp_replicate": 2})
    assert (plan.axes.world_size, plan.batch_size) == (3, BATCH)


@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_that_leave_out_a_rank_that_has_joined_are_given_up(ranks: int, tmp_path: Path) -> None:
    alone = planned(run(1, tmp_path), {"stages": 1, "microbatches": 2})
    assert alone.axes.world_size == 1
    with pytest.warns(ResumeNote, match=f"pp 1 does not fit {ranks} ranks and is given up: pp {ranks}"):
        plan = planned(run(ranks, tmp_path, before=alone), {"stages": 1, "microbatches": 2})
    assert (plan.axes.world_size, plan.microbatches, plan.bit_identical) == (ranks, 2, True)


def test_what_no_layout_can_run_is_the_error_of_the_first_wish() -> None:
    with pytest.raises(TooManyStages, match="9 stages"):
        planned(run(9), {"microbatches": 8, "dp_replicate": 1})
