"""Optimizers that couple elements or weights train on every layout as in one process."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_worker import Block
from forked import on_ranks
from owned_steps_worker import (
    Found,
    Make,
    Tied,
    compared,
    distance,
    engine_of,
    gap_of,
    plain,
    plan_of,
    split,
    train,
)
from torch import nn

from outsize.errors import BadOption
from outsize.train.optimizers.placed import OwnerNote

# owned_steps_worker has put the folder of these on the path.
from coupled_optimizers import (  # isort: skip
    ALL_WEIGHTS, DRAWS, ELEMENTWISE, PER_WEIGHT, Curvature, OwnRate, Sharpness, StepsCopies,
)  # fmt: skip

EVERY: dict[str, Make] = {**ELEMENTWISE, **PER_WEIGHT, **ALL_WEIGHTS, **DRAWS}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "stages": (2, {"stages": 2}),
    "tp": (2, {"tp": 2}),
    "shards": (2, {"dp_shard": 2}),
    "replicas": (2, {"dp_replicate": 2}),
    "stages and shards": (4, {"stages": 2, "dp_shard": 2}),
    "stages and tp": (4, {"stages": 2, "tp": 2}),
    "shards and tp": (4, {"dp_shard": 2, "tp": 2}),
}
# Engines of one model share what the first has recorded: the optimizers are asked about here.
pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]


@pytest.fixture(scope="module")
def expected() -> dict[str, Found]:
    return {name: plain(make) for name, make in EVERY.items()}


MORE = ("stages and tp", "shards and tp")
KINDS = (ELEMENTWISE, PER_WEIGHT, ALL_WEIGHTS, DRAWS)


def each_of(every: int) -> dict[str, Make]:
    """One of so many optimizers of each kind; test_coupling.py asks each which kind it is."""
    return {name: make for kind in KINDS for name, make in [*kind.items()][::every]}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.full] * (each in MORE)) for each in LAYOUTS]
)
def test_numbers_of_one_process(
    pytestconfig: pytest.Config, tmp_path: Path, expected: dict[str, Found], layout: str
) -> None:
    """Bits but for tp, where gradients are rounded; also hyperparameters that a step changes, and draws."""
    everything = layout in MORE or pytestconfig.getoption("--all")
    makes = EVERY if everything else each_of(2 if layout == "shards" else 6)
    ranks, axes = LAYOUTS[layout]
    plan = plan_of(ranks, **axes)
    most = 2e-6 if "tp" in axes else 0.0

    def work(group: Any) -> dict[str, Any]:
        return compared(makes, plan, expected, group)

    for said in on_ranks(tmp_path, ranks, work):
        wrong = {name: each for name, each in said.items() if each[0] > most or not all(each[1:])}
        assert not wrong


@pytest.mark.parametrize("layout", ["stages", "shards"])
def test_a_rate_that_the_step_itself_writes_differs_between_ranks(tmp_path: Path, layout: str) -> None:
    (ranks, axes), wanted = LAYOUTS[layout], plain(OwnRate)
    plan = plan_of(ranks, **axes)

    def work(group: Any) -> tuple[float, Any]:
        found = split(OwnRate, plan, group)
        return distance(found, wanted), found.group

    (first_gap, first), (second_gap, second) = on_ranks(tmp_path, ranks, work)
    assert (first_gap, second_gap) == (0.0, 0.0)
    assert first != second


def test_an_optimizer_that_steps_copies_of_its_weights(tmp_path: Path) -> None:
    (ranks, axes), wanted = LAYOUTS["shards"], plain(StepsCopies)
    plan = plan_of(ranks, **axes)
    assert on_ranks(tmp_path, ranks, lambda group: distance(split(StepsCopies, plan, group), wanted)) == [
        0,
        0,
    ]


GOES_ON = {"adafactor": PER_WEIGHT["adafactor"], "growing step": ALL_WEIGHTS["growing step"]}


def half(makes: dict[str, Make], plan: Any, folder: Path, group: Any) -> None:
    for name, make in makes.items():
        engine = engine_of(make, plan, group)
        train(engine, steps=2)
        engine.save(folder / name)


def other_half(
    makes: dict[str, Make], plan: Any, expected: dict[str, Found], folder: Path, group: Any
) -> dict[str, float]:
    said = dict[str, float]()
    for name, make in makes.items():
        engine = engine_of(make, plan, group)
        engine.state.resume(folder / name)
        found = Found(losses=train(engine, first=2, steps=2), weights=engine.weights.full_state_dict())
        wanted = Found(losses=expected[name].losses[2:], weights=expected[name].weights)
        said[name] = distance(found, wanted)
    return said


@pytest.mark.filterwarnings("ignore::outsize.train.checkpoint.loop.attached.ResumeNote")
@pytest.mark.parametrize(("first", "then"), [("shards", "stages"), ("stages and shards", "shards")])
def test_states_of_owners_go_on_in_another_layout(
    tmp_path: Path, expected: dict[str, Found], first: str, then: str
) -> None:
    """Whole weights have whole states, so it does not matter which ranks owned them."""
    (ranks, axes), (ranks_then, axes_then) = LAYOUTS[first], LAYOUTS[then]
    plan, plan_then = plan_of(ranks, **axes), plan_of(ranks_then, **axes_then)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    on_ranks(tmp_path / "a", ranks, lambda group: half(GOES_ON, plan, tmp_path / "saved", group))
    for said in on_ranks(
        tmp_path / "b",
        ranks_then,
        lambda group: other_half(GOES_ON, plan_then, expected, tmp_path / "saved", group),
    ):
        assert said == dict.fromkeys(GOES_ON, 0.0)


def clipped(make: Make, plan: Any, expected: Found, group: Any) -> float:
    engine = engine_of(make, plan, group, clip_norm=0.5, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)  # it holds the user's optimizer
    found = Found()
    for step in range(4):
        found.losses += train(engine, first=step, steps=1)
        schedule.step()
    found.weights = engine.weights.full_state_dict()
    return distance(found, expected)


@pytest.mark.parametrize("name", ["row norm", "growing step"])
def test_clipping_scaling_and_schedules_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    expected = plain(EVERY[name], clip_norm=0.5, halves_rate=True)
    plan = plan_of(2, dp_shard=2)
    for gap in on_ranks(tmp_path, 2, lambda group: clipped(EVERY[name], plan, expected, group)):
        assert gap <= 1e-6


def test_only_what_needs_whole_weights_has_owners(tmp_path: Path) -> None:
    """AdamW steps this rank's shards; Rprop's operations do not know them."""
    makes, plan = {"adamw": torch.optim.AdamW, "rprop": EVERY["rprop"]}, plan_of(2, dp_shard=2)

    def work(group: Any) -> dict[str, list[int]]:
        engines = {name: engine_of(make, plan, group) for name, make in makes.items()}
        return {
            name: sorted({p.numel() for g in engine.optimizer.param_groups for p in g["params"] if p.is_meta})
            for name, engine in engines.items()
            if engine.optimizer is not None
        }

    for meta in on_ranks(tmp_path, 2, work):
        assert not meta["adamw"]
        assert meta["rprop"]


def experts() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Block(experts=4), nn.Linear(16, 16))


def attention() -> nn.Module:
    """Without biases: that of a key has no gradient but for rounding, and Adafactor divides by its size."""
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, bias=False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("build", "axes"),
    [
        (Tied, {"stages": 2}),
        (Tied, {"dp_shard": 2}),
        (experts, {"ep": 2}),
        (attention, {"cp": 2, "stages": 2}),
    ],
)
def test_owners_with_shared_weights_experts_and_divided_sequences(
    tmp_path: Path, build: Any, axes: dict[str, int]
) -> None:
    """In double precision, since experts and parts of sequences add up in another order."""
    makes = [PER_WEIGHT["adafactor"], ALL_WEIGHTS["global norm"]]
    ranks = math.prod(axes.values())
    for gaps in on_ranks(tmp_path, ranks, lambda group: [gap_of(make, build, axes, group) for make in makes]):
        assert max(gaps) < 1e-9


def wants_many(parameters: Any) -> torch.optim.Optimizer:
    weights = list(parameters)
    if sum(p.numel() for p in weights) < 1000:
        raise ValueError("a small model")
    return torch.optim.Adafactor(weights, lr=0.02)


@pytest.mark.parametrize("layout", ["stages", "shards"])
def test_what_the_trial_cannot_find_out_is_said_and_stepped_by_one_rank(tmp_path: Path, layout: str) -> None:
    (ranks, axes), expected = LAYOUTS[layout], plain(wants_many)
    plan = plan_of(ranks, **axes)

    def work(group: Any) -> tuple[list[str], float]:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", OwnerNote)
            found = split(wants_many, plan, group)
        return [str(w.message) for w in noted if w.category is OwnerNote], distance(found, expected)

    (first, gap), (second, _) = on_ranks(tmp_path, ranks, work)
    assert len(first) == 1
    assert "(ValueError: a small model), so one rank steps all weights" in first[0]
    assert (second, gap) == ([], 0.0)


REFUSED = {
    "LBFGS": (torch.optim.LBFGS, "by evaluating the batch several times"),
    "Sharpness": (Sharpness, "by evaluating the batch several times"),
    "Curvature": (Curvature, "differentiates gradients"),
}


@pytest.mark.parametrize("layout", ["stages", "replicas"])
def test_steps_that_want_more_than_gradients_are_refused_on_every_rank(tmp_path: Path, layout: str) -> None:
    ranks, axes = LAYOUTS[layout]
    plan = plan_of(ranks, **axes)

    def work(group: Any) -> dict[str, str]:
        said = dict[str, str]()
        for name, (make, _) in REFUSED.items():
            with pytest.raises(BadOption) as caught:
                engine_of(make, plan, group)
            said[name] = str(caught.value)
        return said

    for said in on_ranks(tmp_path, ranks, work):
        for name, (_, what) in REFUSED.items():
            assert f"{name} " in said[name]
            assert what in said[name]
