"""What to launch, and the environment that each worker gets: torchrun's, computed without reading any."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from outsize.errors import BadOption
from outsize.train.failure import WorkerFiles
from outsize.train.rendezvous import LOOPBACK, LOOPBACK_NAMES, loopback_interface


@final
@dataclass(frozen=True)
class LaunchSpec:
    """A script (or module) with its arguments, and the processes to run it in.

    `master_port` 0 means a free one (one machine only). `shown_as` is what the user typed, where argv is not
    (a MODEL, which our own worker module builds). `grace_s` is how long processes may take to end on
    their own after a failure or a signal, in seconds, before they are killed. Raises BadOption (E106).
    """

    argv: tuple[str, ...]
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0
    module: bool = False
    grace_s: float = 5.0
    shown_as: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot start."""
        self._check_target()
        self._check_counts()
        if self.nnodes > 1 and (self.master_port == 0 or self.master_addr in LOOPBACK_NAMES):
            where = f"master {self.master_addr}:{self.master_port}"
            raise BadOption(
                f"{self.nnodes} nodes need a meeting point that all of them reach",
                numbers=where,
                next_step="--master-addr <address of node 0> --master-port 29500",
            )

    def _check_target(self) -> None:
        if not self.argv:
            raise BadOption("nothing to run", next_step="outsize run --nproc-per-node 2 train.py")
        if not self.module and not Path(self.argv[0]).exists():
            raise BadOption(f"no file {self.argv[0]!r}", next_step=f"ls {Path(self.argv[0]).parent}")

    def _check_counts(self) -> None:
        if self.nproc_per_node < 1 or self.nnodes < 1:
            numbers = f"--nproc-per-node {self.nproc_per_node}, --nnodes {self.nnodes}"
            raise BadOption(
                "a run needs at least one process", numbers=numbers, next_step="--nproc-per-node 2"
            )
        if not 0 <= self.node_rank < self.nnodes:
            numbers = f"--node-rank {self.node_rank}, --nnodes {self.nnodes}"
            raise BadOption(
                "node ranks count from 0", numbers=numbers, next_step=f"--node-rank {self.nnodes - 1}"
            )

    @property
    def world_size(self) -> int:
        """Processes over all machines."""
        return self.nnodes * self.nproc_per_node

    def rank(self, local_rank: int) -> int:
        """The global rank of this machine's process `local_rank`."""
        return self.node_rank * self.nproc_per_node + local_rank

    def command(self, files: WorkerFiles, lifeline: int) -> list[str]:
        """The command line of a worker (worker.py)."""
        entry = [sys.executable, "-P", "-m", "outsize.train.worker"]
        kind = "module" if self.module else "script"
        return [*entry, str(files.error), str(files.fault), str(lifeline), kind, *self.argv]

    def threads(self, cores: int) -> int:
        """CPU threads per process when the user has not said."""
        return max(1, cores // self.nproc_per_node)


def worker_environment(
    spec: LaunchSpec, base: Mapping[str, str], *, local_rank: int, port: int, cores: int, files: WorkerFiles
) -> dict[str, str]:
    """`base` plus torchrun's variables for this process; what the user has set for gloo, NCCL, OpenMP stays.

    One process alone keeps torch's own choice of threads.
    """
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if spec.nproc_per_node > 1:
        defaults["OMP_NUM_THREADS"] = str(spec.threads(cores))
    if spec.nnodes == 1:
        defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback_interface())
    # an agent's store and restart count of an outer torchrun are not ours
    kept = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    return defaults | kept | _places(spec, local_rank, port) | {"TORCHELASTIC_ERROR_FILE": str(files.elastic)}


def _places(spec: LaunchSpec, local_rank: int, port: int) -> dict[str, str]:
    rank, world_size = str(spec.rank(local_rank)), str(spec.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(spec.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "outsize",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
