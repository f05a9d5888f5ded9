"""What ranks do in the tests of several processes; each function runs on every rank (device_ranks.py).

Scenarios return tensors on the CPU, so that a test can compare ranks of the simulated device, of CUDA and of
the CPU (over gloo).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerators import SPLITS_GROUPS
from test_schedule_matrix import BATCH, COUNT, LOSS, SEED, STEPS, built, captured, plan_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from outsize.device.alternation import Alternation
from outsize.ir.plan import Plan, ScheduleName
from outsize.ops.doctor.models import TIED
from outsize.program.sharding.share import Share
from outsize.program.tree import map_leaves
from outsize.run.collectives.mesh_collectives import MeshCollectives
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.process_group import ProcessTransport, TransportGroups
from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    adamw,
    compare,
    engine_snapshot,
    reference_snapshot,
)
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.engine.stage_factory import StageFactory
from outsize.train.world.world import World

WIDTH, SAMPLES = 16, 8


def device_of(world: World) -> torch.device:
    """The device of this rank."""
    place = [] if world.device_type == "cpu" else [world.local_rank // world.ranks_per_device]
    return torch.device(world.device_type, *place)


def on_cpu(tree: Any) -> Any:
    """Tensors in it on the CPU; DTensors whole."""
    return map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def place(world: World) -> list[Any]:
    """The device that is current, and how many ranks have it."""
    return [f"{world.device_type}:{torch.accelerator.current_device_index()}", world.ranks_per_device]


# -- schedules -----------------------------------------------------------------------------------------------


def schedules(world: World, names: Sequence[str]) -> dict[str, str]:
    """`ok`, or the differences, of each schedule from the plain loop on this rank's device.

    The model has a skip over everything, dropout, running statistics, and a tied weight.
    """
    device, found = device_of(world), dict[str, str]()
    batch = BATCH.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
    loop = PlainLoop(COUNT, LOSS, steps=STEPS, seed=SEED)
    whole = reference_snapshot(built().to(device), captured().tape, batch, loop)
    for name in names:
        schedule, _, recompute = name.partition(" ")
        plan = plan_of(cast("ScheduleName", schedule), cast("Any", recompute or "none"), world.world_size)
        plan = for_devices(plan, world.device_type)
        options = EngineOptions(loss_fn=LOSS, optimizer=adamw, seed=SEED)
        engine = make_engine(built(), plan, world.group, options)
        found[name] = differences(whole, engine_snapshot(engine, BATCH, steps=STEPS))
    return found


def for_devices(plan: Plan, device_type: str) -> Plan:
    """The plan with each stage on a device of the type."""
    stages = tuple(s.model_copy(update={"device": s.device.replace("cpu", device_type)}) for s in plan.stages)
    return plan.model_copy(update={"stages": stages})


def differences(whole: TrainingSnapshot, ours: TrainingSnapshot) -> str:
    """`ok` where this rank's own tensors are those of the whole."""
    tables = ((getattr(whole, field), getattr(ours, field)) for field in ("grads", "buffers", "parameters"))
    expected = [{n: t for n, t in theirs.items() if n in own} for theirs, own in tables]
    found = compare(TrainingSnapshot(whole.loss, *expected), ours)
    return "ok" if found.bit_equal else str(found)


# -- training ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Four blocks with a skip; the first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks, self.norm = nn.ModuleList(_block() for _ in range(4)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] -> [n, WIDTH]."""
        first = x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x) + first)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=draw), torch.randn(SAMPLES, WIDTH, generator=draw)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _precision(world: World, autocast: bool) -> AbstractContextManager[Any]:
    if not autocast:
        return nullcontext()
    # Stages do not share the casts of a weight (docs/training.md).
    return torch.autocast(world.device_type, torch.bfloat16, cache_enabled=False)


def trained(
    world: World, *, axes: dict[str, Any], steps: int = 3, autocast: bool = False, scaler: bool = False,
    clip_norm: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """An engine of the public functions: losses, norms, evaluation, and the weights that are saved."""
    (x, y), kind = data(), world.device_type
    device = device_of(world)
    scale = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=1) if scaler else None
    with _precision(world, autocast):
        engine = outsize.parallelize(
            small(),
            (x,),
            loss_fn=outsize.Loss(F.mse_loss, scaler=scale),
            target=y,
            optimizer=adam,
            clip_norm=clip_norm,
            cluster=f"{world.world_size}x{'cpu' if kind == 'cpu' else 'h200'}",
            **axes,
        )
        results = [engine.step(x.to(device), target=y.to(device)) for _ in range(steps)]
        tested = engine.evaluate(x, target=y)
    return on_cpu({
        "devices": {p.device.type for _, p in engine.weights.named_parameters()},
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results if result.grad_norm is not None],
        "tested": tested.loss,
        "outputs": list(tested.outputs or ()),
        "scale": None if scale is None else scale.get_scale(),
        "state": engine.weights.full_state_dict(),
    })  # fmt: skip


def plain(
    world: World, *, microbatches: int, steps: int = 3, autocast: bool = False, scaler: bool = False,
    clip_norm: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The same by the plain loop on this rank's device."""
    device, kind = device_of(world), world.device_type
    (x, y), model = (t.to(device) for t in data()), small().to(device)
    optimizer = adam(model.parameters())
    scale = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=1, enabled=scaler)
    losses, norms, parts = (
        list[Tensor](),
        list[Tensor](),
        list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)),
    )
    for _ in range(steps):
        loss = torch.zeros((), device=device)
        for part, wanted in parts:
            with _precision(world, autocast):
                each = F.mse_loss(model(part), wanted)
            scale.scale(each * (1 / microbatches)).backward()
            loss = loss + each.detach() * (1 / microbatches)
        losses.append(loss)
        scale.unscale_(optimizer)
        if clip_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), _precision(world, autocast):
        outputs = [model(part) for part, _ in parts]
        each = [F.mse_loss(out, wanted) for out, (_, wanted) in zip(outputs, parts, strict=True)]
    return on_cpu({
        "devices": {device.type},
        "losses": losses,
        "norms": norms,
        "tested": sum(loss * (1 / microbatches) for loss in each),
        "outputs": outputs,
        "scale": scale.get_scale() if scaler else None,
        "state": model.state_dict(),
    })  # fmt: skip


def waits_of_a_step(
    world: World, *, microbatches: int, axes: dict[str, Any], autocast: bool = False, scaler: bool = False,
    clip_norm: float | None = None,
) -> dict[str, int]:  # fmt: skip
    """Where the host waits for its device in a step, with the batch on the host."""
    from host_waits import host_waits

    (x, y), kind = data(), world.device_type
    x, y = x.repeat(4, 1), y.repeat(4, 1)
    scale = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=1) if scaler else None
    with _precision(world, autocast):
        engine = outsize.parallelize(
            small(),
            (x,),
            loss_fn=outsize.Loss(F.mse_loss, scaler=scale),
            target=y,
            optimizer=adam,
            clip_norm=clip_norm,
            cluster=f"{world.world_size}xh200",
            microbatches=microbatches,
            **axes,
        )
        for _ in range(2):
            engine.step(x, target=y)
        return dict(host_waits(lambda: engine.step(x, target=y)))


# -- tensor parallelism --------------------------------------------------------------------------------------


def divided(world: World, *, axes: dict[str, int], double: bool) -> dict[str, float]:
    """How far losses and weights of a transformer are from a plain loop's on this rank's device.

    Each is relative to the largest element, after three steps of SGD: AdamW would make rounding as large as
    gradients that are zero but for it.
    """
    device, kind, loss_fn = device_of(world), torch.float64 if double else torch.float32, TIED.loss_fn
    make = partial(torch.optim.SGD, lr=0.1)
    (x, y), ours, plain = TIED.batch(WIDTH), TIED.build(WIDTH).to(kind), TIED.build(WIDTH).to(device, kind)
    cluster = f"{world.world_size}x{'cpu' if world.device_type == 'cpu' else 'h200'}"
    engine = outsize.parallelize(
        ours, (x,), loss_fn=loss_fn, target=y, optimizer=make, cluster=cluster, **axes
    )  # fmt: skip
    optimizer, count, pairs = make(plain.parameters()), axes["microbatches"], dict[str, Any]()
    parts = list(zip(x.to(device).chunk(count), y.to(device).chunk(count), strict=True))
    for step in range(3):
        shares = [loss_fn(plain(part), wanted) / count for part, wanted in parts]
        sum(shares).backward()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        optimizer.zero_grad()
        pairs[f"loss {step}"] = engine.step(x, target=y).loss, sum(shares)
    if state := engine.weights.full_state_dict():
        pairs |= {name: (state[name], tensor) for name, tensor in plain.state_dict().items()}
    return {name: _distance(*pair) for name, pair in pairs.items()}


def overlapped(world: World, *, sequence: bool, how: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights of two steps with and without collectives that overlap, and how many have begun.

    The layers are those of Megatron-LM's pair and of torch's own attention, with dropout between.
    """
    x, y, found = *TIED.batch(WIDTH), dict[str, Any]()
    device, begun = device_of(world), list[str]()
    names = ("begin_total", "begin_total_part")

    def counted(name: str) -> Callable[..., Any]:
        begin = getattr(MeshCollectives, name)

        def call(self: MeshCollectives, *args: Any, **kwargs: Any) -> Any:
            begun.append(name)
            return begin(self, *args, **kwargs)

        return call

    autocast, schedule = how.get("autocast", False), how.get("schedule", "1f1b")
    for overlaps in (True, False):
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(MeshCollectives, name, counted(name)))
            if not overlaps:
                stack.enter_context(patch.object(StageFactory, "_overlaps", lambda _: False))
            stack.enter_context(_precision(world, autocast))
            begun.clear()
            cluster = f"{world.world_size}x{'cpu' if world.device_type == 'cpu' else 'h200'}"
            engine = outsize.parallelize(
                TIED.build(WIDTH),
                (x,),
                loss_fn=TIED.loss_fn,
                target=y,
                optimizer=adam,
                cluster=cluster,
                stages=world.world_size // 2,
                microbatches=2,
                schedule=schedule,
                axes={"tp": 2},
                plan=outsize.Request(sequence_parallel=sequence, recompute=how.get("recompute", "none")),
            )
            losses = [engine.step(x.to(device), target=y.to(device)).loss for _ in range(2)]
            weights = [p.detach() for _, p in engine.weights.named_parameters()]
            found[str(overlaps)] = on_cpu([*losses, *weights]), len(begun)
    return found


def _distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    largest = float(theirs.abs().max())
    return float((ours - theirs).abs().max()) / (largest or 1.0)


def read_on_one_rank(world: World) -> tuple[list[str], bool]:
    """The warnings of steps whose loss is NaN, where rank 0 alone reads it, and whether the last one is."""
    (x, y), device, loss = data(), device_of(world), torch.zeros(())
    engine = outsize.parallelize(
        small(),
        (x,),
        loss_fn=F.mse_loss,
        target=y,
        optimizer=adam,
        stages=2,
        microbatches=2,
        cluster="2xh200",
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            part = x.to(device) * (torch.nan if step == 1 else 1.0)
            loss = engine.step(part, target=y.to(device)).loss
            if world.rank == 0:
                loss.item()
        return [str(w.message) for w in said if "NaN or infinite" in str(w.message)], bool(loss.isnan())


# -- the process group ---------------------------------------------------------------------------------------


def group_rules(world: World) -> dict[str, Any]:
    """Each operation of the group, with work before and after it on the caller's stream."""
    device, rank, size = device_of(world), world.rank, world.world_size
    found: dict[str, Any] = {}

    def value() -> Tensor:
        """Launches kernels, which have not run when it returns."""
        return torch.full((1000,), float(rank), device=device) * 2 + 1

    def keep(name: str, tensor: Tensor) -> None:
        found[name] = (tensor * 1).cpu()

    total = value()
    dist.all_reduce(total)
    keep("all_reduce", total)
    mean = value()
    work = dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    keep("mean", mean)
    gathered, part = torch.empty(size * 1000, device=device), value()
    dist.all_gather_into_tensor(gathered, part)
    keep("all_gather_into_tensor", gathered)
    parts = [torch.empty(1000, device=device) for _ in range(size)]
    dist.all_gather(parts, value())
    keep("all_gather", torch.cat(parts))
    scattered, whole = torch.empty(1000, device=device), torch.cat([value()] * size)
    dist.reduce_scatter_tensor(scattered, whole)
    keep("reduce_scatter_tensor", scattered)
    copied = value()
    dist.broadcast(copied, src=size - 1)
    keep("broadcast", copied)
    sent, received = value(), torch.empty(1000, device=device)
    ring = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    keep("batch_isend_irecv", received)
    if rank < 2:
        message = value()
        work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
        assert work is not None
        work.wait()
        keep("message", message)
    pair = dist.new_group([0, 1])
    if rank < 2:
        total = value()
        dist.all_reduce(total, group=pair)
        keep("new_group", total)
    if SPLITS_GROUPS:
        halves = dist.split_group(split_ranks=[list(range(size // 2)), list(range(size // 2, size))])
        total = value()
        dist.all_reduce(total, group=halves)
        keep("split_group", total)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    dist.barrier()
    return found | {"objects": objects}


def launches_return(world: World) -> dict[str, int]:
    """The host waits neither at an operation nor at `wait`, and the stream does."""
    import simdev

    device, rank = device_of(world), world.rank
    first = torch.zeros(1, device=device)
    dist.all_reduce(first)
    first.item()
    simdev.reset_counters()
    value = torch.full((1000,), float(rank), device=device)
    for _ in range(3):
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        work.wait()
        value = value / 2
    waits = simdev.host_waits()
    return {"waits": waits, "sum": int(value.sum().item())}


def without_wait(world: World) -> bool:
    """Whether a program that reads what it reduces before `wait` goes wrong."""
    device, rank, wrong = device_of(world), world.rank, False
    dist.all_reduce(torch.zeros(1, device=device))
    for number in range(40):
        value = torch.full((1000,), float(number), device=device) + rank
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        wrong = wrong or bool((value * 1).cpu().ne(2 * number + 1).any())
        work.wait()
    return wrong


def kept_by_sends(world: World) -> int:
    """How many messages that have arrived the sender still keeps once it sends on another channel."""
    device, layouts = device_of(world), world.host
    assert world.group is not None
    transport = ProcessTransport(TransportGroups.make(RankGroup.of(world.group, device), device), device)
    transport.open({(0, 1, False), (0, 1, True)})
    alive = list[weakref.ref[Tensor]]()
    if world.rank == 0:
        for microbatch in range(6):
            message = torch.full((1000,), float(microbatch), device=device)
            alive.append(weakref.ref(message))
            transport.send(1, 0, microbatch, message)
            del message
        torch.accelerator.synchronize(device)
        transport.send(1, 1, 0, torch.zeros(3, device=device))
    else:
        arrivals = [transport.post(0, 0, microbatch) for microbatch in range(6)]
        values = [arrival.wait() for arrival in arrivals]
        assert [float(value[0].item()) for value in values if value is not None] == [0, 1, 2, 3, 4, 5]
        transport.post(0, 1, 0).wait()
    found = sum(each() is not None for each in alive)
    dist.barrier(layouts)
    transport.flush()
    return found


def gathered(world: World) -> dict[str, Any]:
    """What ranks of tensor parallelism gather, and how many kernels and messages that takes."""
    import simdev

    device, size = device_of(world), world.world_size
    collectives = MeshCollectives(init_device_mesh(world.device_type, (size,)))
    found: dict[str, Any] = {}
    shares = {
        "rows": Share(0, (8,)),
        "columns": Share(1, (6,)),
        "two parts": Share(0, (4, 4)),
        "odd": Share(0, (7,)),
    }
    for name, share in shares.items():
        whole = (
            torch.arange(share.size * 12.0).view(-1, 12) if share.dim == 0 else torch.arange(30.0).view(5, 6)
        )
        part = collectives.part(whole.to(device), share)
        collectives.whole(part, share)  # makes the communicator
        simdev.reset_counters()
        ours = collectives.whole(part, share)
        found[name] = (simdev.launches(), torch.equal(ours.cpu(), whole))
    return found


def sent(world: World, *, kept: bool) -> bool:
    """Whether a message arrives whole whose tensor the sender keeps, or frees before `wait`."""
    device, objects = device_of(world), [None] * 2
    message = torch.full((1000,), 5.0, device=device) * (1 - world.rank)
    dist.all_reduce(torch.zeros(1, device=device))
    work = dist.isend(message, 1) if world.rank == 0 else None
    if world.rank == 0 and not kept:
        del message
    torch.full((1000,), 7.0, device=device).sum().item()
    dist.all_gather_object(objects, None, group=world.host)
    if world.rank == 1:
        work = dist.irecv(message, 0)
    assert work is not None
    work.wait()
    return world.rank == 0 or bool((message == 5.0).all().item())


# -- failures ------------------------------------------------------------------------------------------------


def full_in_mid_step(world: World) -> list[str]:
    """The second rank's device is full in its second step: what each rank is told, then and later."""
    import simdev

    (x, y), axes = data(), {"cluster": "2xh200", "stages": 2, "microbatches": 4}
    engine = outsize.parallelize(small(), (x,), loss_fn=F.mse_loss, target=y, optimizer=adam, **axes)
    engine.step(x, target=y)
    before = [p.detach().cpu() for _, p in engine.weights.named_parameters()]
    if world.rank == 1:
        torch.accelerator.empty_cache()
        simdev.set_capacity(torch.accelerator.memory_allocated() + 8192, world.local_rank)
    told = [_error_of(lambda: engine.step(x, target=y).loss.item())]
    if world.rank == 1:
        simdev.set_capacity(1 << 33, world.local_rank)
        told.append(_error_of(lambda: engine.step(x, target=y)))
        now = [p.detach().cpu() for _, p in engine.weights.named_parameters()]
        told.append(str(all(map(torch.equal, before, now))))
    return told


def _error_of(call: Callable[[], object]) -> str:
    """What a call raises, with its notes."""
    try:
        call()
    except Exception as error:
        return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
    return "nothing"


def alternated(world: World, *, schedule: str, how: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights of two steps of 1f1b, and of a schedule whose forwards run inside of backwards, and
    how many pairs have alternated.
    """
    x, y, found = *TIED.batch(WIDTH), dict[str, Any]()
    device, run = device_of(world), Alternation.run
    for name in ("1f1b", schedule):
        pairs = list[None]()

        def counted(*args: Any, pairs: list[None] = pairs) -> None:
            pairs.append(None)
            run(*args)

        with patch.object(Alternation, "run", counted), _precision(world, how.get("autocast", False)):
            engine = outsize.parallelize(
                TIED.build(WIDTH),
                (x,),
                loss_fn=TIED.loss_fn,
                target=y,
                optimizer=adam,
                cluster=f"{world.world_size}x{'cpu' if world.device_type == 'cpu' else 'h200'}",
                stages=world.world_size // 2,
                microbatches=len(x),
                schedule=name,
                axes={"tp": 2},
                plan=outsize.Request(recompute=how.get("recompute", "none")),
            )
            losses = [engine.step(x.to(device), target=y.to(device)).loss for _ in range(2)]
            weights = {n: p.detach() for n, p in engine.weights.named_parameters()}
            values = {f"loss {number}": loss for number, loss in enumerate(losses)} | weights
            found[name] = dict(zip(values, on_cpu([*values.values()]), strict=True)), len(pairs)
    return found
