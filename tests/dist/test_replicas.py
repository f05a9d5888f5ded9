"""Replicas over real processes: two of one stage, and two pipelines of two; all models in one launch each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launches import HERE, record_ahead, said_by

pytestmark = pytest.mark.dist

CHECKS = [
    "every_kind_in_double_precision",
    "accumulated_gradients_are_sums_after_every_step",
    "an_overflow_on_one_replica_skips_the_step_on_all",
    "batches_of_any_size_and_lists_of_microbatches",
    "evaluate_has_all_outputs_on_the_first_replica",
    "statistics_are_those_of_the_first_replica",
    "deferred_statistics_are_those_of_the_whole_batch",
    "own_batches_are_the_samplers_and_give_the_same_numbers",
    "the_numbers_are_those_of_ddp",
    "ranks_that_disagree_all_hear_of_it",
    "sparse_frozen_unused_and_tied",
    "a_model_that_runs_by_modules",
]
OVER_PIPELINES = ["every_model_in_single_precision", "evaluate_has_all_outputs_on_the_first_replica"]
MODELS = ("llama", "gpt2", "t5", "vit", "narrow_resnet18", "unet")
Said = list[dict[str, str]]


def said(folder: Path, pp: int, only: str, request: pytest.FixtureRequest) -> Said:
    """What each rank says to each check of replicas_worker.py."""
    extent = "all" if request.config.getoption("--all") else "slice"
    record_ahead((*MODELS, "mlp"), (4,))
    return said_by("replicas_worker.py", 2 * pp, folder, str(pp), only, extent)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Two replicas of the whole model."""
    return said(tmp_path_factory.mktemp("dp2"), 1, "|".join(CHECKS), request)


@pytest.fixture(scope="module")
def pipelines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Two pipelines of two stages."""
    return said(tmp_path_factory.mktemp("pp2-dp2"), 2, "|".join(OVER_PIPELINES), request)


@pytest.mark.parametrize("name", CHECKS)
def test_two_replicas(alone: Said, name: str) -> None:
    for rank in alone:
        assert rank[name] == "ok", rank[name]


@pytest.mark.parametrize("name", OVER_PIPELINES)
def test_two_pipelines(pipelines: Said, name: str) -> None:
    for rank in pipelines:
        assert rank[name] == "ok", rank[name]


def test_every_check_is_asked_for() -> None:
    written = re.findall(r"^def check_(\w+)", (HERE / "replicas_worker.py").read_text(), re.MULTILINE)
    assert set(written) == {*CHECKS, *OVER_PIPELINES}
