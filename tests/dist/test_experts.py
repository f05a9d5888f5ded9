"""Expert parallelism: ranks with some of the experts, and samples of their own, train as one process does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_worker import Tower, record_cases
from launches import said_by
from torch import nn

import outsize
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

pytestmark = pytest.mark.dist

# Five experts over two ranks, with an auxiliary loss; three choices over four; experts that all tokens have,
# and groups; biases, dispatched; dropped tokens; a rank without rows; samples that do not divide.
PAIRS = ("mixtral", "qwen3", "deepseek", "gptoss", "dropping", "avoiding", "uneven")
SINGLE = ("grouped", "mixtral:single", "qwen3:single", "deepseek:single", "gptoss:single")
MESHES = ("qwen3:pp2:full", "deepseek:shard2", "gptoss", "mixtral:pp2:selective", "deepseek:pp2:zb-h1")
MESHES += ("mixtral:replicate2", "mixtral:shard2", "qwen3:tp2", "deepseek:tp2", "qwen3:cp2")
MESHES += ("qwen3:tp2:sequence", "deepseek:tp2:sequence")
# Checkpoints of ep 4 that ep 2 with two replicas goes on from, and the other way round.
MESHES += ("deepseek:to2", "deepseek:replicate2:to4")
RARE = {
    "qwen3",
    "deepseek",
    "dropping",
    "uneven",
    "mixtral:single",
    "qwen3:single",
    "deepseek:single",
    "gptoss:single",
}
RARE_MESHES = {*MESHES} - {"qwen3:pp2:full", "qwen3:tp2", "qwen3:cp2", "qwen3:tp2:sequence"}
# Whose checkpoints others go on from without --all: uneven experts, biases, stages, and experts with tp.
RESUMED = ("mixtral", "gptoss", "qwen3:pp2:full", "qwen3:tp2")

Found = list[dict[str, dict[str, Any]]]


def run(ranks: int, folder: Path, config: pytest.Config, names: Iterable[str], rare: set[str]) -> Found:
    everything = config.getoption("--all")
    cases = [name for name in names if everything or name not in rare]
    resumed = cases if everything else [name for name in cases if name in RESUMED]
    record_cases(cases, ranks, resumed)
    return said_by("experts_worker.py", ranks, folder, ",".join(resumed), *cases)


@pytest.fixture(scope="module")
def ep2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(2, tmp_path_factory.mktemp("ep2"), pytestconfig, (*PAIRS, *SINGLE), RARE)


@pytest.fixture(scope="module")
def meshes(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(4, tmp_path_factory.mktemp("ep4"), pytestconfig, MESHES, RARE_MESHES)


def marked(names: tuple[str, ...], rare: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.full] if name in rare else []) for name in names]


def insist(rank: dict[str, Any], within: float, trained: float) -> None:
    assert rank["loss"] < within
    assert rank["gradients"] < within
    assert rank["trained"] < trained
    assert rank["resumed"] is None or rank["resumed"] < trained
    assert not rank["lacking"]


@pytest.mark.parametrize("name", marked(PAIRS, RARE))
def test_two_ranks_train_as_one_process(ep2: Found, name: str) -> None:
    """Losses, gradients, and parameters after two clipped steps of AdamW of two accumulated batches each;
    then a step after a checkpoint that replicas without ep go on from, of those that are `RESUMED`.
    """
    for rank in ep2:
        insist(rank[name], 1e-12, 1e-10)


def test_checkpoints_of_each_kind_are_resumed(ep2: Found, meshes: Found) -> None:
    for name in RESUMED:
        assert all(rank[name]["resumed"] is not None for rank in (meshes if ":" in name else ep2))


@pytest.mark.parametrize("name", marked(SINGLE, RARE))
def test_in_float32_but_for_rounding(ep2: Found, name: str) -> None:
    for rank in ep2:
        insist(rank[name], 1e-6, 1e-4)


def test_a_rank_without_rows_has_gradients_of_zero(ep2: Found) -> None:
    """The last two of five experts are never chosen, and are those of the second rank."""
    rows = [rank["avoiding"]["rows"]["blocks.1.experts"] for rank in ep2]
    assert rows[0][0] > 0
    assert rows[1][0] == 0


def test_a_step_tells_how_unevenly_rows_are_routed(ep2: Found) -> None:
    """The fullest of both ranks by their mean, in both forms, with the same number on both ranks."""
    for name in ("mixtral", "gptoss", "avoiding"):
        (first, told), (second, said) = (rank[name]["balance"] for rank in ep2)
        assert told == said
        assert told == pytest.approx([2 * max(a, b) / (a + b) for a, b in zip(first, second, strict=True)])
        assert max(told) > 1


def test_recompute_routes_as_the_forward_has(meshes: Found) -> None:
    """Two steps have the same weights and batch. With full recompute each routing, to the bit, is met twice
    in each of them, else once.
    """
    for rank in meshes:
        assert set(rank["qwen3:pp2:full"]["routings"]) == {4}
        assert set(rank["qwen3:tp2"]["routings"]) == {2}


def test_a_rank_without_samples_has_gradients_of_its_experts(tmp_path: Path) -> None:
    """Of one sample over two ranks the second has none: it repeats the sample, which has no share there."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Tower(4).double().train()

    x, y = torch.randn(2, 4, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work() -> None:
        world, model = join(), made()
        request = outsize.Request(stages=1, microbatches=1, axes={"ep": 2})
        engine = outsize.parallelize(model, (x, y), plan=request)
        engine.step(x[:1], y[:1], update=False)
        found = {name: weight.grad for name, weight in engine.weights.named_parameters()}
        torch.save(found, tmp_path / f"{world.rank}.pt")
        leave(world)

    run_in_forks(2, work)
    plain = made()
    plain(x[:1], y[:1]).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, weight in plain.named_parameters():
            assert weight.grad is not None
            is_part = weight.shape != found[name].shape
            expected = weight.grad.chunk(2)[rank] if is_part else weight.grad
            assert torch.allclose(found[name], expected, rtol=0, atol=1e-12), name


def test_states_of_experts_are_divided(ep2: Found) -> None:
    """Of three and of two of five experts, with two moments for each number of their weights."""
    first, second = (rank["mixtral"]["state_elements"] for rank in ep2)
    assert first - second == 2 * 2 * (2 * 24 * 16 + 16 * 24)


def test_rows_are_dispatched_where_a_token_has_fewer_choices_than_there_are_ranks(ep2: Found) -> None:
    """Per call 2 x 9 tokens of 16 numbers and a weight each are sent there and back, and so are gradients."""
    sent = [rank["gptoss"]["sent"] for rank in ep2]
    assert "reduce_scatter" not in sent[0]
    assert "all_to_all" not in ep2[0]["mixtral"]["sent"]
    rows, index = 16 * 8, 8
    of_call = 2 * 18 * (rows + 8 + index)
    assert sum(s["all_to_all"] for s in sent) >= of_call


@pytest.mark.parametrize("case", marked(MESHES, RARE_MESHES))
def test_meshes_train_as_one_process(meshes: Found, case: str) -> None:
    for rank in meshes:
        insist(rank[case], 1e-12, 1e-10)
