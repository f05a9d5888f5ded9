"""What ranks do in the scripts of the queue, besides tests/device/rank_scenarios.py."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rank_scenarios import device_of
from torch import Tensor, nn
from verified_worker import Fault

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import SilentCorruption
from outsize.ir.schedule import Kind
from outsize.train.world.world import World

_MIB: Final = 2**20


def collectives(world: World, *, sizes_mib: list[float]) -> dict[str, Any]:
    """Sums, gathers and messages of one group: whether each is right, its seconds, and the library's file."""
    device, group, ranks = device_of(world), world.group, world.world_size
    assert group is not None
    found: dict[str, Any] = {"library": _library(), "device": str(device), "right": {}, "seconds": {}}
    acts: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
        "all_reduce": (partial(_reduced, group=group), [sum(range(1, ranks + 1))]),
        "all_gather": (partial(_gathered, group=group), [*range(1, ranks + 1)]),
        "ring": (partial(_from_before, world=world), [(world.rank - 1) % ranks + 1]),
    }
    for mib, (name, (act, wanted)) in product(sizes_mib, acts.items()):
        mine = torch.full((max(1, int(mib * _MIB) // 4),), float(world.rank + 1), device=device)
        act(mine)
        _wait(device)
        start = time.perf_counter()
        result = act(mine)
        _wait(device)
        found["seconds"][f"{name} {mib:g} MiB"] = time.perf_counter() - start
        pairs = zip(result.view(len(wanted), -1), wanted, strict=True)
        found["right"][f"{name} {mib:g} MiB"] = all(bool((part == value).all()) for part, value in pairs)
    return found


def _reduced(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = mine.clone()
    dist.all_reduce(total, group=group)
    return total


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(whole, mine, group=group)
    return whole


def _from_before(mine: Tensor, world: World) -> Tensor:
    received, after = torch.empty_like(mine), (world.rank + 1) % world.world_size
    before = (world.rank - 1) % world.world_size
    operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _library() -> list[str]:
    """Returns the files of NCCL that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return sorted({line.split()[-1] for line in maps.splitlines() if "libnccl" in line})


# -- transformers along any axis -----------------------------------------------------------------------------

TOKENS, SAMPLES, WORDS, STEPS = 16, 4, 64, 3


def _transformer(kind: str) -> torch.nn.Module:
    transformers, small = (
        import_transformers(),
        {"hidden_size": 32, "vocab_size": WORDS, "num_hidden_layers": 2},
    )
    small |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    if kind == "experts":
        config = transformers.MixtralConfig(**small, num_local_experts=4, output_router_logits=False)
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))


def _batch(device: torch.device) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=draw).to(device)
    return {"input_ids": ids, "labels": ids}


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def transformer_distances(world: World, *, kind: str, axes: dict[str, int]) -> dict[str, float]:
    """How far losses and weights after three steps of SGD are from the plain loop's on this rank's device,
    relative to the largest element of each. `kind`: `dense` or `experts`, whose grouped products know no
    float64; the loss of both is computed in float32.
    """
    device, count = device_of(world), axes.get("microbatches", 1)
    dtype = torch.float32 if kind == "experts" else torch.float64
    whole, model = _transformer(kind).to(device, dtype), _transformer(kind).to(dtype)
    optimizer, losses = _sgd(whole.parameters()), list[Tensor]()
    for _ in range(STEPS):
        total = torch.zeros((), device=device)
        parts = {name: tensor.chunk(count) for name, tensor in _batch(device).items()}
        for number in range(count):
            loss = whole(**{name: chunks[number] for name, chunks in parts.items()}).loss / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    place = "cpu" if world.device_type == "cpu" else "h200"
    engine = outsize.parallelize(
        model,
        kwargs=_batch(torch.device("cpu")),
        optimizer=_sgd,
        cluster=f"{world.world_size}x{place}",
        **axes,
    )
    pairs = {f"loss {n}": (engine.step(**_batch(device)).loss, loss) for n, loss in enumerate(losses)}
    if state := engine.weights.full_state_dict():
        pairs |= {name: (state[name], tensor) for name, tensor in whole.state_dict().items()}
    return {name: _distance(*pair) for name, pair in pairs.items()}


def _distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


# -- checkpoints ---------------------------------------------------------------------------------------------


def saved(world: World, *, folder: str, axes: dict[str, int], steps: int) -> list[float]:
    """Losses of so many steps from the start, of a run that is saved behind them."""
    engine = _engine(world, axes)
    losses = [float(engine.step(**_batch(device_of(world))).loss) for _ in range(steps)]
    engine.save(folder)
    return losses


def resumed(world: World, *, folder: str, axes: dict[str, int], steps: int) -> list[float]:
    """Losses of so many steps more, of a run that goes on from there by other axes."""
    engine = _engine(world, axes)
    engine.state.resume(folder)
    return [float(engine.step(**_batch(device_of(world))).loss) for _ in range(steps)]


def _engine(world: World, axes: dict[str, int], **options: Any) -> outsize.Engine:
    place = "cpu" if world.device_type == "cpu" else "h200"
    batch, cluster = _batch(torch.device("cpu")), f"{world.world_size}x{place}"
    make = lambda weights: torch.optim.AdamW(weights, lr=1e-2)  # noqa: E731
    given = {"optimizer": make, "cluster": cluster, **axes, **options}
    return outsize.parallelize(_transformer("dense"), kwargs=batch, **given)


# -- stages as graphs of their device ------------------------------------------------------------------------


def graphs(world: World, *, axes: dict[str, int], steps: int, timed: int) -> dict[str, Any]:
    """Whether stages that are recorded as graphs have the bits of the same stages as they are, along any
    axes; what was recorded, and the seconds of a step of both.
    """
    device, losses = device_of(world), dict[bool, list[Tensor]]()
    states, seconds, recorded = dict[bool, dict[str, Tensor]](), dict[bool, list[float]](), ""
    for as_graphs in (False, True):
        engine = _engine(world, axes, device_graphs=as_graphs)
        losses[as_graphs] = [engine.step(**_batch(device)).loss.detach().cpu() for _ in range(steps)]
        states[as_graphs] = engine.weights.full_state_dict()
        seconds[as_graphs] = []
        for _ in range(timed):
            _wait(device)
            begin_s = time.perf_counter()
            engine.step(**_batch(device))
            _wait(device)
            seconds[as_graphs].append(time.perf_counter() - begin_s)
        recorded = str(engine.device_graphs)
    pairs = [*zip(losses[False], losses[True], strict=True)]
    pairs += [(states[True][name], tensor) for name, tensor in states[False].items()]
    return {
        "bit-equal": all(torch.equal(ours, theirs) for ours, theirs in pairs),
        "recorded": recorded,
        "median_s": {("graphs" if key else "as it is"): sorted(s)[len(s) // 2] for key, s in seconds.items()},
    }


# -- ranks that verify each other's work ---------------------------------------------------------------------


def verified(world: World, *, axes: dict[str, Any], width: int, rows: int, timed: int) -> dict[str, Any]:
    """Whether verified steps have the bits of others, the seconds of both in turns, and what is said of a
    fault in the products of each rank.
    """
    device, layers = device_of(world), 2 * axes.get("stages", 1)
    samples = rows * axes["microbatches"] * axes.get("axes", {}).get("dp_replicate", 1)
    draw = torch.Generator().manual_seed(2)
    x, y = (torch.randn(samples, width, generator=draw).to(device) for _ in range(2))
    place = "cpu" if world.device_type == "cpu" else "h200"

    def engine() -> outsize.Engine:
        torch.manual_seed(0)
        chain = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))
        return outsize.parallelize(
            chain, (x.cpu(),), target=y.cpu(), loss_fn=nn.functional.mse_loss, optimizer=_sgd,
            cluster=f"{world.world_size}x{place}", callbacks=[outsize.Watch(hang_timeout=0)], **axes,
        )  # fmt: skip

    def said(one: outsize.Engine) -> str:
        try:
            one.step(x, target=y)
        except SilentCorruption as error:
            return str(error)
        return ""

    ours, plain = engine(), engine()
    ours.verify(every=1)
    losses = [[one.step(x, target=y).loss.detach().cpu() for _ in range(layers + 1)] for one in (ours, plain)]
    states = [one.weights.full_state_dict() for one in (ours, plain)]
    pairs = [*zip(*losses, strict=True), *((states[0][name], tensor) for name, tensor in states[1].items())]
    seconds: dict[str, list[float]] = {"verified": [], "plain": []}
    for _ in range(timed):
        for name, one in (("verified", ours), ("plain", plain)):
            _wait(device)
            begin_s = time.perf_counter()
            one.step(x, target=y)
            _wait(device)
            seconds[name].append(time.perf_counter() - begin_s)
    heard: dict[str, str] = {}
    for rank, kind in product(range(world.world_size), (Kind.F, Kind.B)):
        fault = Fault(kind, "always", random.Random(rank))
        with fault.there() if rank == world.rank else nullcontext():
            heard[f"rank {rank}, {kind.name}"] = said(ours)[:240]
    median_s = {name: sorted(laps)[len(laps) // 2] for name, laps in seconds.items()}
    return {
        "bit-equal": all(torch.equal(one, other) for one, other in pairs),
        "median_s": median_s,
        "share at 1 in 100": (median_s["verified"] / median_s["plain"] - 1) / 100,
        "found": sum(text.startswith("SilentCorruption") for text in heard.values()),
        "of": len(heard),
        "no alarm behind": said(ours) == "",
        "heard": heard,
    }
