"""Starts one process per device (`outsize run`), which `train/world/join.py` then joins from inside a script.

The launcher is torch's elastic agent with torchrun's options (agent.py says what is added). A run on one
machine stays on the loopback interface: the meeting port, gloo and NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any, Final

from outsize.device.cores import usable_cores
from outsize.errors import BadOption, Preempted, RankFailed
from outsize.files.private_folder import private_folder
from outsize.files.run_folders import RunFolder
from outsize.files.wanted_size import WantedSize, size_wanted
from outsize.ir.formatting import whole_number
from outsize.ops.launch.fork_server import ForkServer, can_serve_forks
from outsize.ops.launch.spec import LaunchSpec, copies_folder, lifeline_in, published, worker_environment
from outsize.ops.watchdog.options import WatchOptions
from outsize.run.transport.run_secret import SECRET, RunSecret
from outsize.train.world.failure import KILLED, Failure, signal_name
from outsize.train.world.rendezvous import LOOPBACK, LOOPBACK_NAMES, STORE, file_store
from outsize.train.world.variables import COPIES, PUBLISHED, SIZES

NCCL_ENDS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
MOST_PORT: Final = 65535
_THE_LAUNCHERS_OWN: Final = "leave it out, or torchrun, under which outsize.parallelize runs as well"
_NOT_FOLLOWED: Final = {
    "--no-python": "outsize run train.py, which Python runs",
    "--run-path": "outsize run train.py, which Python runs",
    "--signals-to-handle": "leave it out: SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 are handled",
    **dict.fromkeys(
        (
            *("--event-log-handler", "--logs-specs", "--virtual-local-rank"),
            *("--duplicate-stdout-filters", "--duplicate-stderr-filters"),
        ),
        _THE_LAUNCHERS_OWN,
    ),
}
"""Says what to do in place of what torchrun's parser reads and this launcher does not do."""

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.launcher.api import LaunchConfig

    from outsize.ops.launch.agent import Ended

__all__ = ["LaunchSpec", "launch", "processes_for", "run_script"]


def run_script(
    argv: Sequence[str],
    nproc_per_node: int = 1,
    *,
    options: Sequence[str] = (),
    module: bool = False,
    grace_s: int = 5,
    shown_as: str = "",
) -> int:
    """Calls `launch` with plain arguments: argv[0] is a script's path, or a module's name when `module`."""
    return launch(
        LaunchSpec(
            tuple(argv), nproc_per_node, tuple(options), module=module, grace_s=grace_s, shown_as=shown_as
        )
    )


def launch(spec: LaunchSpec) -> int:
    """Runs the processes of this machine to their end and returns the exit code of the whole.

    0: every process ended well. 75: a signal asked for the end, and the run has saved itself. 128 + n: signal
    n asked for the end (130 for Ctrl-C). Otherwise stderr got the first failing rank's traceback and a
    RankFailed [E401] line (its code is 4), or, for an error of outsize itself, that one line (with that
    error's code). No process of the run outlives this call, and the longest wait after a failure or a signal
    is `spec.grace_s` seconds. Raises BadOption (E106), also on Windows;
    RankFailed when the machines do not meet.
    """
    if not hasattr(os, "mkfifo"):
        raise BadOption(
            "processes are started on Linux and macOS alone",
            numbers=f"{sys.platform} has no process groups and no named pipes",
            next_step=f"python {spec.shown} (all stages in one process), or outsize run inside WSL",
        )
    with (
        private_folder("outsize-") as folder,
        published(spec) as run,
        size_wanted(run) as wanted,
        spec.how.beside(run),
        _quiet_elastic(),
    ):
        return _run(spec, folder, run, wanted)


def processes_for(nproc: str) -> int:
    """Returns the count for torchrun's values of --nproc-per-node: a number, `cpu`, `gpu`, `xpu` or `auto`.

    Raises BadOption (E106). Only words import torch.
    """
    if count := whole_number(nproc):
        return count
    if count == 0 or nproc.removeprefix("-").isdigit():
        raise BadOption(f"--nproc-per-node {nproc!r} is no count", next_step="--nproc-per-node 2, or auto")
    from torch.distributed.run import determine_local_world_size

    try:
        return len(usable_cores()) if nproc == "cpu" else determine_local_world_size(nproc)
    except ValueError as error:
        raise BadOption(
            f"--nproc-per-node {nproc!r} is no count of what is here: {error}",
            next_step="--nproc-per-node 2, cpu, or auto",
        ) from error


def torchrun_flags() -> dict[str, tuple[str, bool]]:
    """Returns every flag of torchrun's parser, in each spelling: its name there, and whether a value follows.

    Imports torch.
    """
    # argparse has no public list of its actions; this one has been there since Python 2.7.
    actions = _parser()._option_string_actions  # pyright: ignore[reportPrivateUsage]
    return {flag: (action.dest, action.nargs != 0) for flag, action in actions.items()}


def _run(spec: LaunchSpec, folder: Path, run: RunFolder | None, wanted: WantedSize) -> int:
    """Starts, watches and ends the workers."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from outsize.ops.launch.agent import Agent, Attempts, Logs, catchable_signals, lifeline
    from outsize.ops.launch.meetings import STORE_S

    args, config = _config(spec, folder)
    loopback = _is_local(args, config)
    secret = _secret(spec, config, loopback=loopback)
    extra_environment = worker_environment(
        spec.nproc_per_node, os.environ, loopback=loopback, cores=len(usable_cores())
    )
    extra_environment |= (spec.how.watch or WatchOptions.of_environment(os.environ)).environment()
    sizes = spec.world_sizes(config.min_nodes, config.max_nodes)
    if spec.how.publishes:
        extra_environment[PUBLISHED] = "" if run is None else str(run.path)
    extra_environment |= spec.how.environment(os.environ)
    extra_environment |= {} if secret is None else {SECRET: secret.text}
    extra_environment |= {SIZES: ",".join(map(str, sizes))} if len(sizes) > 1 else {}
    if "OMP_NUM_THREADS" in extra_environment:
        _say(f"outsize: {spec.processes}, OMP_NUM_THREADS={extra_environment['OMP_NUM_THREADS']} each")
    if NCCL_ENDS not in os.environ:
        extra_environment[NCCL_ENDS] = "1"  # as torchrun
    meeting = file_store(folder / "store", STORE_S) if loopback else None
    extra_environment |= {STORE: str(folder / "store")} if loopback else {}
    logs = Logs(args.log_dir, args, extra_environment, config.log_line_prefix_template or "[${rank}] ")
    codes: list[int] = []
    agent: Agent | None = None
    with contextlib.ExitStack() as stack:
        copies = stack.enter_context(copies_folder(spec, config.max_nodes))
        # A launcher that a worker starts does not inherit the worker's copies.
        extra_environment[COPIES] = "" if copies is None else copies.variable
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = stack.enter_context(
            catchable_signals(meets=not loopback)
        )
        stack.enter_context(lifeline(lifeline_in(folder)))
        try:
            worker = _worker(
                spec, folder, args, config, _handler(spec, args, config, secret, loopback=loopback)
            )
            server = _fork_server(spec, config, folder, extra_environment)
            if server is not None:
                stack.callback(server.close)
            show = _reporter(spec, config.max_restarts, codes)
            attempts = Attempts(show, _say, wanted, spec.least, spec.nproc_per_node, server, meeting, secret)
            agent = Agent(worker, logs, args.shutdown_timeout, attempts)
            stack.callback(agent.kill)  # whatever happens below, nothing is left running
            result: Any = agent.run()
            if agent.failure is not None:
                return codes[-1]
            if not loopback:
                worker.rdzv_handler.shutdown()  # who waits to join learns that the run has ended
            return RankFailed.exit_code if result is not None and result.is_failed() else 0
        except (SignalException, KeyboardInterrupt) as stop:
            signum = stop.sigval if isinstance(stop, SignalException) else SIGINT
            if agent is not None and set(agent.exit_codes()) == {Preempted.exit_code}:
                _say(f"outsize: stopped by {signal_name(signum)}; the run is saved, the same command goes on")
                return Preempted.exit_code
            _say(f"outsize: stopped by {signal_name(signum)}, {spec.processes} ended")
            return 128 + signum
        except (RendezvousError, DistError) as error:
            how = f"{config.rdzv_backend} at {config.rdzv_endpoint}"
            raise RankFailed(
                "the machines of the run have not met",
                numbers=f"{how}, {type(error).__name__}: {_first_line(error)}",
                next_step="start the same command on every machine, --node-rank 0, 1, ...",
            ) from error


def _first_line(error: Exception) -> str:
    """Returns what an error of torch says, without the C++ stack that follows it."""
    return str(error).partition("\n")[0].partition(" Exception raised from")[0].rstrip(". ")


def _config(spec: LaunchSpec, folder: Path) -> tuple[Any, LaunchConfig]:
    """Returns torchrun's own reading of its options (and of PET_*).

    Raises BadOption.
    """
    from torch.distributed.run import config_from_args

    parser = _parser()
    try:
        args = parser.parse_args([*spec.options, "--nproc-per-node", "1", spec.argv[0]])
        _check_followed(spec.options)
        _check_meeting(args)
        least, _, most = args.nnodes.partition(":")
        processes_change = spec.least < spec.nproc_per_node and least != "1"
        if args.rdzv_backend == "static" and (processes_change or most not in ("", least)):
            args.rdzv_backend, args.node_rank = "c10d", 0  # who comes, goes or changes has no fixed number
            args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        any_port = args.nnodes in ("1", "1:1") and args.master_addr in LOOPBACK_NAMES
        args.master_port = args.master_port or (0 if any_port else 29500)
        args.log_dir = args.log_dir or str(folder)
        args.shutdown_timeout = args.shutdown_timeout or spec.grace_s
        config, _, _ = config_from_args(args)
    except BadOption:
        raise
    except Exception as error:  # argparse's errors, and torchrun's assertions
        raise BadOption(
            f"torchrun's options: {error}", numbers=" ".join(spec.options), next_step="torchrun --help"
        ) from error
    config.nproc_per_node = (
        spec.nproc_per_node
    )  # set afterwards: with more than one, torchrun sets OMP_NUM_THREADS
    return args, config


def _parser() -> argparse.ArgumentParser:
    """Returns torchrun's parser, which in torch 2.11 has no time to end in and always a port."""
    from torch.distributed.argparse_util import env
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.exit_on_error = False
    with contextlib.suppress(argparse.ArgumentError):  # A newer torch has the option.
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, type=int)
    parser.set_defaults(master_port=os.environ.get("PET_MASTER_PORT"))
    return parser


def _check_followed(options: Sequence[str]) -> None:
    """Raises BadOption for what torchrun's parser reads and this launcher does not do."""
    for option in options:
        if (instead := _NOT_FOLLOWED.get(option.partition("=")[0])) is not None:
            raise BadOption(f"{option} is torchrun's, and outsize run cannot follow it", next_step=instead)


def _check_meeting(args: Any) -> None:
    if args.master_port is not None and not 0 <= int(args.master_port) <= MOST_PORT:
        raise BadOption(
            f"--master-port {args.master_port} is no port",
            numbers=f"ports: 0 to {MOST_PORT}",
            next_step="--master-port 29500",
        )
    if args.nnodes not in ("1", "1:1") and not (args.rdzv_endpoint or args.master_port or args.standalone):
        raise BadOption(
            f"--nnodes {args.nnodes} needs a meeting point that all machines reach",
            numbers=f"--master-addr {args.master_addr}, no --master-port, no --rdzv-endpoint",
            next_step="--node-rank 0 --master-addr <address of node 0> --master-port 29500",
        )


def _is_local(args: Any, config: LaunchConfig) -> bool:
    """Tells whether this machine's processes are the whole run, and no meeting point was given."""
    unsaid = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_addr in LOOPBACK_NAMES
    return bool(args.standalone) or (config.max_nodes == 1 and unsaid)


def _secret(spec: LaunchSpec, config: LaunchConfig, *, loopback: bool) -> RunSecret | None:
    """Returns the secret of the machines; says what is open where several have none. Raises BadOption."""
    if spec.how.secret_file is not None:
        return RunSecret.of_file(spec.how.secret_file)
    secret = RunSecret.of_environment(os.environ)
    if secret is None and not loopback and config.max_nodes > 1:
        _say(
            f"outsize: up to {config.max_nodes} machines meet without a secret: who reaches "
            f"{config.rdzv_endpoint} can write into their store. Next: --ranks "
            "secret_file=FILE on every machine"
        )
    return secret


def _handler(
    spec: LaunchSpec, args: Any, config: LaunchConfig, secret: RunSecret | None, *, loopback: bool
) -> RendezvousHandler:
    """Returns where the agents of the run meet."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from outsize.ops.launch.meetings import (
        CHANGING,
        ChangingMeeting,
        FixedMeeting,
        Loopback,
        meeting_point,
    )

    local_addr = config.local_addr
    if config.rdzv_backend != "static" and config.rdzv_endpoint.rpartition(":")[0] in LOOPBACK_NAMES:
        local_addr = local_addr or LOOPBACK
    meeting = RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id,
        config.min_nodes,
        config.max_nodes,
        local_addr,
        **{**CHANGING, **config.rdzv_configs},
    )
    if loopback:
        return Loopback(None if spec.is_ours else args.master_port)
    if config.rdzv_backend == "static":
        return FixedMeeting.of(get_rendezvous_handler(meeting))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # each attempt has a store of its own
    return ChangingMeeting(lambda: meeting_point(meeting, secret), secret)


def _worker(
    spec: LaunchSpec, folder: Path, args: Any, config: LaunchConfig, handler: RendezvousHandler
) -> WorkerSpec:
    """Returns elastic's specification of a worker."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from outsize.ops.launch.meetings import FixedMeeting

    static = isinstance(handler, FixedMeeting)
    return WorkerSpec(
        role=config.role,
        local_world_size=spec.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=tuple(spec.command(folder)),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=args.master_addr if static else None,
        master_port=args.master_port if static else None,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )


def _fork_server(
    spec: LaunchSpec, config: LaunchConfig, folder: Path, environment: Mapping[str, str]
) -> ForkServer | None:
    """Returns the process whose forks are the workers, for a run that may start again."""
    starts_again = config.max_restarts or spec.least < spec.nproc_per_node
    if not starts_again or config.numa_options is not None or not can_serve_forks():
        return None
    return ForkServer({**os.environ, **environment}, folder, spec.how.preloads)


def _reporter(spec: LaunchSpec, restarts: int, codes: list[int]) -> Callable[[Ended], None]:
    """Returns the function that shows what ended an attempt, and records its exit code."""

    def show(ended: Ended) -> None:
        if ended.goes_on:
            many = "1 process" if ended.processes == 1 else f"{ended.processes} processes"
            _say(f"outsize: the run is saved, and goes on with {many} here")
            return
        codes.append(_report(spec, ended.failure, ended.world_size))
        if spec.how.failures is not None:
            with spec.how.failures.open("a", encoding="utf-8") as failures:
                failures.write(f"{ended.failure.to_json()}\n")
        if ended.restarts_left:
            fewer = ended.processes < spec.nproc_per_node
            size = f", {ended.processes} of {spec.processes} here" if fewer else ""
            _say(f"outsize: restart {restarts - ended.restarts_left + 1} of {restarts}{size}")

    return show


def _report(spec: LaunchSpec, failure: Failure, world_size: int) -> int:
    if failure.shown:
        _say(failure.shown.rstrip("\n"))
    if failure.ours:
        return failure.exit_code
    then = "another rank then ended: " if failure.absence else ""
    rank_failed = RankFailed(
        failure.told(world_size),
        numbers=f"{then}{failure.ending}, pid {failure.pid}",
        next_step=_next_step(spec, failure, world_size),
    )
    _say(str(rank_failed))
    return RankFailed.exit_code


def _next_step(spec: LaunchSpec, failure: Failure, world_size: int) -> str:
    if failure.absence:
        return "run as many steps on every rank, and stop none"
    if failure.exit_code == KILLED:
        return "dmesg | grep -i 'killed process' (the kernel kills what outgrows the memory)"
    if failure.is_out_of_memory:
        return "outsize fit for what it needs; more --microbatches, --recompute full or --weights host"
    if failure.is_consequence and world_size > spec.nproc_per_node:
        return "see what the other machines say: the cause is there"
    if world_size > 1:
        return f"outsize run --nproc-per-node 1 {spec.shown} (does one process alone fail too?)"
    return "outsize explain E401"


def _say(text: str) -> None:
    """Writes to the launcher's own stderr, in one piece."""
    from outsize.ops.launch.agent import STDERR, Lines

    Lines(STDERR).write(text)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silences elastic's own log, which repeats our messages, unless the user has set LOGLEVEL."""
    logger = logging.getLogger("torch.distributed.elastic")
    silent, before = logging.NullHandler(), logger.propagate
    if "LOGLEVEL" not in os.environ:
        logger.addHandler(silent)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = before
