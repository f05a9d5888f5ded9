"""A forward inside of another microbatch's backward, over four processes: bits, and that both alternate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from launches import said_by
from overlapped_worker import COUNT, OVERLAPPED, STEPS, record_cases

pytestmark = pytest.mark.dist

# Tied weights; dropout; experts whose tokens are gathered, or sent; a rank without rows; casts; recompute.
CASES = ("llama:tp", "gpt2:tp", "mixtral:ep", "dispatched:ep", "tower:ep", "llama:tp:bf16", "mixtral:ep:full")
CASES += ("llama:tp:gloo", "mixtral:ep:gloo", "dispatched:ep:gloo")  # by the backend, not by shared memory
# A second forward that draws does not alternate, nor one that reads an embedding of another stage.
ALONE = {"gpt2:tp:full"}


RARE = {"mixtral:ep", "tower:ep", "llama:tp:gloo", "mixtral:ep:gloo", "gpt2:tp:full"}


@pytest.fixture(scope="module")
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    everything = pytestconfig.getoption("--all")
    cases = [case for case in (*CASES, *sorted(ALONE)) if everything or case not in RARE]
    record_cases(cases)
    return said_by("overlapped_worker.py", 4, tmp_path_factory.mktemp("overlapped"), *cases)


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=[pytest.mark.full] if case in RARE else []) for case in cases]


@pytest.mark.parametrize("case", marked((*CASES, *sorted(ALONE))))
@pytest.mark.parametrize("schedule", OVERLAPPED)
def test_bits_are_those_of_one_microbatch_after_the_other(
    ranks: list[dict[str, Any]], case: str, schedule: str
) -> None:
    """Rank 0 has the losses and the parameters of all ranks, the others the losses."""
    found = [rank[f"{case} {schedule}"] for rank in ranks]
    assert [rank["wrong"] for rank in found] == [[]] * 4
    assert found[0]["compared"] > STEPS + 10
    assert [rank["compared"] for rank in found[1:]] == [STEPS] * 3


@pytest.mark.parametrize("case", marked(CASES))
def test_pairs_alternate_on_every_rank(ranks: list[dict[str, Any]], case: str) -> None:
    """Of 2 stages, the first has 2 x 2 - 1 forwards before its pairs, and the second has 1."""
    ahead = [3, 3, 1, 1]
    for before, rank in zip(ahead, ranks, strict=True):
        assert rank[f"{case} {OVERLAPPED[0]}"]["pairs"] == STEPS * (COUNT - before)
        assert rank[f"{case} {OVERLAPPED[1]}"]["pairs"] > 0


@pytest.mark.parametrize("case", marked(sorted(ALONE)))
def test_a_second_forward_that_draws_runs_by_itself(ranks: list[dict[str, Any]], case: str) -> None:
    assert all(rank[f"{case} {schedule}"]["pairs"] == 0 for rank in ranks for schedule in OVERLAPPED)
