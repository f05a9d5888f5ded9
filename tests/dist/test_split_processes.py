"""Loops with a split model over two and four processes, each rank with its stage, against the plain model.

Each rank runs the loop as it stands. What it notes has to be what the plain model in one process has noted
under the same name, and together the ranks have all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.bench import Bench, PlainBench, SplitBench, differences, noted
from split.cases import CASES, Case
from split.loops import LOOPS, NOT_YET, Loop

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]

# What does not hold yet over processes: the reason, and whether it fails with every cut.
_OF_OWN = (
    "a rank that freezes its own parameters tells the others nothing; the cut decides whether it matters"
)
_TIED = "a functional call replaces a tied weight on the rank that has it alone"
NOT_YET_OVER_PROCESSES = {
    "frozen and thawed": (_OF_OWN, False),
    "thawed by layers": (_OF_OWN, False),
    "first order": (_TIED, True),
    "first order leaves": (_TIED, True),
}


def known(each: Loop, model: Case) -> list[Any]:
    """The mark of a cell that is known to differ."""
    reason, strict = NOT_YET.get((each.name, model.name)), True
    if reason is None and each.name in NOT_YET_OVER_PROCESSES:
        reason, strict = NOT_YET_OVER_PROCESSES[each.name]
    if reason is None or (reason == _TIED and "tied" not in model.traits):
        return []
    return [pytest.mark.xfail(strict=strict, reason=reason)]


def rows(ranks: int) -> list[Any]:
    """All cells; `make test` runs each loop with one model over two processes."""
    found = list[Any]()
    for turn, each in enumerate(each for each in LOOPS if each.processes):
        fitting = [model for model in CASES if each.fits(model)]
        for number, model in enumerate(fitting):
            is_taken = ranks == 2 and number == turn % len(fitting)
            name = f"{ranks}-{each.name}-{model.name}".replace(" ", "_")
            marks = [*known(each, model), *([] if is_taken else [pytest.mark.full])]
            found.append(pytest.param(ranks, each, model, id=name, marks=marks))
    return found


def on_ranks(folder: Path, ranks: int, each: Loop, model: Case) -> list[Bench]:
    """What each rank has noted."""

    def work() -> None:
        world = join()
        torch.set_num_threads(1)
        bench = noted(each.run, SplitBench(model, stages=ranks))
        torch.save((bench.notes, bench.refused), folder / f"{world.rank}.pt")
        leave(world)

    run_in_forks(ranks, work)
    found = list[Bench]()
    for rank in range(ranks):
        notes, refused = torch.load(folder / f"{rank}.pt")
        found.append(SplitBench(model, notes=notes, refused=refused))
    return found


@pytest.mark.parametrize(("ranks", "each", "model"), [*rows(2), *rows(4)])
def test_each_rank_has_the_bits_of_the_plain_model(
    tmp_path: Path, ranks: int, each: Loop, model: Case
) -> None:
    expected = noted(each.run, PlainBench(model))
    noted(each.run, SplitBench(model))  # What is recorded here is not recorded again by each rank.
    found = on_ranks(tmp_path, ranks, each, model)
    assert len({frozenset(bench.refused) for bench in found}) == 1
    assert differences(expected, found) == []
