"""Loops with a split model, all stages in this process, against the same loops with the plain model.

`make test` runs each model with the plain loop, and with one model each loop that ranks cannot run: the
others run in one process in tests/dist/test_split_processes.py. `make parity` runs the product.
"""

from __future__ import annotations

from typing import Any

import pytest

from split.bench import PlainBench, SplitBench, differences, noted
from split.cases import CASES, Case
from split.loops import LOOPS, NOT_YET, Loop

pytestmark = pytest.mark.usefixtures("shared_recordings")


def rows() -> list[Any]:
    """All cells; those that `make test` runs are not `full`."""
    found = list[Any]()
    for turn, each in enumerate(LOOPS):
        fitting = [model for model in CASES if each.fits(model)]
        for number, model in enumerate(fitting):
            is_taken = each.name == "plain" or (not each.processes and number == turn % len(fitting))
            marks = [] if is_taken else [pytest.mark.full]
            if (each.name, model.name) in NOT_YET:
                marks.append(pytest.mark.xfail(strict=True, reason=NOT_YET[each.name, model.name]))
            found.append(
                pytest.param(each, model, id=f"{each.name}-{model.name}".replace(" ", "_"), marks=marks)
            )
    return found


@pytest.mark.parametrize(("each", "model"), rows())
def test_a_loop_has_the_bits_of_the_plain_model(each: Loop, model: Case) -> None:
    expected, found = noted(each.run, PlainBench(model)), noted(each.run, SplitBench(model))
    assert differences(expected, [found]) == []
