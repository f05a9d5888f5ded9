"""Weights that replicas share, over forks of this process: the numbers of the plain loop, and less memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks
from layouts_worker import made
from parity_runs import SEED, Combination, captured, planned
from recorded_once import recorded_once
from tensor_worker import all_in
from zoo import case

import outsize
from outsize.capture.recording.fallbacks import record
from outsize.ir.plan import Axes, Plan
from outsize.policies.weights import Weights
from outsize.run.collectives.tensor_parallel import full_of
from outsize.run.stage.rng import seeder
from outsize.schedules.refine import by_blocks
from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.batch.loss_weights import LossShares
from outsize.train.check.reference import reference_step
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

STEPS, MICROBATCHES, CLIP = 2, 4, 0.5
Numbers = dict[str, Any]
SINGLE, DOUBLE = torch.float32, torch.float64
MODELS = ("llama", "gpt2", "t5", "vit", "unet", "narrow_resnet18")


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def plan_of(name: str, pp: int, *, replicate: int = 1, **changes: Any) -> Plan:
    plan = planned(Combination(name, MICROBATCHES, pp, "1f1b"))
    axes = Axes(pp=pp, dp_replicate=replicate, dp_shard=2)
    update = {"axes": axes, "weights": "sharded", "microbatches": MICROBATCHES // (2 * replicate), **changes}
    return by_blocks(plan.model_copy(update=update), captured(name, MICROBATCHES).graph)


def steps_of(name: str, dtype: torch.dtype) -> int:
    """A ResNet on images of few pixels makes of a rounding in fp32 1e-4 within three steps."""
    return 1 if (name, dtype) == ("narrow_resnet18", SINGLE) else STEPS


def freeze(model: nn.Module, *, frozen: bool) -> None:
    """Freezes every second weight, or trains it again."""
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(not frozen)


@cache
def plain(name: str, dtype: torch.dtype, *, thaws: bool = False) -> Numbers:
    """Losses, norms, the first step's gradients, the parameters after the last; with `thaws` every second
    weight is frozen in the first step.
    """
    model, batch = made(name, dtype)
    freeze(model, frozen=thaws)
    batch = BatchDims(rejection(model, case(name).loss)).of(batch)
    optimizer = (adamw if dtype == DOUBLE else sgd)(model.parameters())
    parts = batch.split(MICROBATCHES)
    tape = record(model, parts[0].args, parts[0].kwargs, case(name).loss, parts[0].target)
    found: Numbers = {"losses": [], "norms": []}
    for step in range(steps_of(name, dtype)):
        seeds = [seeder(SEED, step, mb) for mb in range(MICROBATCHES)]
        shares = LossShares(tape, model).of(parts)
        loss = reference_step(model, tape, parts, shares, seeds, case(name).loss).loss
        if not step:
            found["grads"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        found["losses"].append(loss)
        optimizer.step()
        optimizer.zero_grad()
        freeze(model, frozen=False)
    found["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
    return found


def engine_of(name: str, dtype: torch.dtype, plan: Plan, group: dist.ProcessGroup) -> tuple[Engine, Batch]:
    model, batch = made(name, dtype)
    make = adamw if dtype == DOUBLE else sgd
    found = {"loss_fn": case(name).loss, "optimizer": make, "seed": SEED, "clip_norm": CLIP}
    return make_engine(model, plan, group, EngineOptions(**found)), batch


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest element; a bias of keys, whose gradient is rounding alone, has none: 1e-3."""
    gap = (found.detach().double() - expected.double()).abs().max()
    return float(gap / expected.double().abs().max().clamp(min=1e-3))


def insist(engine: Engine, batch: Batch, expected: Numbers, most: float) -> None:
    losses, norms, grads = [], [], dict[str, Tensor]()
    for step in range(len(expected["losses"])):
        result = engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
        if not step:
            grads = {
                n: full_of(p.grad).clone() for n, p in engine.weights.named_parameters() if p.grad is not None
            }
        losses.append(result.loss)
        norms.append(engine.update())
    own = dict(engine.weights.named_parameters())
    assert grads.keys() == expected["grads"].keys() & own.keys()
    pairs = {n: (g, expected["grads"][n]) for n, g in grads.items()}
    pairs |= {f"trained {n}": (full_of(p), expected["parameters"][n]) for n, p in own.items()}
    pairs |= {f"loss {at}": pair for at, pair in enumerate(zip(losses, expected["losses"], strict=True))}
    pairs |= {f"norm {at}": pair for at, pair in enumerate(zip(norms, expected["norms"], strict=True))}
    # A norm adds up millions of squares in the gradients' own precision.
    mosts = {n: most * (10 if n.startswith("norm") else 1) for n in pairs}
    wrong = {n: d for n, pair in pairs.items() if not (d := distance(*pair)) <= mosts[n]}
    assert not wrong, wrong


@pytest.fixture(autouse=True)
def _recorded_once() -> Iterator[None]:
    """Ranks run what this process has recorded; zoo_worker.py shows that they record as well."""
    with recorded_once():
        yield


def work(cases: list[tuple[str, torch.dtype, Plan, Numbers]], group: dist.ProcessGroup) -> list[str]:
    said = []
    for name, dtype, plan, expected in cases:
        try:
            with all_in(dtype):
                engine, batch = engine_of(name, dtype, plan, group)
                insist(engine, batch, expected, 1e-10 if dtype == DOUBLE else 1e-6)
        except AssertionError as error:
            said.append(f"{name} {dtype}: {str(error)[:600]}")
    return said


@pytest.mark.parametrize(
    ("weights", "pp", "replicate", "cases"),
    [
        ("sharded", 1, 1, [(name, DOUBLE) for name in ("t5", "narrow_resnet18")]),
        pytest.param("sharded", 1, 1, [(name, DOUBLE) for name in MODELS], marks=pytest.mark.full),
        ("sharded", 2, 1, [(name, SINGLE) for name in ("llama", "unet")]),
        pytest.param("sharded", 2, 1, [(name, SINGLE) for name in MODELS[::2]], marks=pytest.mark.full),
        pytest.param("sharded", 2, 1, [(name, SINGLE) for name in MODELS[1::2]], marks=pytest.mark.full),
        ("sharded", 1, 2, [("gpt2", SINGLE)]),
        pytest.param("sharded", 1, 2, [("t5", DOUBLE), ("vit", SINGLE)], marks=pytest.mark.full),
        pytest.param(
            "sharded", 1, 2, [(name, SINGLE) for name in ("llama", "t5", "unet")], marks=pytest.mark.full
        ),
        ("resident", 1, 1, [("narrow_resnet18", DOUBLE)]),
        pytest.param("resident", 1, 1, [("llama", DOUBLE)], marks=pytest.mark.full),
        ("resident", 2, 1, [("gpt2", DOUBLE)]),
        pytest.param("resident", 2, 1, [("unet", DOUBLE)], marks=pytest.mark.full),
        pytest.param(
            "resident",
            2,
            1,
            [(name, DOUBLE) for name in ("llama", "narrow_resnet18")],
            marks=pytest.mark.full,
        ),
        ("resident", 1, 2, [("gpt2", SINGLE)]),
    ],
)
@pytest.mark.sample("sharded-1-1", "sharded-2-1", "resident-1-2")
def test_plans_over_shards_give_the_numbers_of_one_process(
    tmp_path: Path, weights: Weights, pp: int, replicate: int, cases: list[tuple[str, torch.dtype]]
) -> None:
    asked = []
    for name, dtype in cases:
        with all_in(dtype):
            plan = plan_of(name, pp, replicate=replicate, weights=weights)
            asked.append((name, dtype, plan, plain(name, dtype)))
    found = on_ranks(tmp_path, 2 * pp * replicate, lambda group: work(asked, group))
    assert found == [[]] * (2 * pp * replicate)


def thawed(name: str, plan: Plan, expected: Numbers, group: dist.ProcessGroup) -> tuple[list[str], float]:
    """Which weights are sharded, and the largest distance of a trained weight, frozen before or not."""
    model, batch = made(name, DOUBLE)
    freeze(model, frozen=True)
    found = {"loss_fn": case(name).loss, "optimizer": adamw, "seed": SEED, "clip_norm": CLIP}
    with all_in(DOUBLE):
        engine = make_engine(model, plan, group, EngineOptions(**found))
        for _ in expected["losses"]:
            engine.step(*batch.args, target=batch.target or None, **batch.kwargs)
            freeze(engine.weights.module, frozen=False)
    own = dict(engine.weights.named_parameters())
    sharded = [n for n, p in own.items() if isinstance(p, DTensor)]
    return sharded, max(distance(full_of(p), expected["parameters"][n]) for n, p in own.items())


def test_weights_that_were_frozen_at_first_stay_whole_and_train_later(tmp_path: Path) -> None:
    with all_in(DOUBLE):
        plan, expected = plan_of("gpt2", 1, weights="resident"), plain("gpt2", DOUBLE, thaws=True)
        names = [name for name, _ in made("gpt2", DOUBLE)[0].named_parameters()]
    for sharded, worst in on_ranks(tmp_path, 2, lambda group: thawed("gpt2", plan, expected, group)):
        assert set(sharded) == set(names[1::2])
        assert worst < 1e-10


def parts_of_parts(name: str, plan: Plan, expected: Numbers, group: dist.ProcessGroup) -> dict[str, float]:
    """Distances of all losses and norms, and on rank 0 of the trained weights."""
    engine, batch = engine_of(name, SINGLE, plan, group)
    steps = [engine.step(*batch.args, target=batch.target or None, **batch.kwargs) for _ in range(STEPS)]
    pairs = {f"loss {at}": (s.loss, expected["losses"][at]) for at, s in enumerate(steps)}
    pairs |= {f"norm {at}": (s.grad_norm, expected["norms"][at]) for at, s in enumerate(steps)}
    trained = engine.weights.full_state_dict()
    pairs |= {n: (trained[n], p) for n, p in expected["parameters"].items() if trained}
    return {n: distance(*pair) for n, pair in pairs.items()}


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_what_tensor_parallelism_divides_is_sharded_once_more(tmp_path: Path, name: str) -> None:
    axes = Axes(dp_shard=2, tp=2)
    plan, expected = plan_of(name, 1, axes=axes), plain(name, SINGLE)
    for found in on_ranks(tmp_path, 4, lambda group: parts_of_parts(name, plan, expected, group)):
        assert max(found.values()) <= 1e-6, {n: d for n, d in found.items() if d > 1e-6}


class LearnedQueries(nn.Module):
    """Queries that are views of weights, which every block of a decoder reads, and an output is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 16), nn.Linear(16, 5)
        self.place, self.token = nn.Parameter(torch.randn(3, 16)), nn.Embedding(3, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        place = self.place.t().unsqueeze(0).expand(len(x), -1, -1).transpose(1, 2)
        token = self.token.weight.unsqueeze(0)
        queries = token.expand_as(place)
        for layer in self.layers:
            queries = queries + layer(queries + place + x.mean(1, keepdim=True)).tanh()
        return self.leave(queries.mean(1)), token


def token_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


def queried() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(SEED)
    return LearnedQueries().double(), torch.randn(8, 4, 6).double(), torch.randn(8, 5).double()


def steps_with_queries(call: str, group: dist.ProcessGroup) -> tuple[dict[str, Tensor], Tensor | None]:
    """The weights after two steps of SGD, and the queries as an evaluation returns them to rank 0."""
    model, x, y = queried()
    asked: dict[str, Any] = {"stages": 1, "microbatches": 2, "axes": {"dp_shard": 2}}
    if call == "split":
        split = outsize.split(model, (x,), **asked)
        optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            token_loss(split(x), y).backward()
            optimizer.step()
        token = split(x)[1].detach()
        return {name: full_of(p) for name, p in split.named_parameters()}, token.clone()
    sgd_of = partial(torch.optim.SGD, lr=0.1)
    engine = outsize.parallelize(model, (x,), loss_fn=token_loss, target=y, optimizer=sgd_of, **asked)
    for _ in range(STEPS):
        engine.step(x, target=y)
    outputs = engine.evaluate(x, target=y).outputs
    return engine.weights.full_state_dict(), None if outputs is None else outputs[0][1]


@pytest.mark.parametrize("call", ["step", "split"])
def test_views_of_weights_outlive_the_weights_that_a_stage_gathers(tmp_path: Path, call: str) -> None:
    model, x, y = queried()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        optimizer.step()
    found, tokens = on_ranks(tmp_path, 2, lambda group: steps_with_queries(call, group))[0]
    assert tokens is not None
    assert max(distance(found[name], p) for name, p in model.state_dict().items()) < 1e-10
    assert distance(tokens, model.get_parameter("token.weight").unsqueeze(0)) < 1e-10
