"""What stages hand to each other on the host: the plain loop to the bit, and the device has a few of them,
whatever the depth and the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from counted import Device
from parity_runs import SEED, Combination, at_random, reference, split_run
from torch import Tensor, nn

import outsize
from outsize.ir.graph import SMALL_BYTES
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.policies.weights import Weights
from outsize.run.host.copy_lane import CopyLane
from outsize.run.moves.host import HostMoves
from outsize.run.stage import stage
from outsize.train.check.compare import adamw, compare
from outsize.train.context.options import EngineOptions
from outsize.train.crew import hosted as hosted_crew
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[CopyLane]:
    """Those that engines make, on which all goes, however small."""
    found: list[CopyLane] = []

    def lane(*given: Any, **how: Any) -> CopyLane:
        found.append(CopyLane(*given, **how, least_bytes=1))
        return found[-1]

    monkeypatch.setattr(hosted_crew, "CopyLane", lane)
    return found


def on_host(plan: Plan, weights: Weights = "host-activations") -> Plan:
    """All stages on one device, each of which computes anew what it does not receive."""
    stages = tuple(each.model_copy(update={"device": "cpu:0"}) for each in plan.stages)
    changed = {"axes": Axes(), "cluster": "1xcpu", "weights": weights, "recompute": "full", "stages": stages}
    return plan.model_copy(update=changed)


CASES: list[tuple[str, int, int, ScheduleName]] = [
    ("narrow_resnet18", 4, 5, "gpipe"),
    ("gpt2", 4, 6, "gpipe"),
    ("gpt2", 1, 6, "gpipe"),
    ("unet", 3, 6, "gpipe"),
    ("unet", 3, 4, "naive"),
    ("t5", 4, 8, "gpipe"),
    ("lstm", 4, 3, "gpipe"),
]


@pytest.mark.parametrize(("name", "microbatches", "stages", "how"), CASES)
@pytest.mark.sample("narrow_resnet18", "gpt2-4-6-gpipe", "unet", "lstm")
def test_values_on_the_host_change_no_bit(
    name: str, microbatches: int, stages: int, how: ScheduleName, lanes: list[CopyLane]
) -> None:
    """Dropout and BatchNorm as they are; values that several stages read; the loss, gradients, buffers, and
    parameters after AdamW steps.
    """
    plan = on_host(at_random(Combination(name, microbatches, stages, how), seed=1))
    found = compare(reference(name, microbatches, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found
    assert sum(len(lane.buffers) for lane in lanes) > 0, "something was away"


# -- what the device holds -------------------------------------------------------------------------------

ROWS, WIDTH = 2048, 128  # of a sample: a value of SMALL_BYTES, 16 times a layer's weights


def deep(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def layer_by_layer(layers: int, microbatches: int, weights: Weights) -> Plan:
    """A stage for each layer, microbatches of a sample."""
    graph = outsize.capture(deep(layers), (torch.zeros(1, ROWS, WIDTH),), loss_fn=mean_square)
    bounds = (*range(0, 2 * layers, 2), len(graph.units))
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="1xcpu",
        axes=Axes(),
        batch_size=microbatches,
        microbatches=microbatches,
        schedule="gpipe",
        stages=stages_from_bounds(graph, bounds, ["cpu:0"] * (len(bounds) - 1)),
    )
    return on_host(plan, weights)


def on_the_host(engine: Engine) -> list[Tensor]:
    """Buffers of masters, of gradients, of values."""
    moves, lane = engine.crew.moves, engine.crew.values.lane
    assert isinstance(moves, HostMoves)
    blocks = moves.residency._blocks  # pyright: ignore[reportPrivateUsage]
    kept = [t for block in blocks for t in (block.values, block.gradients) if t is not None]
    return [*kept, *(lane.buffers if lane is not None else ())]


def peak_values(layers: int, microbatches: int, plan: Plan) -> float:
    """Of a step after the first, without the batch and the places of weights, in values of a microbatch."""
    engine = make_engine(deep(layers), plan, None, EngineOptions(loss_fn=mean_square, seed=SEED))
    x = torch.ones(microbatches, ROWS, WIDTH)
    engine.step(x, update=False)
    engine.model.zero_grad()
    with Device(partial(on_the_host, engine)) as device:
        engine.step(x, update=False)
    return device.peak / SMALL_BYTES


@pytest.mark.full
def test_depth_and_microbatches_do_not_matter() -> None:
    """Beside weights on the host the device has all values of all microbatches, and here a few."""
    small, deeper, more = (
        peak_values(layers, m, layer_by_layer(layers, m, "host-activations"))
        for layers, m in ((6, 4), (18, 4), (6, 12))
    )
    assert deeper == pytest.approx(small, abs=0.5)
    assert more == pytest.approx(small, abs=0.5)
    assert small < 9, "what is at work, what comes, and what a layer makes"
    assert peak_values(6, 4, layer_by_layer(6, 4, "host")) > 5 * 4 + 1
    assert peak_values(18, 4, layer_by_layer(18, 4, "host")) > 17 * 4 + 1


@pytest.mark.parametrize(("layers", "microbatches"), [(6, 4), (6, 8), (18, 4)])
@pytest.mark.sample("6-4", "6-8")
def test_the_account_is_what_is_counted(layers: int, microbatches: int) -> None:
    """And two values that are leaving: on a CPU a copy is made at once."""
    x = torch.ones(microbatches, ROWS, WIDTH)
    asked: Any = {"cluster": "1x12GB", "microbatches": microbatches, "weights": "host-activations"}
    plan = outsize.plan(deep(layers), (x,), loss_fn=mean_square, **asked)
    assert (plan.schedule, plan.recompute) == ("gpipe", "full")
    assert plan.expected is not None
    predicted = sum(stage.activations_bytes for stage in plan.expected.stages) / SMALL_BYTES
    counted = peak_values(layers, microbatches, plan)
    assert predicted - microbatches == pytest.approx(counted + 2, abs=0.5), "without the batch"


# -- what a loop may do ----------------------------------------------------------------------------------


def steps_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Also an evaluation, microbatches of other shapes, and a step after one that failed."""
    for step in range(2):
        engine.step(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step)))
    engine.evaluate(torch.ones(4, 6, 8))
    engine.step([outsize.microbatch(torch.ones(1, n, 8)) for n in (3, 6, 3, 5)])
    with monkeypatch.context() as patched:
        patched.setattr(stage, "run_backward", failing_at(7, stage.run_backward))
        with pytest.raises(RuntimeError, match="this backward fails"):
            engine.step(torch.ones(4, 6, 8), update=False)
    engine.model.zero_grad()
    engine.step(torch.ones(4, 6, 8))
    return engine.weights.full_state_dict()


class Views(nn.Module):
    """Hands on two views of one storage, its input, an integer and a scalar; saves nothing of some values."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.parts[0](x).chunk(2, -1)
        scale = left.mean()
        h = self.parts[1](torch.cat([right, left], -1)) + x
        h = self.norm(h.flatten(0, 1)).view_as(h)
        best = h.detach().argmax(-1)
        h = self.parts[2](h) * scale + right.repeat(1, 1, 2)
        h = self.parts[3](h).transpose(0, 1)
        return self.parts[4](h).sum() * best.float().mean() + left.square().sum()


def failing_at(call: int, really: Callable[..., None]) -> Callable[..., None]:
    calls = count()

    def run(*given: Any) -> None:
        if next(calls) == call:
            raise RuntimeError("this backward fails")
        really(*given)

    return run


def test_views_shapes_evaluations_and_failures(
    lanes: list[CopyLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    both: tuple[Weights, ...] = ("host-activations", "host")
    for weights in both:
        torch.manual_seed(0)
        model = Views()
        graph = outsize.capture(model, (torch.ones(1, 6, 8),), loss_fn=mean_square)
        plan = Plan(
            model=graph.model,
            fingerprint=graph.fingerprint,
            cluster="1xcpu",
            axes=Axes(),
            batch_size=4,
            microbatches=4,
            schedule="gpipe",
            stages=stages_from_bounds(graph, range(len(graph.units) + 1), ["cpu:0"] * len(graph.units)),
        )
        engine = make_engine(
            model, on_host(plan, weights), None, EngineOptions(loss_fn=mean_square, optimizer=adamw)
        )
        found.append(steps_of(engine, monkeypatch))
    ours, theirs = found
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert len(lanes) == 1
    assert lanes[0].buffers
