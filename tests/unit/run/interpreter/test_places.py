"""Ranks of one process on several devices that are none: the same numbers, and every access in order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_streams import Access, FakeStreams
from parity_runs import fresh
from shapes_runs import differing, plain_step, steps_of
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.errors import InvalidSchedule
from outsize.ir.plan import Plan
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.run.interpreter.interpreter import Interpreter, Programs, StepInputs
from outsize.run.interpreter.multi_device import MultiDevice
from outsize.run.stage.stage import StageExecutor
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.context.run_context import RunContext
from outsize.train.engine.engine import Engine
from outsize.train.engine.pipelined import Pipelined

pytestmark = pytest.mark.usefixtures("shared_recordings")

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
NAMED = {"two": ("a", "b"), "gpu-cpu": ("a", "cpu"), "cpu-gpu": ("cpu", "b"), "one": ("a", "a")}


class Watch:
    """Tells the fake devices what every stage reads and writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = FakeStreams()
        self.places: tuple[str, ...] = ("a", "b")
        self.plan: Any = None
        self._received: dict[tuple[int, int], Any] = {}
        self._patch = monkeypatch
        for name in ("forward", "backward", "backward_input", "backward_weight"):
            self._watch(name, getattr(StageExecutor, name))

    def _watch(self, name: str, really: Any) -> None:
        def watched(stage: StageExecutor, mb: int, *given: Any) -> Any:
            number = stage.program.stage
            place = self.places[self.plan.ranks[number]]
            if name == "forward":
                self._received[number, mb] = given[1]
            elif name != "backward_weight":
                self._read(place, given[1].values())
            last = name in ("backward", "backward_weight")
            self._read(place, self._received.pop((number, mb)) if last else self._received[number, mb])
            found = really(stage, mb, *given)
            for tensor in found.sent.values() if name == "forward" else (found or {}).values():
                if isinstance(tensor, Tensor):
                    self.world.make(tensor, place)
            return found

        self._patch.setattr(StageExecutor, name, watched)

    def _read(self, place: str, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.world.use(tensor, place)

    def engine(self, plan: Plan, model: nn.Module, **options: Any) -> Engine:
        self.plan = plan
        together = MultiDevice(self.world, self.places)
        return Engine(RunContext.of_one_process(model, plan, EngineOptions(**options), together))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def planned(name: str, places: tuple[str, ...], schedule: str, microbatches: int = 4) -> Plan:
    found, (args, kwargs) = case(name), case(name).batch(8)
    return outsize.plan(
        fresh(name),
        args,
        kwargs,
        cluster=f"{len(places)}xcpu",
        stages=len(places),
        schedule=schedule,  # pyright: ignore[reportArgumentType]
        microbatches=microbatches,
        loss_fn=found.loss,
        target=found.target(8),
    )


def insist_on_the_plain_loop(watch: Watch, name: str, schedule: str, steps: int = 2) -> Engine:
    found, (args, kwargs), target = case(name), case(name).batch(8), case(name).target(8)
    plan = planned(name, watch.places, schedule)
    model = fresh(name)
    engine = watch.engine(plan, model, loss_fn=found.loss)
    plain = outsize.parallelize(
        fresh(name), args, kwargs, target=target, loss_fn=found.loss, plan=plan
    )  # in one place: itself bit-equal to the plain loop (tests/parity)
    for _ in range(steps):
        ours = engine.step(*args, target=target, update=False, **kwargs)
        assert torch.equal(ours.loss, plain.step(*args, target=target, update=False, **kwargs).loss)
    wanted = {n: p.grad for n, p in plain.model.named_parameters()}
    for n, parameter in model.named_parameters():
        grad = wanted[n]
        assert (grad is None) == (parameter.grad is None)
        assert grad is None or torch.equal(grad, parameter.grad)  # pyright: ignore[reportArgumentType]
    return engine


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("places", list(NAMED.values()), ids=list(NAMED))
def test_stages_on_places_are_bit_equal(watch: Watch, places: tuple[str, ...], schedule: str) -> None:
    watch.places = places
    insist_on_the_plain_loop(watch, "mlp", schedule)
    assert (watch.world.copied > 0) == (len(set(places)) > 1)


@pytest.mark.parametrize("name", ["gpt2", "narrow_resnet18", "unet"])
@pytest.mark.sample("gpt2", "unet")
def test_tied_weights_skips_and_buffers_between_three_places(watch: Watch, name: str) -> None:
    watch.places = ("a", "b", "cpu")
    insist_on_the_plain_loop(watch, name, "1f1b")


def test_microbatches_of_several_shapes_between_places(watch: Watch) -> None:
    watch.places = ("a", "cpu")
    model, plain = fresh("gpt2"), fresh("gpt2")
    engine = watch.engine(planned("gpt2", watch.places, "1f1b"), model)
    for parts in steps_of("gpt2"):
        found = engine.step([part for part, _ in parts], update=False)
        assert torch.equal(found.loss, plain_step(plain, "gpt2", parts))
    assert differing(engine, plain) == []
    together: Any = engine.crew._together  # pyright: ignore[reportAttributeAccessIssue]
    assert together.buffers_made < 30, "shapes share buffers"


def test_buffers_are_as_many_as_are_in_flight(watch: Watch) -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())))
    x = torch.randn(32, 6)
    plan = outsize.plan(
        model, (x,), cluster="2xcpu", stages=2, microbatches=32, schedule="1f1b", loss_fn=torch.sum
    )
    engine = watch.engine(plan, model, loss_fn=torch.sum)
    for _ in range(3):
        engine.step(x, update=False)
    together: Any = engine.crew._together  # pyright: ignore[reportAttributeAccessIssue]
    assert together.buffers_made <= 2 + 2 * 2  # the trial's of each direction, and two in flight


def test_a_rank_that_uses_before_the_copy_is_found(watch: Watch) -> None:
    watch.world.skip = lambda stream, event: (
        stream.name == "compute b" and event.stream.name.startswith("copies a b 1")
    )
    with pytest.raises(Access, match="b reads before the copy"):
        insist_on_the_plain_loop(watch, "mlp", "gpipe")


def test_a_rank_that_reuses_a_buffer_too_early_is_found(watch: Watch) -> None:
    """In an evaluation; in training a gradient comes back first, and orders it all by itself."""
    engine = insist_on_the_plain_loop(watch, "mlp", "1f1b", steps=1)
    args, kwargs = case("mlp").batch(8)
    engine.evaluate(*args, **kwargs)
    watch.world.skip = lambda stream, event: (
        stream.name.startswith("copies a b") and event.stream.name == "compute b"
    )
    with pytest.raises(Access, match="before the last use"):
        engine.evaluate(*args, **kwargs)


def test_a_failed_step_leaves_nothing_behind(watch: Watch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    plan = outsize.plan(
        model, (x,), cluster="2xcpu", stages=2, microbatches=4, loss_fn=F.cross_entropy, target=y
    )
    plain = copy.deepcopy(model)
    engine = watch.engine(plan, model, loss_fn=F.cross_entropy)
    engine.step(x, target=y, update=False)
    with pytest.raises(IndexError):
        engine.step(x, target=y + 2, update=False)
    model.zero_grad()
    engine.step(x, target=y, update=False)
    for part in Batch((x,), {}, (y,)).split(4):
        (F.cross_entropy(plain(*part.args), *part.target) * 0.25).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # pyright: ignore[reportArgumentType]


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    engine = outsize.parallelize(model, (x,), stages=2, microbatches=1, loss_fn=torch.sum)
    assert isinstance(engine._executor, Pipelined)
    cut = engine._executor.variants.find(Batch((x,), {}), outputs=False).cut
    stages = [StageExecutor(program, model) for program in cut.programs]
    row = (Action(1, Kind.RECV_F, 0, peer=0), Action(1, Kind.F, 0))
    schedule = Schedule("half", 1, ((Action(0, Kind.F, 0),), row))
    places = MultiDevice(FakeStreams(), ("a", "b"))
    rank = Interpreter(1, schedule, Programs(2, lambda n, _: stages[n], [0]), places.transport(1))
    rank.begin(StepInputs([[x]], [1.0], [lambda _: None]))
    with pytest.raises(InvalidSchedule, match="rank 1 at 1F0"):
        places.run({1: rank})


def test_two_pipelines_side_by_side() -> None:
    """Rank p of replica r of 2 sits at 2 p + r; each has weights of its own, and copies wait as ever."""
    world, (args, _), target = FakeStreams(), case("mlp").batch(8), case("mlp").target(8)
    model, how = fresh("mlp"), dict[str, Any](loss_fn=case("mlp").loss)
    wishes: dict[str, Any] = {"cluster": "4xcpu", "stages": 2, "axes": {"dp_replicate": 2}, "microbatches": 2}
    plan = outsize.plan(fresh("mlp"), args, target=target, **how, **wishes)
    options, together = EngineOptions(**how), MultiDevice(world, ("a", "b", "c", "d"), 2)
    engine = Engine(RunContext.of_one_process(model, plan, options, together, 2))
    plain = Engine(RunContext.of_one_process(fresh("mlp"), plan, options))
    for _ in range(2):
        ours, theirs = (e.step(*args, target=target, update=False) for e in (engine, plain))
        assert torch.allclose(ours.loss, theirs.loss, rtol=1e-6)
    for mine, other in zip(model.parameters(), plain.model.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-7)
    assert world.copied > 0
    firsts = [s for s in engine.timeline().spans if s.action == "0F0"]
    assert [s.rank for s in firsts] == [0, 1]
    assert firsts[1].start_s < min(s.start_s for s in engine.timeline().spans if s.action == "0F1")
