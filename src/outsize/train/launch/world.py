"""Finds this process's place among the processes of a run, and makes the process group that joins them.

The place comes from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), passed
in as a mapping: only launch.py reads the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, final

from outsize.errors import BadOption
from outsize.train.launch.rendezvous import LOOPBACK_NAMES, meet

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclass(frozen=True)
class World:
    """The global `rank` of `world_size`, `local_rank` on this machine, and the default process group.

    `owned` says that `join` has made the group, so `leave` destroys it.
    """

    rank: int
    world_size: int
    local_rank: int
    group: ProcessGroup | None
    owned: bool = False


def join_world(
    env: Mapping[str, str], device_type: str, timeout_s: float, backend: str | None = None
) -> World:
    """Returns the place that `env` describes; makes the default group unless there is one. See
    launch.join.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        local_rank = int(env.get("LOCAL_RANK", dist.get_rank()))
        return World(dist.get_rank(), dist.get_world_size(), local_rank, dist.group.WORLD)
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return World(0, 1, 0, None)
    _check(env)
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank = int(env.get("LOCAL_RANK", rank))
    name = _backend(device_type, backend)
    place = {} if name == "mpi" else {"rank": rank, "world_size": world_size, "store": meet(env, timeout_s)}
    dist.init_process_group(
        name,
        **place,  # MPI knows its rank and size itself
        timeout=timedelta(seconds=timeout_s),
        device_id=_bound_device(device_type, local_rank),
    )
    return World(dist.get_rank(), dist.get_world_size(), local_rank, dist.group.WORLD, owned=True)


def leave(world: World) -> None:
    """Destroys the process group if `join` made it; a group that existed before stays."""
    import torch.distributed as dist

    if world.owned and dist.is_initialized():
        dist.destroy_process_group()


def on_one_machine(env: Mapping[str, str]) -> bool:
    """Tells whether all processes are on this machine: its launcher says so, or they meet on loopback."""
    is_one_machine = env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    return "WORLD_SIZE" in env and (is_one_machine or env.get("MASTER_ADDR") in LOOPBACK_NAMES)


def _check(env: Mapping[str, str]) -> None:
    missing = [name for name in _NEEDED if name not in env]
    if missing:
        raise BadOption(
            f"the environment describes a run, but {', '.join(missing)} is not set",
            next_step="outsize run --nproc-per-node 2 train.py (it sets them), or unset RANK WORLD_SIZE",
        )


def _backend(device_type: str, asked: str | None) -> str:
    """Returns the backend asked for, else the device's own backend, and gloo for tensors on the CPU."""
    import torch.distributed as dist

    if asked is not None:
        _insist_on_backends(asked)
        return asked
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def _insist_on_backends(asked: str) -> None:
    """Raises BadOption unless torch was built with each backend of `nccl` or `cpu:gloo,cuda:nccl`."""
    import torch.distributed as dist

    known = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    for name in (one.split(":")[-1].lower() for one in asked.split(",")):
        if not dist.is_backend_available(name):
            built = "; MPI needs a torch built from source with MPI's compiler" if name == "mpi" else ""
            raise BadOption(
                f"this torch has no backend {name!r}",
                numbers=f"it has {', '.join(known)}{built}",
                next_step=f"backend={known[0]!r}, or leave it out",
            )


def _bound_device(device_type: str, local_rank: int) -> torch.device | None:
    """Returns the accelerator of this process, made current; None on the CPU."""
    import torch

    if device_type == "cpu":
        return None
    count = torch.get_device_module(device_type).device_count()
    if local_rank >= count:
        raise BadOption(
            f"no {device_type} device for local rank {local_rank}",
            numbers=f"{count} on this machine",
            next_step=f"--nproc-per-node {max(1, count)}",
        )
    device = torch.device(device_type, local_rank)
    torch.get_device_module(device_type).set_device(device)
    return device
