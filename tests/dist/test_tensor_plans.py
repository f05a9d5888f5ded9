"""Plans with tp over processes, alone and with pp, give the numbers of one process, dropout on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launches import said_by
from tensor_plan_worker import record_cases

pytestmark = pytest.mark.dist

ALONE = ("llama", "gpt2", "vit")
PIPED = ("llama", "gpt2", "t5", "mixtral", "encoder", "convolutional", "bert", "vit")
# With --all: cut as a llama and a T5 are; test_experts.py has experts beside tp.
RARE = ("gpt2", "mixtral", "encoder", "convolutional", "bert", "vit")
REPLICATED = ("gpt2:2", "convolutional:2")
RARE_REPLICAS = ("gpt2:2",)  # with --all: the other one has dropout and a divided classifier, too
UNEVEN = 0.12  # 9 tokens or 61 rows are no two equal parts

Found = list[dict[str, dict[str, Any]]]
piped = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in RARE else []) for name in PIPED]
)


def plans_over(ranks: int, folder: Path, *cases: str) -> Found:
    """What each rank found of the cases of tensor_plan_worker.py."""
    record_cases(cases, ranks)
    return said_by("tensor_plan_worker.py", ranks, folder, *cases)


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In float32."""
    return plans_over(2, tmp_path_factory.mktemp("tp2"), *ALONE)


@pytest.fixture(scope="module")
def pp2_tp2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In float64, with no, full and selective recompute in turns."""
    everything = request.config.getoption("--all")
    rare = () if everything else (*RARE, *RARE_REPLICAS)
    names = (name for name in (*REPLICATED, *PIPED) if name not in rare)
    return plans_over(4, tmp_path_factory.mktemp("pp2"), *names)


@pytest.mark.parametrize("name", ALONE)
def test_a_step_of_two_ranks_is_that_of_one_process(tp2: Found, name: str) -> None:
    for rank in tp2:
        assert rank[name]["loss"] < 1e-6
        # Of GPT-2 one process is itself 0.9e-6 from the numbers in double.
        assert rank[name]["gradients"] < (2e-6 if name == "gpt2" else 1e-6)
        assert 0.5 < rank[name]["share"] < 0.63
        assert rank[name]["names"]


@pytest.mark.parametrize("name", ALONE)
def test_what_is_sent_is_what_the_planner_counts(tp2: Found, name: str) -> None:
    for rank in tp2:
        assert rank[name]["sent"] == rank[name]["counted"]
        assert rank[name]["sent"]["summed"] > 0


@piped
def test_pipelines_of_two_by_two_train_as_one_process(pp2_tp2: Found, name: str) -> None:
    """Gradients, and parameters after two clipped AdamW steps of two accumulated batches each."""
    double = name != "mixtral"  # torch's grouped matmul has no float64
    for rank in pp2_tp2:
        found = rank[name]
        assert max(found["loss"], found["gradients"]) < (1e-13 if double else 1e-6)
        assert found["trained"] < (1e-10 if double else 1e-4)
        assert found["names"]
    owned = [rank[name]["share"] for rank in pp2_tp2]
    assert max(owned) < 0.6
    assert sum(owned) < 1.3


@piped
def test_a_rank_sends_the_next_stage_what_the_planner_plays(pp2_tp2: Found, name: str) -> None:
    """All of its values: the ranks of tp do not divide what is whole on each of them."""
    for rank in pp2_tp2:
        assert rank[name]["crossed"] == pytest.approx(rank[name]["foretold"], rel=UNEVEN)
    assert {kind for rank in pp2_tp2 for kind in rank[name]["crossed"]} == {"SEND_F", "SEND_B"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in RARE_REPLICAS else []) for name in REPLICATED],
)
def test_replicas_of_two_by_two_train_as_one_process(pp2_tp2: Found, name: str) -> None:
    for rank in pp2_tp2:
        found = rank[name]
        assert max(found["loss"], found["gradients"]) < 1e-13
        assert found["trained"] < 1e-10
        assert found["names"]
        assert found["share"] < 0.63


@pytest.mark.parametrize("ranks", ["tp2", "pp2_tp2"])
def test_what_a_loop_does_besides_steps(ranks: str, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(ranks):
        said = found["features"]
        assert said["loaded"], "slices of files are the weights"
        assert said["evaluated"] < 1e-6
        assert said["saved"]
        assert said["overflow"] == [True, True, 4.0], "one rank overflows, all skip and back off"
        assert said["largest"] < 16 * 61, "no rank has a whole table"
        assert "tp=2. Next: engine.weights.full_state_dict" in said["refusal"]
