"""Weights that come and go, on a device that is none: every access in order, and each order is needed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_streams import Access, FakeEvent, FakeStreams, Fault
from torch import Tensor, nn

import outsize
from outsize.device.streams import TorchStreams
from outsize.errors import BadOption, InvalidSchedule
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.run.host.flat_buffer import ALIGN, WeightBlock
from outsize.run.host.residency import AbsentWeight, Residency
from outsize.run.interpreter.multi_device import MultiDevice
from outsize.run.moves.host import HostMoves
from outsize.run.stage.stage import StageExecutor
from outsize.schedules.offload import ROOM
from outsize.train.context.options import EngineOptions
from outsize.train.context.run_context import RunContext
from outsize.train.engine.engine import Engine

WIDTH, STAGES, SAMPLES = 6, 4, 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(STAGES) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def planned(schedule: str = "gpipe") -> Plan:
    graph = outsize.capture(model(), (torch.zeros(SAMPLES // 2, WIDTH),), loss_fn=loss)
    bounds = (*range(0, 2 * STAGES, 2), len(graph.units))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="1xcpu",
        axes=Axes(),
        batch_size=SAMPLES,
        microbatches=2,
        schedule=schedule,  # pyright: ignore[reportArgumentType]
        stages=stages_from_bounds(graph, bounds, ("cpu:0",) * STAGES),
        weights="host",
    )


class World:
    """An engine on the place `a`, whose kernels say what they read and write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, schedule: str = "gpipe", room: int = ROOM) -> None:
        self.streams, self.model, self.plan = FakeStreams(), model(), planned(schedule)
        self.residency = Residency(self.model, self.streams, "a")
        options, together = (
            EngineOptions(loss_fn=loss, optimizer=self._adamw),
            MultiDevice(self.streams, ("a",)),
        )
        run = RunContext.of_one_process(self.model, self.plan, options, together)
        self.engine = Engine(replace(run, moves=HostMoves(self.residency, room)))
        for name in ("forward", "backward"):
            self._watch(monkeypatch, name, getattr(StageExecutor, name))

    @staticmethod
    def _adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, really: Any) -> None:
        def watched(stage: StageExecutor, *given: Any) -> Any:
            found = (self.model.get_parameter(weight) for weight in stage.program.weights)
            own = [weight for weight in found if not isinstance(weight, AbsentWeight)]
            for weight in own:
                self.streams.use(weight, "a")
            found = really(stage, *given)
            for weight in own:
                self.streams.use(weight, "a")
                if weight.grad is not None:
                    self.streams.make(weight.grad, "a")
            return found

        monkeypatch.setattr(StageExecutor, name, watched)

    def run(self, steps: int = 3) -> list[Tensor]:
        """Losses; the optimizer steps as gradients land."""
        return [self.engine.step(x).loss for x in batches(steps)]

    def insist_on_the_plain_loop(self) -> None:
        """The optimizer steps at the end."""
        wanted, _ = plain()
        for x in batches(3):
            self.engine.step(x, update=False)
            self.engine.update()
        insist_equal(self, wanted)


def batches(steps: int) -> list[Tensor]:
    return [torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(steps)]


def plain(steps: int = 3, *, accumulate: int = 1) -> tuple[nn.Sequential, list[Tensor]]:
    found, losses = model(), list[Tensor]()
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.1)
    for number, x in enumerate(batches(steps), start=1):
        total: Any = 0
        for part in x.chunk(2):
            value = loss(found(part))
            (value * 0.5).backward()
            total = total + value.detach() * 0.5
        losses.append(total)
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found, losses


def insist_equal(world: World, wanted: nn.Sequential) -> None:
    pairs = zip(world.model.named_parameters(), wanted.parameters(), strict=True)
    assert [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)] == []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_late_copies_change_nothing(world: World) -> None:
    wanted, losses = plain()
    assert all(torch.equal(*pair) for pair in zip(world.run(), losses, strict=True))
    insist_equal(world, wanted)
    assert world.streams.copied == 3 * (2 * STAGES - 2 + 2 * STAGES), "two stay when the pass turns"


def test_microbatch_by_microbatch_gradients_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "naive")
    wanted, _ = plain()
    world.run()
    insist_equal(world, wanted)


def test_gradients_of_steps_before_come_to_the_device_first(world: World) -> None:
    wanted, _ = plain(4, accumulate=2)
    for number, x in enumerate(batches(4), start=1):
        world.engine.step(x, update=number % 2 == 0)
    insist_equal(world, wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "naive"])
@pytest.mark.parametrize("room", [3, STAGES])
def test_with_room_for_more_stages(monkeypatch: pytest.MonkeyPatch, schedule: str, room: int) -> None:
    """Late copies change nothing; with room for all, weights come and gradients go once a step."""
    world = World(monkeypatch, schedule, room)
    world.insist_on_the_plain_loop()
    assert world.residency.device_bytes == room * world.residency._blocks[0].size_bytes
    if room == STAGES:
        assert world.streams.copied == 3 * (STAGES + 2 * STAGES), "a stage has two gradients"


@pytest.mark.parametrize("schedule", ["gpipe", "naive"])
def test_gradients_of_steps_before_come_to_stages_that_stay(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    world = World(monkeypatch, schedule, STAGES)
    wanted, _ = plain(4, accumulate=2)
    for number, x in enumerate(batches(4), start=1):
        world.engine.step(x, update=number % 2 == 0)
    insist_equal(world, wanted)


def test_they_come_when_a_backward_begins_and_not_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else all of them would be on the device at once."""
    world, really, most = World(monkeypatch, room=STAGES), StageExecutor.backward, list[int]()

    def watched(stage: StageExecutor, *given: Any) -> Any:
        there = (p for p in world.model.parameters() if not isinstance(p, AbsentWeight))
        most.append(sum(p.grad is not None for p in there))
        return really(stage, *given)

    monkeypatch.setattr(StageExecutor, "backward", watched)
    for x in batches(2):
        world.engine.step(x, update=False)
    assert most[-2 * STAGES :] == [2] * 2 * STAGES, "weight and bias of the stage at work"


def test_the_optimizer_belongs_to_the_step_that_is_measured() -> None:
    """On the CPU with steps in a thread as beside a GPU, each of 20 ms: the last ends behind all kernels."""
    found, plan = model(), planned()
    residency = Residency(found, TorchStreams(("cpu",)), "cpu", threaded=True)
    run = RunContext.of_one_process(found, plan, EngineOptions(loss_fn=loss, optimizer=Slow))
    engine = Engine(replace(run, moves=HostMoves(residency)))
    for x in batches(2):
        engine.step(x)
    assert engine.timeline().duration_s >= 0.02 * STAGES


class Slow(torch.optim.SGD):
    """SGD that takes its time."""

    __module__ = "torch.optim.slow"

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step(closure)


FAULTS: dict[str, Fault] = {
    "a place is written before its last use": lambda s, e: "cpu a" in s.name and "compute" in e.stream.name,
    "weights are used before they are there": lambda s, e: "compute" in s.name and "cpu a" in e.stream.name,
    "gradients leave before they are made": lambda s, e: "a cpu" in s.name and "compute" in e.stream.name,
    "gradients are let go before they left": lambda s, e: "compute" in s.name and "a cpu" in e.stream.name,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
@pytest.mark.parametrize("room", [ROOM, STAGES])
def test_every_order_is_needed(monkeypatch: pytest.MonkeyPatch, room: int, fault: Fault) -> None:
    world = World(monkeypatch, room=room)
    world.streams.skip = fault
    with pytest.raises((Access, AssertionError)):  # NaN in a weight, where nobody reads too early
        world.insist_on_the_plain_loop()


def test_the_host_waits_for_gradients(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "wait", lambda event: None)
    world.run()
    wanted, _ = plain()
    with pytest.raises(AssertionError):
        insist_equal(world, wanted)


def test_a_stage_that_is_unloaded_too_early_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    really = HostMoves.scheduled

    def early(moves: HostMoves, schedule: Schedule, cut: Any) -> Schedule:
        loaded = really(moves, schedule, cut)
        row = [a for a in loaded.actions[0] if a != Action(1, Kind.UNLOAD)]
        row.insert(row.index(Action(1, Kind.F, 1)), Action(1, Kind.UNLOAD))
        return Schedule(loaded.name, loaded.microbatches, (tuple(row),))

    monkeypatch.setattr(HostMoves, "scheduled", early)
    with pytest.raises(InvalidSchedule, match="a weight is used while it is not on the device"):
        world.run()
    assert all(p.device.type == "cpu" for p in world.model.parameters()), "masters are back"


def test_a_schedule_without_loads_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.run.moves.host.with_loads", lambda schedule, room: schedule)
    with pytest.raises(InvalidSchedule, match="0F0 runs while stage 0 is not loaded"):
        world.run()


def test_between_steps_the_model_is_an_ordinary_one(world: World) -> None:
    world.run(1)
    assert {id(p) for g in world.engine.optimizer.param_groups for p in g["params"]} == {  # pyright: ignore[reportOptionalMemberAccess]
        id(p) for p in world.model.parameters()
    }
    before = {n: t.clone() for n, t in world.model.state_dict().items()}
    world.model.load_state_dict({n: torch.zeros_like(t) for n, t in before.items()}, assign=True)
    assert float(world.engine.step(torch.ones(SAMPLES, WIDTH), update=False).loss) == 0.0
    world.model.load_state_dict(before)
    assert float(world.engine.step(torch.ones(SAMPLES, WIDTH), update=False).loss) > 0.0


def test_two_stages_and_no_more_are_on_the_device(world: World) -> None:
    world.run(1)
    (size,) = {block.size_bytes for block in world.residency._blocks}
    assert world.residency.device_bytes == 2 * size
    assert world.residency.host_bytes == 2 * STAGES * size, "weights and gradients"


def test_hooks_on_gradients_are_refused(world: World) -> None:
    next(world.model.parameters()).register_hook(lambda gradient: gradient * 2)
    with pytest.raises(BadOption, match="has a hook on its gradient"):
        world.run(1)


def test_a_weight_that_changes_its_dtype_is_refused(world: World) -> None:
    world.run(1)
    world.model[0].weight.data = world.model[0].weight.data.double()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(BadOption, match="changed its shape or dtype"):
        world.residency._blocks[0].adopt("0.weight", world.model[0].weight)  # pyright: ignore[reportArgumentType]


def test_strides_stay_and_no_memory_is_wasted() -> None:
    """Within 2 % of the bytes of a layer of ordinary size; channels last as it was."""
    layer = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    before, strides = layer.weight.detach().clone(), layer.weight.stride()
    block = WeightBlock(dict(layer.named_parameters()), lambda size: torch.empty(size, dtype=torch.uint8))
    assert torch.equal(layer.weight, before)
    assert layer.weight.stride() == strides
    assert block.size_bytes <= 1.02 * sum(p.nbytes for p in layer.parameters())
    assert all(part.first % ALIGN == 0 for part in block.parts.values())
