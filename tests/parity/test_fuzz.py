"""Models composed from a grammar, by seed: an engine leaves what the plain loop of fuzz_cases.py leaves.

A seed that differs is run alone by `pytest "tests/parity/test_fuzz.py::test_...[SEED]" --all`. Seeds stay.
"""

from __future__ import annotations

import pytest
from fuzz_cases import Case, differing, plain, plan_of, restore, split
from fuzz_pieces import READS
from guard_models import KINDS

FEW, MANY = 10, 300
FOUND = (82, 97, 255)  # A list and counts, written by one piece that several places use.

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed < FEW or seed in FOUND else [pytest.mark.full])
        for seed in range(MANY)
    ],
)
@pytest.mark.sample("0", "2", "3", "5", "7", "8", "9", "82", "97", "255")
def test_a_composed_model_is_the_plain_loops(seed: int) -> None:
    case = Case.of(seed)
    try:
        expected = plain(case)
        numbers, _ = split(case, plan_of(case))
        gaps = differing(expected, numbers)
    finally:
        restore()
    assert expected.keys() == numbers.keys()
    assert gaps == [], case


def test_grammar_and_kinds_agree() -> None:
    assert READS.keys() - {"environment"} <= KINDS.keys()


def test_the_grammar_reaches_every_piece_and_loss() -> None:
    cases = [Case.of(seed) for seed in range(60)]
    pieces = {type(module).__name__ for case in cases for module in case.model().modules()}
    assert len(pieces) >= 20, pieces
    assert len({case.loss for case in cases}) >= 15
    assert len({case.schedule for case in cases}) == 6
