"""Describes what to launch, with torchrun's own options; what cannot start is refused before torch is
imported.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from outsize.errors import BadOption
from outsize.files.private_folder import private_folder
from outsize.files.run_folders import LAUNCH, RunFolder, run_folder
from outsize.ir.answers.run_state import RunLaunch
from outsize.ops.launch.worker import OURS
from outsize.ops.watchdog.options import WatchOptions
from outsize.train.world.rendezvous import loopback_interface
from outsize.train.world.variables import ON_OOM, PER_DEVICE, SHARE, PeerCopies

WORKER_ARGUMENTS = 4  # python -P -m outsize.ops.launch.worker, then the arguments of worker.py
SHARED_MEMORY = Path("/dev/shm")


# What NCCL 2.30 is said to need for several ranks of a communicator on one device (public threads, not run
# here yet): to be allowed it, no NVLS, and few blocks, because the kernels of all ranks wait for each other.
SHARED_DEVICE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}


@final
@dataclass(frozen=True)
class LaunchOptions:
    """Holds the options of a launch that are not torchrun's, whatever script or MODEL is run.

    `watch` are the watchdog's options; None: the environment's. `on_oom` is passed to `parallelize`.
    `peer_copies` is how often the run copies itself into memory, as checkpoint/interval.py reads it.
    `secret_file` has the secret of the machines (run_secret.py), else the environment has it. `publishes`
    makes the run seen by `outsize top`. `memory_share` is how much of each device's memory it may have;
    None: all. `ranks_per_device` of its processes compute on each device, and divide that share. `beside` is
    what goes on in the launcher as long as the run does, given the folder in which it is published.
    `failures` is a file that gets a line for each attempt that failed: how, as train/world/failure.py has
    it. Workers of a run that may start again find `preloads` imported. Raises BadOption (E106).
    """

    watch: WatchOptions | None = None
    on_oom: str | None = None
    peer_copies: str | None = None
    secret_file: Path | None = None
    publishes: bool = False
    memory_share: float | None = None
    ranks_per_device: int = 1
    beside: Callable[[RunFolder | None], AbstractContextManager[None]] = lambda _: nullcontext()
    failures: Path | None = None
    preloads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises BadOption where a device would have no rank."""
        if self.ranks_per_device < 1:
            raise BadOption(
                "each device needs at least one rank",
                numbers=f"--ranks per_device={self.ranks_per_device}",
                next_step="--ranks per_device=2",
            )

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns what workers read of these options; the user's settings of NCCL in `base` stay."""
        asked: dict[str, str | None] = {ON_OOM: self.on_oom}
        asked[SHARE] = None if self.memory_share is None else repr(self.memory_share)
        if self.ranks_per_device > 1:
            asked |= {name: base.get(name, value) for name, value in SHARED_DEVICE.items()}
            asked[PER_DEVICE] = str(self.ranks_per_device)
        return {name: value for name, value in asked.items() if value is not None}


@final
@dataclass(frozen=True)
class LaunchSpec:
    """A script (or module) with its arguments, and the processes to run it in.

    `options` are torchrun's, as on its command line (without --nproc-per-node). `shown_as` is what the user
    typed, where argv is something else (a MODEL, which our own worker module builds). `grace_s` is how long
    processes may take to end after a failure or a signal, in seconds, before they are killed; torchrun's
    --shutdown-timeout overrides it. Of `nproc_per_node` processes those that are killed are not replaced
    while `least_nproc` stay; None: all are. `how` is what else holds for the run.
    Raises BadOption (E106).
    """

    argv: tuple[str, ...]
    nproc_per_node: int = 1
    options: tuple[str, ...] = ()
    module: bool = False
    grace_s: int = 5
    shown_as: str = ""
    least_nproc: int | None = None
    how: LaunchOptions = field(default_factory=LaunchOptions)

    def __post_init__(self) -> None:
        """Raises BadOption for what cannot start."""
        if not self.argv:
            raise BadOption("nothing to run", next_step="outsize run --nproc-per-node 2 train.py")
        if not self.module and not Path(self.argv[0]).exists():
            raise BadOption(f"no file {self.argv[0]!r}", next_step=f"ls {Path(self.argv[0]).parent}")
        if not self.module and Path(self.argv[0]).is_dir() and not Path(self.argv[0], "__main__.py").exists():
            raise BadOption(
                f"{self.argv[0]!r} is a folder, and none that Python runs",
                numbers="it has no __main__.py",
                next_step=f"ls {self.argv[0]}, then outsize run {Path(self.argv[0], 'train.py')}",
            )
        if self.nproc_per_node < 1:
            numbers = f"--nproc-per-node {self.nproc_per_node}"
            raise BadOption(
                "a run needs at least one process", numbers=numbers, next_step="--nproc-per-node 2"
            )
        if not 1 <= self.least <= self.nproc_per_node:
            raise BadOption(
                "the least number of processes is above the most",
                numbers=f"--nproc-per-node {self.least_nproc}:{self.nproc_per_node}",
                next_step=f"--nproc-per-node 1:{self.nproc_per_node}",
            )

    def command(self, folder: Path) -> list[str]:
        """Returns what follows `python` on the command line of a worker (worker.py)."""
        kind = "module" if self.module else "script"
        return ["-P", "-m", "outsize.ops.launch.worker", str(lifeline_in(folder)), kind, *self.argv]

    @property
    def least(self) -> int:
        """Returns the processes that stay on this machine at least."""
        return self.nproc_per_node if self.least_nproc is None else self.least_nproc

    def world_sizes(self, least_nodes: int, most_nodes: int) -> list[int]:
        """Returns the numbers of ranks that the run may have, with so many processes on each machine."""
        nodes, here = range(least_nodes, most_nodes + 1), range(self.least, self.nproc_per_node + 1)
        return sorted({machines * processes for machines in nodes for processes in here})

    @property
    def is_ours(self) -> bool:
        """Tells whether it is a worker of the command line, whose ranks meet by `join` alone."""
        return self.module and self.argv[0].startswith(OURS)

    @property
    def processes(self) -> str:
        """Returns the number of this machine's processes, in words."""
        return "1 process" if self.nproc_per_node == 1 else f"{self.nproc_per_node} processes"

    @property
    def shown(self) -> str:
        """Returns the target as the user types it."""
        return self.shown_as or shlex.join(["-m", self.argv[0]] if self.module else [self.argv[0]])


@contextmanager
def copies_folder(spec: LaunchSpec, machines: int) -> Iterator[PeerCopies | None]:
    """Makes the folder for copies of the run in this machine's memory, which is gone afterwards.

    Raises BadOption where copies would not outlive what they are for.
    """
    if spec.how.peer_copies is None:
        yield None
        return
    if machines > 1:
        raise BadOption(
            "copies in memory are lost with their machine, and this run has several",
            numbers=f"up to {machines} machines",
            next_step="engine.state.checkpoint(FOLDER, every=...) in a folder that all machines see",
        )
    if not SHARED_MEMORY.is_dir():
        raise BadOption(f"this system has no {SHARED_MEMORY}", next_step="leave out --ranks peer_copies")
    with private_folder("outsize-copies-", SHARED_MEMORY) as folder:
        yield PeerCopies(spec.how.peer_copies, folder)


@contextmanager
def published(spec: LaunchSpec) -> Iterator[RunFolder | None]:
    """Makes the folder in which the run is published, which is gone afterwards; None where there can be none.

    A run does without, so where another user has made the folder, or a disk is full, nothing is raised.
    """
    if not spec.how.publishes:
        yield None
        return
    with ExitStack() as stack:
        folder: RunFolder | None = None
        with suppress(OSError):
            folder = stack.enter_context(run_folder())
            launch = RunLaunch(
                pid=folder.pid,
                command=spec.shown,
                started_unix_s=folder.started_unix_s,
                least=spec.least,
                most=spec.nproc_per_node,
            )
            folder.put(LAUNCH, launch.model_dump_json())
        yield folder


def lifeline_in(folder: Path) -> Path:
    """Returns the named pipe at whose end of file a worker knows that its launcher is gone."""
    return folder / "lifeline"


def threads(nproc_per_node: int, cores: int) -> int:
    """Returns the CPU threads per process when the user has not chosen (torchrun gives one)."""
    return max(1, cores // nproc_per_node)


def worker_environment(
    nproc_per_node: int, base: Mapping[str, str], *, loopback: bool, cores: int
) -> dict[str, str]:
    """Returns the workers' variables besides torchrun's; what the user has set stays.

    A single process keeps torch's own choice of threads. All ranks iterate over a set of texts in one order,
    since Python's draw for it is left out: a loader may make its batches from one.
    """
    variables = {"PYTHONHASHSEED": "0"}
    if nproc_per_node > 1:
        variables["OMP_NUM_THREADS"] = str(threads(nproc_per_node, cores))
    if loopback:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback_interface())
    return {name: value for name, value in variables.items() if name not in base}
