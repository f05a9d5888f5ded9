"""What stages hand on leaves and comes back, on no device: each order is needed; what moves when."""

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
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.run.host.copy_lane import CopyLane
from outsize.run.interpreter.multi_device import MultiDevice
from outsize.run.moves.base import Resident
from outsize.run.moves.boundary_values import BoundaryValues, OffloadedValue, ValueHandle
from outsize.train.context.options import EngineOptions
from outsize.train.context.run_context import RunContext
from outsize.train.engine.engine import Engine

WIDTH, SAMPLES, MICROBATCHES = 6, 6, 3


def model(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def planned(layers: int) -> Plan:
    """Layer by layer."""
    graph = outsize.capture(model(layers), (torch.zeros(SAMPLES // MICROBATCHES, WIDTH),), loss_fn=loss)
    bounds = [2 * layer for layer in range(layers)] + [len(graph.units)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="1xcpu",
        axes=Axes(),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule="gpipe",
        recompute="full",
        stages=stages_from_bounds(graph, bounds, ("cpu:0",) * layers),
    )


class World:
    """All stages on the place `a`; what is handed on is made by its kernels, and read by them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layers: int = 4) -> None:
        self.streams, self.model, plan = FakeStreams(), model(layers), planned(layers)
        self.lane = CopyLane(self.streams, "a", least_bytes=1, both=True)
        self.values = BoundaryValues(self.lane)
        together = MultiDevice(self.streams, "a")
        run = RunContext.of_one_process(self.model, plan, EngineOptions(loss_fn=loss), together)
        self.engine = Engine(replace(run, values=self.values))
        monkeypatch.setattr(BoundaryValues, "wrap", self._lending(BoundaryValues.wrap))
        monkeypatch.setattr(ValueHandle, "wait", self._waiting(ValueHandle.wait))

    def _lending(self, really: Any) -> Any:
        def lend(values: BoundaryValues, key: Any, tensor: Tensor | None) -> Any:
            found = really(values, key, tensor)
            if tensor is not None:
                storage = self.streams.make(tensor, "a").untyped_storage()
                weakref.finalize(storage, self.streams.made.pop, storage.data_ptr(), None)
            return found

        return lend

    def _waiting(self, really: Any) -> Any:
        def wait(lent: ValueHandle) -> Tensor | None:
            found = really(lent)
            return None if found is None else self.streams.use(found, "a") or found

        return wait

    def insist_on_the_plain_loop(self) -> None:
        wanted = model(len(self.model) // 2)
        for step in range(3):
            x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
            self.engine.step(x, update=False)
            for part in x.chunk(MICROBATCHES):
                (loss(wanted(part)) / MICROBATCHES).backward()
        pairs = zip(self.model.parameters(), wanted.parameters(), strict=True)
        for ours, theirs in pairs:
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def test_late_copies_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.insist_on_the_plain_loop()
    assert world.streams.copied > 3 * MICROBATCHES


FAULTS: dict[str, Fault] = LANE_FAULTS | {
    "they come back before they left": lambda s, e: "cpu a" in s.name and "a cpu" in e.stream.name,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_every_order_is_needed(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    world = World(monkeypatch)
    world.streams.skip = fault
    with pytest.raises((Access, AssertionError)):
        world.insist_on_the_plain_loop()


PICTURE = """
compute   0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 0B0 0B1 0B2
leaves        x0  x1  x2  x0  x1  x2  g0  g1  g2
comes             x0  x1  x2  x0  x1  x2  g0  g1  g2
"""


def test_the_picture_is_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves is drawn below the compute action that comes next."""
    world, row = World(monkeypatch, layers=2), list[str]()
    drawn: dict[str, dict[int, str]] = {"leaves": {}, "comes": {}}

    def acting(moves: Resident, actions: Any, at: int) -> Callable[[], None]:
        return lambda: row.append(str(actions[at]))

    def noting(line: str, really: Callable[..., None]) -> Callable[..., None]:
        def move(lane: CopyLane, *values: OffloadedValue) -> None:
            going = [v for v in values if (v.memory.here is not None if line == "leaves" else v.away)]
            drawn[line] |= {len(row): name(world.values, value) for value in going}
            really(lane, *values)

        return move

    monkeypatch.setattr(Resident, "arrival", acting)
    monkeypatch.setattr(CopyLane, "send", noting("leaves", CopyLane.send))
    monkeypatch.setattr(CopyLane, "fetch", noting("comes", CopyLane.fetch))
    world.engine.step(torch.ones(SAMPLES, WIDTH), update=False)
    first, *others = PICTURE.strip().splitlines()
    assert row == first.split()[1:]
    for line in others:
        cells = {at: line[10 + 4 * at :][:4].strip() for at in range(len(row))}
        assert drawn[line.split()[0]] == {at: cell for at, cell in cells.items() if cell}


def name(values: BoundaryValues, parcel: OffloadedValue) -> str:
    """`x0`, or `g0` for the gradient of microbatch 0."""
    (key,) = (key for key, value in values._at.items() if value is parcel)  # pyright: ignore[reportPrivateUsage]
    return f"{'g' if key[3] else 'x'}{key[2]}"


def test_small_ones_stay_and_so_do_small_parts() -> None:
    lane = CopyLane(FakeStreams(), "a", least_bytes=64)
    values, whole = BoundaryValues(lane), torch.arange(64.0)
    given = [torch.ones(4), whole[:8], None, whole[:32]]
    lent = [values.wrap((key, 1, 0, False), tensor) for key, tensor in enumerate(given)]
    assert [key[0] for key in values._at] == [3]  # pyright: ignore[reportPrivateUsage]
    assert all(a.wait() is b for a, b in zip(lent[:3], given, strict=False))


def test_two_parts_of_a_storage_move_once() -> None:
    streams = FakeStreams()
    lane = CopyLane(streams, "a", least_bytes=1, both=True)
    values, whole = BoundaryValues(lane), torch.arange(64.0).view(8, 8)
    lent = [values.wrap((key, 1, 0, False), part) for key, part in enumerate((whole[:4], whole[4:].t()))]
    value = values._at[0, 1, 0, False]  # pyright: ignore[reportPrivateUsage]
    assert value is values._at[1, 1, 0, False]  # pyright: ignore[reportPrivateUsage]
    wanted = [whole[:4].clone(), whole[4:].t().clone()]
    lane.send(value)
    lane.settle()
    whole.fill_(0)
    found = [each.wait() for each in lent]
    assert streams.copied == 2, "to the host and back"
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if a is not None)
    assert found[1] is not None
    assert found[1].stride() == (1, 8)


def test_a_storage_that_took_the_place_of_another_is_not_taken_for_it() -> None:
    """Its number may be that of one which is away."""
    lane = CopyLane(FakeStreams(), "a", least_bytes=1)
    values, tensor = BoundaryValues(lane), torch.ones(8)
    lent = values.wrap((0, 1, 0, False), tensor)
    assert isinstance(values.pack(tensor), ValueHandle)
    lane.send(values._at[0, 1, 0, False])  # pyright: ignore[reportPrivateUsage]
    assert values.pack(tensor) is tensor
    lane.settle()
    assert torch.equal(cast(Tensor, lent.wait()), tensor)
