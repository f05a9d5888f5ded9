"""A pipeline of two real processes whose weights, or whose optimizer, each has on its host."""

from __future__ import annotations

import pytest
from hosted_worker import MICROBATCHES, MODELS
from launches import record_ahead, said_by

pytestmark = pytest.mark.dist

CHECKS = [
    "weights_that_come_stage_by_stage",
    "weights_that_stay",
    "values_between_stages_on_the_hosts",
    "received_values_are_not_on_the_device",
    "weights_that_come_as_casts",
    "clipping_by_the_norm_of_all_ranks",
    "each_rank_loads_its_own_stages_once_a_pass",
    "recomputed_stages_drop_what_they_have_sent",
    "what_does_not_run_is_refused",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says to each check of hosted_worker.py."""
    record_ahead(MODELS, (MICROBATCHES,))
    return said_by("hosted_worker.py", 2, tmp_path_factory.mktemp("hosted"))


@pytest.mark.parametrize("name", CHECKS)
def test_a_pipeline_whose_weights_live_on_the_hosts(ranks: list[dict[str, str]], name: str) -> None:
    for said in ranks:
        assert said[name] == "ok", said[name]


def test_every_hosted_check_is_asked_for(ranks: list[dict[str, str]]) -> None:
    assert [list(said) for said in ranks] == [CHECKS, CHECKS]
