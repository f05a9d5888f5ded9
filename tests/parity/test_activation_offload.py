"""Activations on the host until their backward: the plain loop to the bit, and few are on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted import Device
from parity_runs import (
    SEED,
    Combination,
    at_random,
    batch_of,
    captured,
    engine_for,
    interleaved,
    reference,
    split_run,
)
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.device.streams import TorchStreams
from outsize.errors import BadOption
from outsize.ir.graph import SMALL_BYTES
from outsize.ir.plan import Plan, ScheduleName
from outsize.run.moves import activations
from outsize.run.moves.activations import CopyLane
from outsize.run.stage import stage
from outsize.train.check.compare import adamw, compare
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[CopyLane]:
    """Those that engines make, on which all goes, however small."""
    found: list[CopyLane] = []

    def lane(device: torch.device) -> CopyLane:
        found.append(CopyLane(TorchStreams((str(device),)), str(device), least_bytes=1))
        return found[-1]

    monkeypatch.setattr(activations, "_lane", lane)
    return found


def offloaded(plan: Plan, only: int | None = None) -> Plan:
    """All stages, or one."""
    if only is None:
        return plan.model_copy(update={"recompute": "offload"})
    how = ("offload" if number == only else None for number in range(len(plan.stages)))
    stages = (s.model_copy(update={"recompute": h}) for s, h in zip(plan.stages, how, strict=True))
    return plan.model_copy(update={"stages": tuple(stages)})


CASES: list[tuple[str, int, ScheduleName]] = [
    ("narrow_resnet18", 1, "gpipe"),
    ("narrow_resnet18", 3, "1f1b"),
    ("gpt2", 1, "gpipe"),
    ("gpt2", 3, "1f1b"),
    ("unet", 2, "gpipe"),
    ("unet", 3, "zero-bubble"),
    ("lstm", 2, "gpipe"),
]


@pytest.mark.parametrize(("name", "stages", "how"), CASES)
@pytest.mark.sample("narrow_resnet18-3-1f1b", "gpt2-3-1f1b", "unet", "lstm")
def test_offload_changes_no_bit(name: str, stages: int, how: ScheduleName, lanes: list[CopyLane]) -> None:
    """Dropout and BatchNorm as they are; loss, gradients, buffers, parameters after AdamW steps."""
    plan = offloaded(at_random(Combination(name, 4, stages, how), seed=1))
    found = compare(reference(name, 4, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found
    assert sum(len(lane.buffers) for lane in lanes) > 0, "something was away"


@pytest.mark.parametrize("name", ["gpt2", "narrow_resnet18"])
@pytest.mark.sample("gpt2")
def test_interleaved_offload(name: str, lanes: list[CopyLane]) -> None:
    plan = offloaded(interleaved(Combination(name, 4, 4, "interleaved"), 2))
    found = compare(reference(name, 4, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found
    assert sum(len(lane.buffers) for lane in lanes) > 0


def test_one_stage_of_three(lanes: list[CopyLane]) -> None:
    plan = offloaded(at_random(Combination("unet", 4, 3, "1f1b"), seed=1), only=0)
    found = compare(reference("unet", 4, True), split_run("unet", plan, dropout=True))
    assert found.bit_equal, found
    assert sum(len(lane.buffers) for lane in lanes) > 0


class Odd(nn.Module):
    """Writes a weight, saves one storage in several views, complex numbers, a conjugate, its input."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.register_buffer("seen", torch.zeros(16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.seen.mul_(0.5).add_(h.detach().mean(0))
        left, right = h[:, :8], h[:, 8:].t()
        spectrum = torch.fft.fft(left * right.t())
        return self.last(h * h.sigmoid() * self.seen).sum(1) * (spectrum.conj() * spectrum).real.sum(1)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def steps_of(engine: Engine, steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        engine.step(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
    engine.evaluate(torch.ones(8, 8))
    engine.step([outsize.microbatch(torch.ones(n, 8)) for n in (3, 2, 3, 5)])
    return engine.weights.full_state_dict()


def odd_engine(plan: Plan) -> Engine:
    torch.manual_seed(0)
    return make_engine(Odd(), plan, None, EngineOptions(loss_fn=mean_square, optimizer=adamw))


def odd_plan() -> Plan:
    return outsize.plan(
        Odd(), (torch.zeros(8, 8),), loss_fn=mean_square, cluster="1xcpu", microbatches=4, schedule="gpipe"
    )


def test_views_complex_numbers_and_buffers_that_forwards_write(lanes: list[CopyLane]) -> None:
    plan = odd_plan()
    ours, theirs = steps_of(odd_engine(offloaded(plan))), steps_of(odd_engine(plan))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert lanes[0].buffers


def test_a_step_after_one_that_failed(lanes: list[CopyLane], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second backward: one microbatch is on its way, two are away."""
    plan = odd_plan()
    engines = odd_engine(offloaded(plan)), odd_engine(plan)
    for engine in engines:
        engine.step(torch.ones(8, 8))
        with monkeypatch.context() as patched:
            patched.setattr(stage, "run_backward", _failing(stage.run_backward))
            with pytest.raises(RuntimeError, match="second backward"):
                engine.step(torch.ones(8, 8), update=False)
    ours, theirs = map(steps_of, engines)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert len(lanes[0].buffers) <= 4


def _failing(really: Any) -> Any:
    calls = iter((True, False))

    def run(*given: Any) -> None:
        if not next(calls):
            raise RuntimeError("the second backward fails")
        really(*given)

    return run


def test_by_modules_is_refused() -> None:
    graph = captured("gpt2", 4).graph
    plan = offloaded(at_random(Combination("gpt2", 4, 1, "naive"), seed=1)).model_copy(
        update={"form": "modules"}
    )
    assert plan.fingerprint == graph.fingerprint
    with pytest.raises(BadOption, match="keeps its activations"):
        engine_for("gpt2", plan)


# -- what the device holds -------------------------------------------------------------------------------


def peak_bytes(engine: Engine, name: str) -> int:
    """Of a step after the first, beside weights and gradients, to which it adds."""
    batch = batch_of(case(name))
    engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)

    def host() -> list[Tensor]:
        return [data for lane in engine.crew.activations.lanes.values() for data in lane.buffers]

    with Device(host) as device:
        engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
    return device.peak


@pytest.mark.parametrize("name", ["unet", "narrow_resnet18", "gpt2"])
@pytest.mark.sample("unet", "gpt2")
def test_two_of_six_microbatches_are_on_the_device(name: str, lanes: list[CopyLane]) -> None:
    """One at work and one on its way; each that is away has one buffer of the host."""
    plan = at_random(Combination(name, 6, 1, "gpipe"), seed=1)
    plain, ours = (
        peak_bytes(engine_for(name, plan), name),
        peak_bytes(engine_for(name, offloaded(plan)), name),
    )
    (lane,) = lanes
    each = max(data.numel() for data in lane.buffers)
    assert len(lane.buffers) == 5, "the last one is at work, or the first one is"
    assert ours <= plain - 4 * each + each // 20
    assert 4 * each > 0.3 * plain, "much of it are activations"


def wide() -> nn.Sequential:
    """Of a microbatch of 64 samples it keeps a storage of SMALL_BYTES, and one that is smaller."""
    width = SMALL_BYTES // 4 // 64
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 1))


def test_small_storages_stay_and_the_account_is_what_is_counted() -> None:
    x, predicted, counted = torch.ones(384, 16), dict[str, int](), dict[str, int]()
    for how in ("none", "offload"):
        asked: Any = {"cluster": "1xcpu", "microbatches": 6, "schedule": "gpipe", "recompute": how}
        plan = outsize.plan(wide(), (x,), loss_fn=mean_square, **asked)
        assert plan.recompute == how
        assert plan.expected is not None
        predicted[how] = plan.expected.stages[0].activations_bytes
        engine = make_engine(wide(), plan, None, EngineOptions(loss_fn=mean_square, seed=SEED))
        engine.step(x, update=False)
        lanes = engine.crew.activations.lanes.values()
        with Device(lambda lanes=lanes: [data for lane in lanes for data in lane.buffers]) as device:
            engine.step(x, update=False)
        counted[how] = device.peak
        assert {data.numel() for lane in lanes for data in lane.buffers} <= {SMALL_BYTES}
    assert counted["none"] - counted["offload"] == pytest.approx(4 * SMALL_BYTES, rel=0.05)
    assert predicted["none"] - predicted["offload"] == pytest.approx(4 * SMALL_BYTES, rel=0.02)


def test_under_autocast(lanes: list[CopyLane]) -> None:
    plan = at_random(Combination("gpt2", 4, 2, "gpipe"), seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compare(split_run("gpt2", plan), split_run("gpt2", offloaded(plan)))
    assert found.bit_equal, found
    assert sum(len(lane.buffers) for lane in lanes) > 0
