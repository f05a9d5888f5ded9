"""Finds this process's place among the processes of a run, and makes the process group that joins them.

The place comes from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), passed
in as a mapping: only launch.py reads the real one.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

from outsize.errors import BadOption, UnknownDevice
from outsize.train.world.rendezvous import LOOPBACK_NAMES, meet
from outsize.train.world.variables import PER_DEVICE, SIZES

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from outsize.ir.plan import Plan

_FORGOTTEN: Final[list[Any]] = []
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclass(frozen=True)
class World:
    """The global `rank` of `world_size`, `local_rank` on this machine, and the default process group.

    `owned` says that `join` has made the group, so `leave` destroys it. `host` are the same ranks, which tell
    each other numbers and objects: the group itself, or one over gloo where that is for a device alone.
    Each process has a device of `device_type`; `machines` counts the processes of each machine, where that is
    no CPU. `sizes` are the numbers of ranks that an elastic run may have; () where it cannot change. `on_oom`
    is the launcher's option of `parallelize`. `memory_share` is how much of its devices' memory each rank may
    have; None: all. `ranks_per_device` ranks have one device between them. `variables` are those by which
    outsize's launcher, or the user, tells the rank more (OUTSIZE_...): who observes a run reads them.
    """

    rank: int
    world_size: int
    local_rank: int
    group: ProcessGroup | None
    owned: bool = False
    host: ProcessGroup | None = None
    device_type: str = "cpu"
    machines: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    on_oom: str = "raise"
    memory_share: float | None = None
    ranks_per_device: int = 1
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def join_world(
    env: Mapping[str, str], device_type: str, timeout_s: float, backend: str | None = None
) -> World:
    """Returns the place that `env` describes; makes the default group unless there is one. See
    launch.join.
    """
    import torch.distributed as dist

    per_device = int(env.get(PER_DEVICE, "1"))
    if dist.is_available() and dist.is_initialized():
        return _world(int(env.get("LOCAL_RANK", dist.get_rank())), device_type, per_device)
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
        device_id=_bound_device(device_type, local_rank, per_device),
    )
    world = _world(local_rank, device_type, per_device, owned=True)
    # Rank 0 has the store. If it went on and failed, those that still join would look for it in vain.
    dist.barrier(group=world.host)
    return world


def _world(local_rank: int, device_type: str, per_device: int, *, owned: bool = False) -> World:
    """Returns this process's place in the default group; a collective over it."""
    import torch.distributed as dist

    from outsize.run.transport.groups import host_group

    group = dist.group.WORLD
    assert group is not None
    host = host_group(group)
    machines = () if device_type == "cpu" else _machines(host)
    world = World(group.rank(), group.size(), local_rank, group, owned, host, device_type, machines)
    return replace(world, ranks_per_device=1 if device_type == "cpu" else per_device)


def _machines(host: ProcessGroup) -> tuple[int, ...]:
    """Returns how many processes each machine has, in the order of their ranks; a collective."""
    from outsize.run.transport.control_messages import all_gather_json

    return tuple(Counter(all_gather_json(socket.gethostname(), host, "names of machines")).values())


def sizes_in(env: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the numbers of ranks that the run may have, as its launcher tells them; () for one number."""
    return tuple(int(size) for size in env.get(SIZES, "").split(",") if size)


def leave(world: World) -> None:
    """Destroys the process group if `join` made it; a group that existed before stays."""
    import torch.distributed as dist

    if world.owned and dist.is_initialized():
        dist.destroy_process_group()


def forget_groups() -> None:
    """Makes a fork of a rank a process without groups, which may join others.

    The groups are kept for ever, since their destructors would wait for threads that a fork does not have.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        torchs: Any = dist.distributed_c10d
        _FORGOTTEN.append((torchs._world, dist.group.WORLD))
        torchs._update_default_pg(None)
        torchs._world = torchs._World()


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

    real = (name for name in dist.Backend.backend_list if name not in ("undefined", "fake"))
    known = [name for name in real if dist.is_backend_available(name)]
    for name in (one.split(":")[-1].lower() for one in asked.split(",")):
        if not dist.is_backend_available(name):
            built = "; MPI needs a torch built from source with MPI's compiler" if name == "mpi" else ""
            raise BadOption(
                f"this torch has no backend {name!r}",
                numbers=f"it has {', '.join(known)}{built}",
                next_step=f"outsize.Ranks(backend={known[0]!r}), or leave it out",
            )


def _bound_device(device_type: str, local_rank: int, per_device: int) -> torch.device | None:
    """Returns the accelerator of this process, made current; None on the CPU. Raises BadOption."""
    import torch

    if device_type == "cpu":
        return None
    count = torch.get_device_module(device_type).device_count()
    device = torch.device(device_type, device_index(device_type, local_rank, count, per_device))
    if per_device > 1:
        from outsize.device.accelerators import insist_on_shared_devices

        insist_on_shared_devices(device_type)
    torch.get_device_module(device_type).set_device(device)
    return device


def device_index(device_type: str, local_rank: int, visible: int, per_device: int = 1) -> int:
    """Returns the number of this process's device among those that it sees; `per_device` ranks in a row have
    the same one.

    A process that sees a single one has it to itself, as `srun --gpus-per-task=1` gives each its own. Raises
    BadOption where there is none for its local rank.
    """
    if visible == 1 and per_device == 1:
        return 0
    index = local_rank // per_device
    if index >= visible:
        shared = f", {per_device} ranks on each" if per_device > 1 else ""
        raise BadOption(
            f"no {device_type} device for local rank {local_rank}",
            numbers=f"{visible} on this machine{shared}",
            next_step=f"--nproc-per-node {max(1, visible) * per_device}",
        )
    return index


def device_type_for(plan: Plan | None, processes: int, visible: Callable[[], tuple[str, int]]) -> str:
    """Returns the type of device on which a worker of a plan computes, one of `processes` on this machine.

    `visible` returns the type and the number of the accelerators that this process sees. A plan decides the
    type; without one each process takes an accelerator where there are enough. Raises UnknownDevice for a
    plan of accelerators that this process does not have.
    """
    kind, count = visible()
    if plan is None:
        return kind if count >= processes else "cpu"
    wanted = plan.stages[0].device.partition(":")[0]
    if wanted != "cpu" and (wanted != kind or not count):
        raise UnknownDevice(
            f"the plan is for {wanted} devices, and this process has none",
            numbers=f"cluster {plan.cluster}; torch sees {f'{count} {kind}' if count else 'no accelerator'}",
            next_step="outsize plan MODEL --cluster 2xcpu for this machine, or run it where they are",
        )
    return wanted


def visible_accelerators() -> tuple[str, int]:
    """Returns the type and the number of the accelerators that this process sees; none: `cpu` and 0."""
    from outsize.device.accelerators import device_count, device_type

    return device_type(), device_count()
