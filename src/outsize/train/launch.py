"""Start one process per device (`outsize run`), and join the processes from inside a script.

The same script runs alone, under `outsize run` and under torchrun: the environment is torchrun's. The
launcher itself needs the standard library alone (only `join` imports torch), so it starts in about 0.1 s and
leaves the memory to the workers. torch's elastic agent is not used: it kills after 30 s, tells failures
apart by whole seconds, shows every rank's traceback and costs the launcher an `import torch`. Restarts and
changing node counts are not offered here.

A run on one machine stays on the loopback interface: the meeting port, gloo and NCCL.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM

from outsize.errors import BadOption, RankFailed
from outsize.train import supervise
from outsize.train.ending import end_well_outside_workers
from outsize.train.failure import Failure, WorkerFiles, first_failure, signal_name
from outsize.train.rendezvous import LOOPBACK, loopback_interface, reserved_port
from outsize.train.spec import LaunchSpec, worker_environment
from outsize.train.world import World, join_world, leave, on_one_machine

__all__ = ["LaunchSpec", "World", "join", "launch", "leave", "processes_for", "run_script"]


def run_script(
    argv: Sequence[str],
    nproc_per_node: int = 1,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = LOOPBACK,
    master_port: int = 0,
    module: bool = False,
    grace_s: float = 5.0,
    shown_as: str = "",
) -> int:
    """`launch` with plain arguments: argv[0] is a script's path, or a module's name when `module`."""
    spec = LaunchSpec(
        tuple(argv),
        nproc_per_node,
        nnodes,
        node_rank,
        master_addr,
        master_port,
        module=module,
        grace_s=grace_s,
        shown_as=shown_as,
    )
    return launch(spec)


def launch(spec: LaunchSpec) -> int:
    """Run the processes of this machine to their end and return the exit code of the whole.

    0: every process ended well. 128 + n: signal n asked for the end (130 for Ctrl-C). Otherwise the first
    failing rank's traceback and a RankFailed [E401] line went to stderr (its code is 4), or, for an error of
    outsize itself, that one line (with that error's code). No process of the run outlives this call, and the
    longest wait after a failure or a signal is `spec.grace_s` seconds.
    """
    env, cores = dict(os.environ), _cores()
    if spec.nproc_per_node > 1 and "OMP_NUM_THREADS" not in env:
        supervise.say(f"outsize: {_processes(spec)}, OMP_NUM_THREADS={spec.threads(cores)} each")
    signals, failures = _run(spec, env, cores)
    if signals:
        supervise.say(f"outsize: stopped by {signal_name(signals[0])}, {_processes(spec)} ended")
        return 128 + signals[0]
    return _report(spec, first_failure(failures)) if failures else 0


def processes_for(nproc: str) -> int:
    """torchrun's values of --nproc-per-node: a number, `cpu` (cores), `gpu` (CUDA devices), `auto` (either).

    Raises BadOption (E106). Only `gpu` and `auto` import torch.
    """
    if nproc.isdigit() and int(nproc) > 0:
        return int(nproc)
    if nproc not in ("cpu", "gpu", "auto"):
        raise BadOption(f"--nproc-per-node {nproc!r} is no count", next_step="--nproc-per-node 2, or auto")
    devices = 0 if nproc == "cpu" else _cuda_devices()
    if nproc == "gpu" and devices == 0:
        raise BadOption("--nproc-per-node gpu: no CUDA device here", next_step="--nproc-per-node cpu")
    return devices or _cores()


def join(device_type: str = "cpu", timeout_s: float = 1800.0) -> World:
    """This process's place in the run; makes the default process group if there is none yet.

    gloo for `cpu`; for another device type its own backend (NCCL for `cuda`) and gloo for CPU tensors.
    `timeout_s` bounds each collective. Without torchrun's environment: World(0, 1, 0, None). From here on an
    uncaught exception is recorded for torchrun and ends the process without waiting for its peers.
    Raises BadOption (E106) when the environment is half there or asks for a device that is not.
    """
    env = os.environ
    if on_one_machine(env):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, loopback_interface())
    world = join_world(env, device_type, timeout_s)
    if world.owned:
        error_file = env.get("TORCHELASTIC_ERROR_FILE")
        end_well_outside_workers(Path(error_file) if error_file else None)
    return world


def _run(spec: LaunchSpec, env: Mapping[str, str], cores: int) -> tuple[list[int], list[Failure]]:
    """Start, watch and end the workers; the signals that came and the ranks that failed."""
    workers: list[supervise.Worker] = []
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(supervise.caught_signals())
        port = spec.master_port or stack.enter_context(reserved_port())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outsize-")))
        lifeline = stack.enter_context(supervise.lifeline())
        stack.callback(supervise.kill, workers)  # whatever happens below, nothing is left running
        for local_rank in range(spec.nproc_per_node):
            files = WorkerFiles(folder, spec.rank(local_rank))
            theirs = worker_environment(spec, env, local_rank=local_rank, port=port, cores=cores, files=files)
            workers.append(supervise.start(spec.command(files, lifeline), theirs, files, lifeline))
        failures = supervise.watch(workers, signals)
        if signals or failures:
            supervise.end(workers, signals[0] if signals else SIGTERM, spec.grace_s, signals)
        supervise.drain(workers)
    return signals, failures


def _report(spec: LaunchSpec, failure: Failure) -> int:
    if failure.shown:
        supervise.say(failure.shown.rstrip("\n"))
    if failure.ours:
        return failure.exit_code
    rank_failed = RankFailed(
        f"rank {failure.rank} of {spec.world_size} failed first",
        numbers=f"{failure.ending}, pid {failure.pid}",
        next_step=_next_step(spec, failure),
    )
    supervise.say(str(rank_failed))
    return RankFailed.exit_code


def _next_step(spec: LaunchSpec, failure: Failure) -> str:
    if failure.exit_code == -SIGKILL:
        return "dmesg | grep -i 'killed process' (the kernel kills what outgrows the memory)"
    if spec.world_size > 1:
        target = spec.shown_as or (f"-m {spec.argv[0]}" if spec.module else spec.argv[0])
        return f"outsize run --nproc-per-node 1 {target} (does one process alone fail too?)"
    return "outsize explain E401"


def _processes(spec: LaunchSpec) -> str:
    return "1 process" if spec.nproc_per_node == 1 else f"{spec.nproc_per_node} processes"


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()
