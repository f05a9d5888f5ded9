"""The promise over real processes (gloo on 127.0.0.1): two and three ranks, all models in one launch each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from launches import HERE, Done, launched, record_ahead, run, said_by
from zoo import CASES
from zoo_worker import MICROBATCHES, models

pytestmark = pytest.mark.dist

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

Findings = list[Mapping[str, list[dict[str, Any]]]]  # by rank
Zoo = Callable[[int], Findings]


# -- the zoo -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """What each of so many ranks found, from one launch for all tests."""
    everything = bool(request.config.getoption("--all"))
    extent = "all" if everything else "slice"

    @cache
    def found(ranks: int) -> Findings:
        record_ahead(models(ranks, everything), MICROBATCHES)
        return said_by("zoo_worker.py", ranks, tmp_path_factory.mktemp("zoo"), extent)

    return found


every_model = pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, c.name, marks=[] if c.name in models(ranks, False) else [pytest.mark.full])
        for ranks in (2, 3)
        for c in CASES
    ],
)


@every_model
def test_each_rank_holds_the_numbers_of_the_plain_loop(zoo: Zoo, ranks: int, name: str) -> None:
    found = zoo(ranks)
    assert len(found[0][name]) >= 2
    wrong = [(f["combination"], f["differences"]) for rank in found for f in rank[name] if not f["equal"]]
    assert wrong == []


@every_model
def test_each_parameter_has_one_owner_and_is_freed_elsewhere(zoo: Zoo, ranks: int, name: str) -> None:
    for by_rank in zip(*(rank[name] for rank in zoo(ranks)), strict=True):
        owned = sorted(n for f in by_rank for n in f["own"])
        assert owned == by_rank[0]["all"]
        assert [f["kept"] for f in by_rank] == [f["own"] for f in by_rank]
        assert sorted({n for f in by_rank for n in f["buffers"]}) == by_rank[0]["all_buffers"]


# -- what a training loop does besides steps ------------------------------------------------------------

CHECKS = [
    "evaluate_gives_the_eager_outputs_and_changes_nothing",
    "evaluate_as_the_first_call_and_then_training",
    "clipping_is_bit_equal",
    "accumulation_over_two_steps",
    "an_ordinary_scheduler",
    "every_rank_has_an_optimizer",
    "tied_weights_have_one_optimizer_state",
    "a_plan_for_another_world_is_refused",
    "receive_buffers_follow_the_depth_and_not_the_microbatches",
    "ranks_that_share_no_memory_use_the_group",
    "an_overflow_on_one_rank_skips_the_step_on_all",
    "recompute_is_bit_equal",
    "deferred_statistics_are_bit_equal",
    "sync_batchnorm_does_not_wait_for_other_stages",
    "batches_of_any_size_are_bit_equal",
    "the_users_generator_is_untouched",
    "another_batch_shape_runs_under_the_same_plan",
    "ten_batch_sizes_run_and_the_oldest_programs_are_dropped",
]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says to each check of features_worker.py."""
    record_ahead(("unet", "gpt2", "mlp", "llama", "bert", "toy"), (3,))
    return said_by("features_worker.py", 2, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("name", CHECKS)
def test_over_two_processes(features: list[dict[str, str]], name: str) -> None:
    for said in features:
        assert said[name] == "ok", said[name]


def test_every_check_of_the_worker_is_asked_for(features: list[dict[str, str]]) -> None:
    assert [list(said) for said in features] == [CHECKS, CHECKS]


# -- one script, three ways to start it -------------------------------------------------------------------


def losses(done: Done) -> list[str]:
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


def test_one_script_gives_the_same_losses_alone_under_outsize_run_and_under_torchrun() -> None:
    script = str(HERE / "train_script.py")
    alone = losses(run([sys.executable, script]))
    assert len(alone) == 4
    assert len(set(alone)) == 4
    assert losses(launched("train_script.py", 2)) == alone
    assert losses(run([*TORCHRUN, script])) == alone


def test_an_exception_in_one_ranks_model_ends_the_run_with_one_traceback() -> None:
    """The other rank would wait for half an hour."""
    done = launched("failing_worker.py", 2)
    assert done.returncode == 4
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: 3 is not my lucky number" in done.stderr
    assert "RankFailed [E401]: rank 1 of 2 failed first" in done.stderr
