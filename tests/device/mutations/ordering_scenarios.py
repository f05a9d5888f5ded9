"""Small programs that need every order of outsize, for the proof that a deleted one is found.

Each returns tensors, which have the same bits in every order of the streams as long as no wait is missing.
They run on ranks (device_ranks.py); `SCENARIOS` says on how many. The proof calls `observed` and `damaged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import ordering_sites
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_ranks import choose_order
from rank_scenarios import WIDTH, adam, on_cpu, small, trained
from torch import Tensor, nn

import outsize
import simdev
from outsize.capture.measure import units
from outsize.capture.measure.links import measure_links
from outsize.device.clock import clock_of
from outsize.device.streams import TorchStreams
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.ops.doctor.models import TIED
from outsize.run.host.copy_lane import CopyLane, OffloadedStorage
from outsize.run.interpreter.multi_device import MultiDevice
from outsize.run.moves import activations
from outsize.run.moves.boundary_values import OffloadedValue
from outsize.run.transport.device_copies import DeviceLink, _ThroughHost
from outsize.train.context.options import EngineOptions
from outsize.train.crew import hosted
from outsize.train.engine.factory import make_engine
from outsize.train.engine.loss_watch import LossWatch
from outsize.train.measure.round_trip import TimedWire
from outsize.train.world.world import World

ORDERS: Final = ("lazy", "seed1", "seed2", "seed3", "seed4")
MICROBATCHES: Final = 4
Values = list[Tensor]


# -- one process ---------------------------------------------------------------------------------------------


def batch_of(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, 16, generator=draw) for _ in range(2))
    return x, y


def engine_of(
    schedule: ScheduleName, stages: int, places: Sequence[str], model: nn.Module | None = None,
    changes: dict[str, Any] | None = None, **options: Any,
) -> outsize.Engine:  # fmt: skip
    """An engine with equal stages on these places, whatever a search would choose."""
    model, (x, y) = model or small(), batch_of(8)
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    graph, ranks = outsize.capture(model, (x,), **given), len(set(places))
    bounds = [len(graph.units) * at // stages for at in range(stages + 1)]
    devices = [f"cpu:{stage % ranks}" for stage in range(stages)]
    plan = Plan(
        model=graph.model, fingerprint=graph.fingerprint, cluster=f"{ranks}xcpu", axes=Axes(pp=ranks),
        batch_size=8, microbatches=MICROBATCHES, schedule=schedule,
        stages=stages_from_bounds(graph, bounds, devices),
    ).model_copy(update=changes or {})  # fmt: skip
    return outsize.parallelize(model, (x,), plan=plan, devices=list(places), **given, **options)


def steps_of(engine: outsize.Engine, samples: Sequence[int] = (8, 8)) -> Values:
    """Trains with batches of these sizes, whose memory the caller uses again; losses and weights."""
    losses = Values()
    for number, size in enumerate(samples):
        x, y = batch_of(size, number)
        losses.append(engine.step(x, target=y).loss)
        x.fill_(torch.nan)
        y.fill_(torch.nan)
    gradients = [p.grad for _, p in engine.weights.named_parameters() if p.grad is not None]
    return [*losses, *gradients, *(t.clone() for t in engine.weights.full_state_dict().values())]


def inputs(_: World) -> Values:
    """The host brings inputs while the device computes with those before, and uses their memory again."""
    streams, found = TorchStreams(("sim:0",)), Values()
    for number in range(12):
        value = torch.full((1000,), float(number))
        moved = streams.move_inputs([value], "sim:0")[0]
        value.fill_(torch.nan)
        for _ in range(4):
            moved = moved.view(-1) + (moved * 0).sum() if number % 3 == 0 else moved
        found.append(moved * 2)
        del moved
    return found


def two_devices(_: World) -> Values:
    """A tied weight and a skip over all stages, which take turns on two devices."""
    return steps_of(engine_of("interleaved", 4, ["sim:0", "sim:1"], optimizer=adam, clip_norm=0.05))


def device_and_cpu(_: World) -> Values:
    """Values come from the CPU and go to it, and gradients go the other ways."""
    return steps_of(engine_of("1f1b", 3, ["sim:0", "cpu", "sim:1"], optimizer=adam))


def links(_: World) -> Values:
    """Many tensors under way between all kinds of places, and memory that is used again at both ends."""
    found = Values()
    for near, far in (("sim:0", "sim:1"), ("cpu", "sim:0"), ("sim:0", "cpu")):
        streams = TorchStreams((near, far))
        found += _carried(DeviceLink(streams, near, far, streams.copies(near, far)), near, far)
    streams = TorchStreams(("sim:0", "sim:1"))
    through = _ThroughHost(streams, "sim:0", "sim:1")
    return found + _carried(DeviceLink(streams, "sim:0", "sim:1", through), "sim:0", "sim:1")


def _carried(link: DeviceLink, near: str, far: str) -> Values:
    draw, under_way, found = torch.Generator().manual_seed(0), list[Any](), Values()
    for number in range(40):
        size = int(torch.randint(1, 1 << (8 + number // 4), (), generator=draw))
        value = torch.full((size,), float(number), device=near)
        under_way.append(link.carry(value.mul_(2)))
        del value
        torch.zeros(size, device=near)
        torch.zeros(size, device=far)
        while len(under_way) > number % 6:
            copied = under_way.pop(0)
            if far == "cpu" and not copied.is_ready():
                copied.copied.wait()
            found.append(copied.open() * 1)
            copied.release()
    link.flush()
    return found


def weights_on_the_host(_: World) -> Values:
    """Weights come stage by stage, gradients add up over two steps and leave, the host's optimizer steps."""
    found = Values()
    cases: list[tuple[str, ScheduleName]] = [
        ("host", "gpipe"),
        ("host", "naive"),
        ("host-optimizer", "gpipe"),
    ]
    for weights, schedule in cases:
        engine = _hosted(weights, schedule, optimizer=adam)
        for number in range(2):
            x, y = batch_of(8, number)
            engine.step(x, target=y, update=False)
            found += [p.grad.clone() for _, p in engine.weights.named_parameters() if p.grad is not None]
            found.append(engine.step(x, target=y).loss)
            found += [p.detach().clone() for _, p in engine.weights.named_parameters()]
    return found


def gradients_of_a_deep_model(_: World) -> Values:
    """Gradients leave while later ones are computed, and nobody waits for them before the end."""
    found, cases = Values(), ((10, "gpipe"), (3, "naive"))
    for layers, schedule in cases:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers)))
        engine = _hosted("host", cast("ScheduleName", schedule), model)
        for number in range(2):
            x, y = batch_of(8, number)
            engine.step(x, target=y, update=False)
            found += [p.grad.clone() for _, p in engine.weights.named_parameters() if p.grad is not None]
    return found


def weights_that_change_after_an_evaluation(_: World) -> Values:
    """The caller writes weights on the host as soon as an evaluation has returned."""
    engine, found = _hosted("host", "gpipe"), Values()
    x, y = batch_of(8)
    for _step in range(3):
        result = engine.evaluate(x, target=y)
        for _, p in engine.weights.named_parameters():
            p.data.mul_(2)
        assert result.loss is not None
        found += [result.loss, *(result.outputs or ())]
    return found


def _hosted(
    weights: str, schedule: ScheduleName, model: nn.Module | None = None, **options: Any
) -> outsize.Engine:
    recompute = "full" if weights == "host-activations" else "none"
    changes = {"weights": weights, "recompute": recompute, "axes": Axes(), "cluster": "1xcpu"}
    stages = 4 if model is None else len([*model.parameters()])
    return engine_of(schedule, stages, ["sim:0"], model, changes, **options)


def values_on_the_host(_: World) -> Values:
    """Values between stages leave for the host and come back; batches grow and shrink."""
    with patch.object(hosted, "CopyLane", partial(CopyLane, least_bytes=1)):
        return steps_of(_hosted("host-activations", "gpipe", optimizer=adam), (8, 24, 16, 64))


def activations_on_the_host(_: World) -> Values:
    """What autograd saves leaves for the host and comes back; batches grow and shrink."""
    with patch.object(activations, "_lane", _lane):
        engine = engine_of("gpipe", 2, ["sim:0"], changes={"recompute": "offload"}, optimizer=adam)
        return steps_of(engine, (8, 24, 16, 64))


def _lane(device: torch.device) -> CopyLane:
    return CopyLane(TorchStreams((str(device),)), str(device), least_bytes=1)


class OnPurpose(Exception):
    """What a step fails with."""


def after_failed_steps(_: World) -> Values:
    """Steps end in the middle of their backward, with copies under way; those after them are as ever."""
    found, x_and_y = Values(), batch_of(8)
    for places, schedule, changes in (
        (["sim:0", "sim:1"], "1f1b", {}),
        (["sim:0"], "gpipe", {"recompute": "offload"}),
    ):
        with patch.object(activations, "_lane", _lane):
            engine = engine_of(cast("ScheduleName", schedule), 2, places, changes=changes, optimizer=adam)
            engine.step(x_and_y[0], target=x_and_y[1])
            weights = dict(engine.weights.named_parameters())
            for name, microbatch in (("blocks.0.0.weight", 0), ("blocks.3.0.weight", 2)):
                _fail(engine, weights[name], microbatch, *x_and_y)
                found += steps_of(engine, (8,))
    return found


def _fail(engine: outsize.Engine, parameter: nn.Parameter, microbatch: int, x: Tensor, y: Tensor) -> None:
    """Fails where a microbatch's gradient arrives, and drops what gradients there are."""
    left = [microbatch]

    def arrived(_: Tensor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OnPurpose

    hook = parameter.register_post_accumulate_grad_hook(arrived)
    try:
        engine.step(x, target=y)
    except OnPurpose:
        hook.remove()
        for _, each in engine.weights.named_parameters():
            each.grad = None
        return
    raise AssertionError("the step has not failed")


def dropped_messages(_: World) -> Values:
    """What a failed step leaves under way does not arrive in the memory of those after it."""
    places = ("sim:0", "sim:1")
    together, found = MultiDevice(TorchStreams(places), places), Values()
    for number in range(3):
        together.put((1, 0, 0, number), torch.full((1000,), 7.0, device="sim:1") * 2)
        together.reset()
        found.append(_filled(number, "sim:1"))
    lane = CopyLane(TorchStreams(("sim:0",)), "sim:0", least_bytes=1, both=True)
    for number in range(3):
        value = OffloadedValue(OffloadedStorage(torch.full((1000,), 7.0, device="sim:0")))
        lane.send(value)
        lane.fetch(value)
        del value
        lane.forget()
        found.append(_filled(number, "sim:0"))
    return found


def _filled(number: int, behind: str) -> Tensor:
    """New memory of the first device, which is filled before the last copies of another one run."""
    new = torch.full((1000,), float(number), device="sim:0")
    torch.accelerator.current_stream(new.device).synchronize()
    torch.accelerator.synchronize(behind)
    return new * 2


def flags_of_losses(_: World) -> Values:
    """The loss of the second of three steps is not finite, and the watch says so when it is there."""
    watch, found = LossWatch(), list[int | None]()
    for step, loss in enumerate((1.0, torch.nan, 2.0)):
        busy = torch.full((200, 200), 1e-3, device="sim:0")
        found.append(watch.look(step, busy.mm(busy).sum() * 0 + loss))
    torch.accelerator.synchronize()
    found.append(watch.look(3, torch.ones((), device="sim:0")))
    return [torch.tensor([-1 if each is None else each for each in found if each is not None])]


def clocks(_: World) -> Values:
    """Nothing is left on the device when the host looks at its clock for a measurement."""
    device, left = torch.device("sim:0"), list[int]()
    mark_and_read, busy = clock_of(device), torch.full((100, 100), 1e-3, device=device)

    def clock() -> float:
        left.append(simdev.pending(0))
        return time.perf_counter()

    first = mark_and_read.mark()
    for _step in range(3):
        busy = busy.mm(busy)
    with patch("outsize.device.clock.perf_counter", clock):
        begin_s, end_s = mark_and_read.seconds([first, mark_and_read.mark()])
    busy = busy.mm(busy)
    units._wall_clock(device)()
    return [torch.tensor([begin_s < end_s]), torch.tensor([*left, simdev.pending(0)])]


# -- several processes ---------------------------------------------------------------------------------------


def pipeline(world: World) -> Values:
    """Messages between two processes, of a tied weight and a skip as well."""
    axes = {"stages": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    return _all(trained(world, axes=axes, steps=2, clip_norm=0.05))


def weights_on_two_hosts(world: World) -> Values:
    """A stage leaves between two of its backwards, and its gradient comes back while it is still leaving."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))), batch_of(12)
    graph = outsize.capture(model, (x,), loss_fn=F.mse_loss, target=y)
    bounds, ranks = [*range(6), len(graph.units)], (0, 1, 1, 0, 0, 1)
    plan = Plan(
        model=graph.model, fingerprint=graph.fingerprint, cluster="2xcpu", axes=Axes(pp=2), batch_size=12,
        microbatches=6, schedule="zero-bubble-v", weights="host",
        stages=stages_from_bounds(graph, bounds, [f"sim:{rank}" for rank in ranks]),
    )  # fmt: skip
    engine, found = make_engine(model, plan, world.group, EngineOptions(loss_fn=F.mse_loss)), Values()
    for number in range(2):
        x, y = batch_of(12, number)
        found.append(engine.step(x, target=y, update=False).loss)
    return found + [p.grad for _, p in engine.weights.named_parameters() if p.grad is not None]


def replicas(world: World) -> Values:
    """Gradients are added up over two processes while the backward runs."""
    return _all(trained(world, axes={"stages": 1, "axes": {"dp_replicate": 2}, "microbatches": 2}, steps=2))


def shards(world: World) -> Values:
    """Weights are gathered from two processes before they are used, and gradients are scattered."""
    return _all(trained(world, axes={"stages": 1, "axes": {"dp_shard": 2}, "microbatches": 2}, steps=2))


def parts_of_layers(world: World) -> Values:
    """Gradients of inputs are added up over two processes while those of weights are computed."""
    found, (x, y) = Values(), TIED.batch(WIDTH)
    for sequence in (False, True):
        engine = outsize.parallelize(
            TIED.build(WIDTH),
            (x,),
            loss_fn=TIED.loss_fn,
            target=y,
            optimizer=adam,
            cluster="2xh200",
            microbatches=2,
            axes={"tp": 2},
            plan=outsize.Request(sequence_parallel=sequence),
        )
        found += [engine.step(x, target=y).loss for _ in range(2)]
        found += [p.detach().clone() for _, p in engine.weights.named_parameters()]
    return found


def _all(found: dict[str, Any]) -> Values:
    return [*found["losses"], *found["norms"], *found["outputs"], *found["state"].values()]


def measured_links(world: World) -> Values:
    """Nothing is left on the device when a lap of a measurement begins, and when it ends."""
    device, group, left = torch.device("sim", world.local_rank), world.group, list[int]()
    assert group is not None

    def clock() -> float:
        left.append(simdev.pending(world.local_rank))
        with torch.Stream(device):  # Work of others, which no lap begins with.
            torch.zeros(1, device=device)
        return time.perf_counter()

    measure_links(group, TimedWire(group, device), device, sizes=(4096,), repeats=2, clock=clock)
    wire, sent = TimedWire(group, device), torch.full((64,), float(world.rank), device=device)
    wire.round_trip(sent)()
    dist.barrier(group)
    return [torch.tensor(left)]


SCENARIOS: Final[dict[Callable[[World], Values], int]] = {
    inputs: 1,
    two_devices: 1,
    device_and_cpu: 1,
    links: 1,
    weights_on_the_host: 1,
    gradients_of_a_deep_model: 1,
    weights_that_change_after_an_evaluation: 1,
    values_on_the_host: 1,
    activations_on_the_host: 1,
    after_failed_steps: 1,
    dropped_messages: 1,
    flags_of_losses: 1,
    clocks: 1,
    pipeline: 2,
    weights_on_two_hosts: 2,
    replicas: 2,
    shards: 2,
    parts_of_layers: 2,
    measured_links: 2,
}
"""Each scenario with the number of its processes."""
_BY_NAME: Final = {scenario.__name__: scenario for scenario in SCENARIOS}


def ranks_of(scenario: str) -> int:
    """Returns how many processes a scenario has."""
    return SCENARIOS[_BY_NAME[scenario]]


# -- what the proof calls ------------------------------------------------------------------------------------


def observed(world: World, name: str) -> tuple[Values, list[str]]:
    """The values of a scenario in the order of this process, and the sites that it reaches."""
    reached = set[str]()
    ordering_sites.watch(reached)
    return cast("Values", on_cpu(_BY_NAME[name](world))), sorted(reached)


def damaged(
    world: World, site: str | None, runs: Sequence[tuple[str, str]], expected: str, progress: str
) -> str | None:
    """Runs scenarios, each in an order, without a site; says which of them is the first that differs."""
    if site is not None:
        ordering_sites.delete(ordering_sites.named(site))
    whole: dict[str, list[Values]] = torch.load(expected)
    for scenario, order in runs:
        Path(progress).write_text(f"{scenario}, {order}")
        choose_order(order)
        found = cast("Values", on_cpu(_BY_NAME[scenario](world)))
        wanted = whole[scenario][world.rank]
        same = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        verdicts: list[Any] = [same]
        if world.world_size > 1:  # The next scenario needs all ranks.
            verdicts = [same] * world.world_size
            dist.all_gather_object(verdicts, same, group=world.host)
        if not all(verdicts):
            return f"{scenario}, {order}"
    return None
