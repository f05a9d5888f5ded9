"""Axes and pairs of them x schedules x policies x loops over four processes give the numbers of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from axis_matrix import LAYOUTS, POLICIES, RANKS, Cell, compared, loss_of, made, policies_of
from forked import on_ranks

import outsize
from outsize.errors import BadOption

pytestmark = [pytest.mark.dist, pytest.mark.full]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("axes", LAYOUTS, ids="-".join)
def test_the_numbers_of_one_process(tmp_path: Path, axes: tuple[str, ...]) -> None:
    for answers in on_ranks(tmp_path, RANKS, lambda group: compared(axes, group)):
        assert len(answers) >= 12
        assert {name: far for name, far in answers.items() if far > 1e-12} == {}


@pytest.mark.parametrize("axes", LAYOUTS, ids="-".join)
def test_what_cannot_be_together_is_refused_by_the_plan(axes: tuple[str, ...]) -> None:
    model, ids, target = made()
    for policy in {*POLICIES} - {*policies_of(axes)}:
        wishes = Cell(axes, "1f1b", policy, "plain").wishes
        request = outsize.Request(cluster=f"{RANKS}x12GB", **wishes)
        with pytest.raises(BadOption):
            outsize.plan(model, (ids,), target=target, loss_fn=loss_of, request=request)
