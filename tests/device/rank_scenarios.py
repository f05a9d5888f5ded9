"""What ranks do in the tests of several processes; each function runs on every rank (device_ranks.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.train.launch.launch import World


def device_of(world: World) -> torch.device:
    """The device of this rank."""
    return torch.device(world.device_type, world.local_rank)


def group_rules(world: World) -> dict[str, Any]:
    """Each operation of the group, with work before and after it on the caller's stream."""
    device, rank, size = device_of(world), world.rank, world.world_size
    value = lambda: torch.full((1000,), float(rank), device=device) * 2 + 1  # noqa: E731 - launched, and not run
    found: dict[str, Any] = {}

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
    for number in range(5):
        value = torch.full((1000,), float(number), device=device) + rank
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        wrong = wrong or bool((value * 1).cpu().ne(2 * number + 1).any())
        work.wait()
    return wrong


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
