"""Joins the processes of a run from inside a script, whoever started them.

The same script runs alone, under `outsize run`, torchrun, srun, flux and mpirun: `join` detects the launcher
(environments.py). A run on one machine stays on the loopback interface: the meeting port, gloo and NCCL. This
is the only file of the core that reads the environment.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from outsize.ir.hardware.memory_share import checked_share
from outsize.program.source_line import warn_user
from outsize.run.transport.run_secret import RunSecret
from outsize.train.world.environments import TrainsAlone, detected, looks_like_one_of_many, places_first
from outsize.train.world.exit import end_well_outside_workers
from outsize.train.world.rendezvous import LOOPBACK, STORE, loopback_interface
from outsize.train.world.variables import COPIES, ON_OOM, PREFIX, SHARE, PeerCopies
from outsize.train.world.world import World, join_world, on_one_machine, sizes_in

_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def is_first_rank() -> bool:
    """Tells whether this process is rank 0 of its run, or alone, by what its launcher says."""
    return places_first(os.environ)


def join(device_type: str = "cpu", timeout_s: float = 1800.0, backend: str | None = None) -> World:
    """Returns this process's place in the run; makes the default process group if there is none yet.

    The backend is gloo for `cpu`; for another device type its own (NCCL for `cuda`) and gloo for CPU tensors;
    or `backend`, as torch spells it. `timeout_s` bounds each collective. Without the environment of torchrun,
    srun or mpirun it returns World(0, 1, 0, None). From here on an uncaught exception is recorded for
    torchrun and ends the process without waiting for its peers. Warns (TrainsAlone) where it is alone and was
    started as one of several. Raises BadOption (E106) when the environment is incomplete or names a device or
    backend that does not exist.
    """
    env = os.environ
    env.update(detected(env))  # the user's script and torch read RANK too
    if on_one_machine(env):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, loopback_interface())
    world = join_world(env, device_type, timeout_s, backend)
    if world.group is None and (why := looks_like_one_of_many(env, Path(sys.argv[0]).name)):
        warn_user(why, TrainsAlone)
    told = {name: text for name, text in env.items() if name.startswith(PREFIX)}
    world = replace(world, variables=told, sizes=sizes_in(env), on_oom=env.get(ON_OOM, world.on_oom))
    share = env.get(SHARE)
    whole = None if share is None else checked_share(_number(share), SHARE)
    per_device = world.ranks_per_device
    world = replace(world, memory_share=whole if per_device == 1 else (whole or 1.0) / per_device)
    if world.owned:
        end_well_outside_workers(error_file(), world.rank)
    return world


def _number(text: str) -> float:
    """Returns the number that a text is, and NaN for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def take_place(rank: int, ranks: int, store: Path, record: Path | None = None) -> None:
    """Makes this process a rank of a run on this machine; `join` finds its place and the file.

    Whoever has started it shows what it leaves in `record`, the file for its failure.
    """
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0", STORE: str(store)})
    if record is not None:
        os.environ[_ERROR_FILE] = str(record)


def take_rank(rank: int, ranks: int, address: str, port: int) -> None:
    """Makes this process a rank of a run on this machine that a framework's own launcher has started; `join`
    finds its place.
    """
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = numbers | {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


def set_environment(variables: Mapping[str, str]) -> None:
    """Makes these the variables of this process, a fork; it has no others."""
    os.environ.clear()
    os.environ.update(variables)


def peer_copies() -> PeerCopies | None:
    """Returns how often this run copies itself into memory, and where; None where it does not."""
    text = os.environ.get(COPIES)
    return PeerCopies.of_variable(text) if text else None


def run_secret() -> RunSecret | None:
    """Returns the secret of this run's machines, if they have one. Raises BadOption."""
    return RunSecret.of_environment(os.environ)


def error_file() -> Path | None:
    """Returns the file in which elastic expects the record of a failed worker."""
    name = os.environ.get(_ERROR_FILE)
    return Path(name) if name else None
