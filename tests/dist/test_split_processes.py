"""Loops with a split model over two and four processes, each rank with its stage, against the plain model.

Each rank runs the loop as it stands. What it notes has to be what the plain model in one process has noted
under the same name, and together the ranks have all of it. So has one process with both stages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from outsize.train.split.outputs import Outputs
from split.bench import Bench, PlainBench, SplitBench, differences, noted
from split.cases import CASES, Case
from split.loops import LOOPS, NOT_YET, Loop
from split.ranks import Launches, Run, launches

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]


def known(each: Loop, model: Case) -> list[Any]:
    """The mark of a cell that is known to differ."""
    reason = NOT_YET.get((each.name, model.name))
    return [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]


# With outputs on the last ranks alone, the others have nothing to compute weights behind the model of, nor
# the inputs of another model, and their zeros lie in the memory of one number, which is not written.
NEED_ALL_OUTPUTS = {
    "layers around",
    "as a child",
    "adversaries",
    "outputs in place",
    "outputs changed after use",
}


# Of four stages of `twice` one owns no weight, and torch takes no empty list of inputs or of named weights.
NEED_OWN_WEIGHTS = {
    "weights by grad",
    "inputs named in backward",
    "inner loop",
    "sharpness",
    "first order",
    "first order leaves",
    "as a child",
}


def rows(ranks: int, outputs: Outputs = "all", every: int = 1) -> list[Any]:
    """All cells; `make test` runs each loop, or one of `every` so many, with one model over two processes."""
    found = list[Any]()
    loops = [each for each in LOOPS if each.processes]
    if outputs == "last":
        loops = [each for each in loops if each.name not in NEED_ALL_OUTPUTS]
    for turn, each in enumerate(loops):
        has_owners = each.name not in NEED_OWN_WEIGHTS or ranks < 4
        fitting = [model for model in CASES if each.fits(model) and (has_owners or model.name != "twice")]
        for number, model in enumerate(fitting):
            is_taken = ranks == 2 and number == turn % len(fitting) and turn % every == 0
            name = f"{ranks}-{outputs}-{each.name}-{model.name}".replace(" ", "_")
            marks = [*known(each, model), *([] if is_taken else [pytest.mark.full])]
            found.append(pytest.param(ranks, outputs, each, model, id=name, marks=marks))
    return found


@cache
def here(model: Case, each: Loop, outputs: Outputs) -> tuple[Bench, Bench]:
    """What the plain model has noted, and one process with both stages, whose recordings ranks share."""
    return noted(each.run, PlainBench(model)), noted(each.run, SplitBench(model, outputs=outputs))


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    def group(ranks: int, outputs: Outputs, each: Loop, model: Case) -> tuple[int, Outputs]:
        return ranks, outputs

    def run(ranks: int, outputs: Outputs, each: Loop, model: Case) -> Run:
        return each, lambda: SplitBench(model, stages=ranks, outputs=outputs)

    def before(ranks: int, outputs: Outputs, each: Loop, model: Case) -> None:
        here(model, each, outputs)

    test = test_each_rank_has_the_bits_of_the_plain_model.__name__
    return launches(request, tmp_path_factory, test, group=group, run=run, before=before)


@pytest.mark.parametrize(
    ("ranks", "outputs", "each", "model"),
    [*rows(2), *rows(4), *rows(2, "last", every=6), *rows(4, "last")],
)
def test_each_rank_has_the_bits_of_the_plain_model(
    launched: Launches, ranks: int, outputs: Outputs, each: Loop, model: Case
) -> None:
    found = launched.of(ranks=ranks, outputs=outputs, each=each, model=model)
    expected, alone = here(model, each, outputs)
    assert differences(expected, [alone]) == []
    assert len({frozenset(bench.refused) for bench in found}) == 1
    assert differences(expected, found) == []
