"""ActivationOffload that go to the host and come back, on a device that is none: each order is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from fake_streams import LANE_FAULTS, Access, FakeStreams, Fault
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.ir.schedule import COMPUTE, Schedule, parse_row
from outsize.run.interpreter.multi_device import MultiDevice
from outsize.run.moves.activations import ActivationOffload, CopyLane, SavedTensors
from outsize.run.moves.base import Resident
from outsize.run.stage.cut import Cut
from outsize.train.context.options import EngineOptions
from outsize.train.context.run_context import RunContext
from outsize.train.engine.engine import Engine

WIDTH, SAMPLES, MICROBATCHES = 6, 12, 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def planned(schedule: ScheduleName, ranks: int) -> Plan:
    graph = outsize.capture(model(), (torch.zeros(SAMPLES // MICROBATCHES, WIDTH),), loss_fn=loss)
    n = len(graph.units)
    bounds = [n * stage // ranks for stage in range(ranks + 1)]
    first, *others = stages_from_bounds(graph, bounds, tuple(f"cpu:{rank}" for rank in range(ranks)))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{ranks}xcpu",
        axes=Axes(pp=ranks),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        stages=(first.model_copy(update={"recompute": "offload"}), *others),
    )


class World:
    """Ranks on the places `a`, `b`, `c`; stage 0, on `a`, says what its kernels save and read again."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, schedule: ScheduleName = "gpipe", ranks: int = 1
    ) -> None:
        self.streams, self.model, plan = FakeStreams(), model(), planned(schedule, ranks)
        self.lane = CopyLane(self.streams, "a", least_bytes=1)
        together = MultiDevice(self.streams, "abc"[:ranks])
        run = RunContext.of_one_process(self.model, plan, EngineOptions(loss_fn=loss), together)
        activations = ActivationOffload([0], lambda device: self.lane)
        self.engine = Engine(replace(run, activations=activations))
        monkeypatch.setattr(SavedTensors, "pack", self._watched(SavedTensors.pack, self._made))
        monkeypatch.setattr(SavedTensors, "unpack", self._watched(SavedTensors.unpack, self._used))

    def _watched(self, really: Any, watch: Callable[[Any, Any], None]) -> Any:
        def watched(saved: SavedTensors, given: Any) -> Any:
            found = really(saved, given)
            watch(given, found)
            return found

        return watched

    def _made(self, given: Any, found: Any) -> None:
        if not isinstance(found, Tensor):
            storage = self.streams.make(given, "a").untyped_storage()
            weakref.finalize(storage, self.streams.made.pop, storage.data_ptr(), None)

    def _used(self, given: Any, found: Any) -> None:
        if not isinstance(given, Tensor):
            self.streams.use(found, "a")

    def insist_on_the_plain_loop(self) -> None:
        wanted = model()
        for step in range(3):
            x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
            self.engine.step(x, update=False)
            for part in x.chunk(MICROBATCHES):
                (loss(wanted(part)) / MICROBATCHES).backward()
        pairs = zip(self.model.parameters(), wanted.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)


WAYS: list[tuple[ScheduleName, int]] = [("gpipe", 1), ("1f1b", 3)]


@pytest.mark.parametrize(("schedule", "ranks"), WAYS)
def test_late_copies_change_nothing(
    monkeypatch: pytest.MonkeyPatch, schedule: ScheduleName, ranks: int
) -> None:
    world = World(monkeypatch, schedule, ranks)
    world.insist_on_the_plain_loop()
    assert world.streams.copied > 3 * MICROBATCHES


@pytest.mark.parametrize("fault", LANE_FAULTS.values(), ids=list(LANE_FAULTS))
@pytest.mark.parametrize(("schedule", "ranks"), WAYS)
def test_every_order_is_needed(
    monkeypatch: pytest.MonkeyPatch, schedule: ScheduleName, ranks: int, fault: Fault
) -> None:
    world = World(monkeypatch, schedule, ranks)
    world.streams.skip = fault
    with pytest.raises((Access, AssertionError)):
        world.insist_on_the_plain_loop()


ROWS = {
    "gpipe": ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", ">0 >1 >2 <0 =0 >3 <1 =0 <2 =1 <3 =2 =3"),
    "1f1b": ("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", ">0 >1 <0 =0 >2 =0 <1 =1 >3 <2 =1 <3 =2 =3"),
    "two stages": ("0F0 0F1 4F0 4F1 4B0 4B1 0B0 0B1", ">0 >1 =0 <0 =1 <1 =0 =1"),
}


def _noting(sign: str, now: list[str]) -> Callable[[ActivationOffload, tuple[int, int]], None]:
    def note(_: ActivationOffload, key: tuple[int, int]) -> None:
        now.append(f"{sign}{key[1]}")

    return note


@pytest.mark.parametrize("name", list(ROWS))
def test_what_moves_beside_which_action(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What goes (>), has to be there (=) and comes (<), by microbatch; waiting twice does no harm."""
    now: list[str] = []
    for sign, move in ((">", "send"), ("=", "arrive"), ("<", "fetch")):
        monkeypatch.setattr(ActivationOffload, move, _noting(sign, now))
    text, wanted = ROWS[name]
    offload, cut = ActivationOffload([0, 4]), cast(Cut, None)
    moves, schedule = (
        offload.combined_with(Resident()),
        Schedule("custom", 4, (parse_row(text.replace(" ", ",")),)),
    )
    (row,) = moves.scheduled(schedule, cut).actions
    for at, action in enumerate(row):
        move = moves.arrival(row, at) if action.kind in COMPUTE else moves.action(row, at)
        if move is not None:
            move()
    assert " ".join(now) == wanted


def test_stages_that_keep_theirs_have_other_moves_alone() -> None:
    moves = Resident()
    assert ActivationOffload([]).combined_with(moves) is moves


def test_buffers_of_the_host_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were away at once, however many steps."""
    world = World(monkeypatch)
    world.insist_on_the_plain_loop()
    assert len(world.lane.buffers) == MICROBATCHES - 1


def test_a_storage_moves_once_whatever_lies_in_it() -> None:
    lane = CopyLane(FakeStreams(), "a", least_bytes=1)
    whole, weight = torch.arange(12.0).view(3, 4), torch.ones(4)
    saved = SavedTensors(lane, [weight])
    views = [whole, whole.t(), whole[1], whole[:, 2:].t(), whole.expand(2, 3, 4)]
    packed = [saved.pack(view) for view in views]
    assert saved.pack(weight) is weight
    lane.send(saved)
    (buffer,) = lane.buffers
    assert buffer.numel() == 64, "48 bytes, and what alignment takes"
    whole.fill_(0)
    lane.settle()
    found = [saved.unpack(each) for each in packed]
    assert [(t.shape, t.stride(), t.storage_offset()) for t in found] == [
        (t.shape, t.stride(), t.storage_offset()) for t in views
    ]
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1


def test_what_the_graph_has_dropped_does_not_move() -> None:
    streams = FakeStreams()
    lane = CopyLane(streams, "a", least_bytes=1)
    saved = SavedTensors(lane, [])
    dropped = saved.pack(torch.ones(4))
    kept, sent = saved.pack(torch.ones(5)), torch.ones(6)
    there = saved.pack(sent)
    del dropped
    saved.keep((sent, None))
    lane.send(saved)
    lane.settle()
    assert streams.copied == 1
    assert torch.equal(saved.unpack(kept), torch.ones(5))
    assert saved.unpack(there).data_ptr() == sent.data_ptr()
