"""Extends torch's elastic agent: one traceback, a short grace time, no process that outlives the run.

torch.distributed.elastic starts the workers, restarts them, meets other machines. On its public extension
points (`_monitor_workers` and `_shutdown` of the agent, `LogsSpecs.reify`, `RendezvousHandler`) this adds:

- the rank that failed first is told from those that only lost their connection to it (failure.py), also when
  it ran on another machine: an agent leaves its failure in the store that the agents share;
- `grace_s` instead of 30 s between the signal and the kill, and the kill reaches each worker's children;
- rank 0 has the terminal, the lines of the others are prefixed with `[rank] ` (elastic's tee);
- on one machine the ranks meet in a file; a port is open, on the loopback interface, only for scripts of the
  user's, which may make the process group themselves; between machines the store listens on one interface;
- a pipe whose write end only this process has: at its end of file a worker knows that its launcher is gone;
- workers of a run that may start again are forks of a process that has imported torch (fork_server.py);
- where the number of this machine's processes is a range, a worker that a signal has killed is not replaced,
  and `outsize scale` changes the number: workers save themselves after their step and end, and as many as are
  wanted go on (decision 131);
- machines come and go at meetings.py's rendezvous, each attempt with a store of its own.

Restarts are elastic's; the failure that ended an attempt is shown when it ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Self, cast, final

from torch.distributed import DistError, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.utils.api import macros

from outsize.errors import Preempted
from outsize.files.wanted_size import WantedSize, signal_where_caught
from outsize.ir.formatting import whole_number
from outsize.ops.launch.fork_server import ForkServer
from outsize.ops.launch.meetings import ChangingMeeting
from outsize.ops.launch.spec import WORKER_ARGUMENTS
from outsize.ops.watchdog.processes import look_at
from outsize.run.transport.run_secret import RunSecret, sealed_store
from outsize.train.world.failure import Failure, first_failure, read_failure
from outsize.train.world.rendezvous import ATTEMPT, ENDED

SETTLE_S, ABSENCE_S, POLL_S, SIGNAL_AGAIN_S = 0.3, 2.0, 0.05, 1.0
STDOUT, STDERR = 1, 2
FAILED = "outsize/failed"


@final
@dataclass(frozen=True)
class Ended:
    """How an attempt has ended: what failed first, of how many ranks, and what follows.

    The next attempt has so many `processes` on this machine, if `restarts_left` is not 0. `goes_on`: it was
    saved and nothing has failed, but a user wants another number of processes, or machines come or go.
    """

    failure: Failure
    world_size: int
    restarts_left: int
    processes: int
    goes_on: bool = False


@final
@dataclass(frozen=True)
class Attempts:
    """Holds what an agent does from attempt to attempt.

    `show` is called at the end of each that failed, and `say` with what else a user should know. A worker
    that is killed leaves its place empty as long as `least` processes stay on this machine. Workers are forks
    of `server`, else fresh interpreters. `meeting` is the ranks' store where it is not the agents'; `secret`
    seals what agents tell each other. `wanted` is the size that a user asks for, from `least` to `most`.
    """

    show: Callable[[Ended], None]
    say: Callable[[str], None]
    wanted: WantedSize
    least: int
    most: int
    server: ForkServer | None = None
    meeting: Store | None = None
    secret: RunSecret | None = None


@final
class Agent(LocalElasticAgent):
    """Runs one machine's workers; `failure` is what ended the last attempt, on any machine."""

    def __init__(self, spec: WorkerSpec, logs: Logs, grace_s: int, attempts: Attempts) -> None:
        super().__init__(spec, logs, log_line_prefix_template=logs.prefix, start_method="spawn")
        self._grace_s, self._attempts, self._logs = grace_s, attempts, logs
        self.failure: Failure | None = None
        self._published_ended: set[int] = set()
        self._size: int | None = None  # that is wanted, until the run has it
        self._resized, self._signalled_s = 0, 0.0

    # torch's own methods are decorated by a function without types, hence the casts.
    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        self.failure, self._published_ended = None, set()
        self._logs.begin_attempt(self._attempt)
        server = self._attempts.server
        # Elastic's tee writes to the redirected stdout.
        with contextlib.redirect_stdout(Lines(STDOUT)), contextlib.redirect_stderr(Lines(STDERR)):
            if server is None or not server.is_alive:
                return cast("Any", super())._start_workers(worker_group)
            self._pcontext = ForkedContext.of(worker_group, self._environments(worker_group), self._logs)
            self._pcontext.server = server
            self._pcontext.start()
            return self._pcontext.pids()

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> RunResult:
        self._pass_on_size(worker_group)
        published = self._published(worker_group)
        if published is None and not self._failures(worker_group):
            self._publish_ended(worker_group)
            result: RunResult = cast("Any", super())._monitor_workers(worker_group)
            if not result.is_failed():  # else a worker failed after the check above
                return result
        self._publish(worker_group)
        self._wait(SETTLE_S)  # the other ranks' failures arrive, so that the first can be found
        failures = [
            *self._failures(worker_group),
            *filter(None, [published or self._published(worker_group)]),
        ]
        self.failure = self._cause(worker_group, first_failure(failures))
        if published is not None and not self._changes:
            self._remaining_restarts = 0  # on that machine the last attempt has ended
        is_saved = self.failure.exit_code == Preempted.exit_code
        is_alone = (worker_group.group_world_size or 1) == 1
        goes_on = is_saved and (self._size is not None or (self._changes and not is_alone))
        if goes_on:
            self._go_on(worker_group)
        elif is_saved and is_alone:
            self._remaining_restarts = 0  # this machine is being taken away
        self._context.close(signal.SIGTERM, self._grace_s)
        self.kill()
        self._leave_out_lost_process(worker_group)
        world_size, processes = worker_group.workers[0].world_size, worker_group.spec.local_world_size
        left = self._remaining_restarts
        self._attempts.show(Ended(self.failure, world_size, left, processes, goes_on))
        return RunResult(WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Ends the workers within our own time, since torch 2.11's agent has 30 s and no other."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self._grace_s)
        super()._shutdown(death_sig)

    def _pass_on_size(self, group: WorkerGroup) -> None:
        """Reads the size that is wanted, and asks workers that can save themselves to do so, each second
        until they have ended.
        """
        text, now = self._attempts.wanted.asked(), group.spec.local_world_size
        if text is not None:
            least, most = self._attempts.least, self._attempts.most
            size = whole_number(text)
            self._size = size if size is not None and least <= size <= most else None
            if self._size is None:
                self._attempts.say(
                    f"outsize: {text!r} processes are wanted, and {least} to {most} can be had"
                )
            elif self._size != now:
                many = "1 process is" if self._size == 1 else f"{self._size} processes are"
                self._attempts.say(
                    f"outsize: {many} wanted: the run goes on so once its script has called "
                    "engine.state.checkpoint"
                )
        if self._size == now:
            self._size = None
        if self._size is not None and time.monotonic() - self._signalled_s > SIGNAL_AGAIN_S:
            self._signalled_s = time.monotonic()
            for pid in self._context.pids().values():
                signal_where_caught(pid)

    def _go_on(self, group: WorkerGroup) -> None:
        """Makes the next attempt, which costs no restart, one of the size that is wanted here, if any is."""
        if self._size is not None:
            group.spec.local_world_size, self._size = self._size, None
        self._remaining_restarts += 1
        self._resized += not self._changes  # meetings.py counts attempts itself

    def _leave_out_lost_process(self, group: WorkerGroup) -> None:
        """Makes the next attempt smaller by one where a signal has killed a process here, down to `least`."""
        here = {worker.global_rank for worker in group.workers}
        if self.failure is not None and self.failure.exit_code < 0 and self.failure.rank in here:
            spec = group.spec
            spec.local_world_size = max(
                min(self._attempts.least, spec.local_world_size), spec.local_world_size - 1
            )

    def _environments(self, group: WorkerGroup) -> dict[int, dict[str, str]]:
        """Returns torchrun's variables of each worker, by local rank."""
        spec, handler = group.spec, group.spec.rdzv_handler
        same = {
            "GROUP_RANK": group.group_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": handler.use_agent_store,
        }
        return {
            worker.local_rank: {
                name: str(value)
                for name, value in {
                    **same,
                    "LOCAL_RANK": worker.local_rank,
                    "RANK": worker.global_rank,
                    "ROLE_RANK": worker.role_rank,
                    "WORLD_SIZE": worker.world_size,
                    "ROLE_WORLD_SIZE": worker.role_world_size,
                }.items()
            }
            for worker in group.workers
        }

    @property
    def _attempt(self) -> int:
        """Returns the number of the attempt, from 0."""
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, ChangingMeeting):
            return handler.attempt
        return self._worker_group.spec.max_restarts - self._remaining_restarts + self._resized

    @property
    def _changes(self) -> bool:
        """Tells whether machines come and go."""
        return isinstance(self._worker_group.spec.rdzv_handler, ChangingMeeting)

    def kill(self) -> None:
        """Kills every worker and its children at once; processes that are gone already are skipped."""
        if self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def exit_codes(self) -> list[int | None]:
        """Returns how each worker here has ended; None for one that runs."""
        context = self._pcontext
        handlers = context.subprocess_handlers if isinstance(context, SubprocessContext) else {}
        return [handler.proc.poll() for handler in handlers.values()]

    @property
    def _context(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def _failures(self, group: WorkerGroup) -> list[Failure]:
        """Returns the failures of the workers here that have failed, or are about to (they write a record
        first).
        """
        processes = ((rank, one.proc) for rank, one in self._context.subprocess_handlers.items())
        failures = (
            read_failure(
                Path(self._context.error_files[local_rank]),
                rank=group.workers[local_rank].global_rank,
                pid=process.pid,
                exit_code=process.poll(),
            )
            for local_rank, process in processes
        )
        return [failure for failure in failures if failure is not None]

    def _cause(self, group: WorkerGroup, first: Failure) -> Failure:
        """Returns the failure, or the absence of a rank here that it follows from.

        A rank leaves its connections before its process ends, so those that still run get a while.
        """
        deadline = time.monotonic() + (ABSENCE_S if first.is_consequence else 0.0)
        while time.monotonic() < deadline:
            processes = [(rank, one.proc) for rank, one in self._context.subprocess_handlers.items()]
            for local_rank, process in processes:
                if absence := _absence(process.poll(), process.pid):
                    return first.blamed_on(group.workers[local_rank].global_rank, process.pid, absence)
            if all(process.poll() is not None for _, process in processes):
                break
            time.sleep(POLL_S)
        return first

    def _publish(self, group: WorkerGroup) -> None:
        """Publishes the failure to the other machines, unless it may be a consequence, or elastic tries
        again.
        """
        causes = [failure for failure in self._failures(group) if not failure.is_consequence]
        if causes and self._remaining_restarts == 0 and (store := self._shared(group)) is not None:
            with contextlib.suppress(DistError):
                store.set(FAILED, first_failure(causes).to_json())

    def _publish_ended(self, group: WorkerGroup) -> None:
        """Publishes which workers have ended well without joining, so that nobody waits for them."""
        for local_rank, one in self._context.subprocess_handlers.items():
            if local_rank not in self._published_ended and one.proc.poll() == 0:
                self._published_ended.add(local_rank)
                with contextlib.suppress(DistError):
                    store = self._attempts.meeting or cast("Store", group.store)
                    ours = PrefixStore(f"{ATTEMPT}/{self._attempt}", store)
                    ours.set(f"{ENDED}/{group.workers[local_rank].global_rank}", "")

    def _published(self, group: WorkerGroup) -> Failure | None:
        """Returns the failure that another machine has published; a store that is gone went with the
        machine of rank 0.
        """
        store = self._shared(group)
        try:
            if store is not None and store.check([FAILED]):
                return Failure.from_json(store.get(FAILED))
        except DistError as error:
            return Failure.lost(f"{type(error).__name__}: Connection reset by peer")
        return None

    def _shared(self, group: WorkerGroup) -> Any:
        """Returns the store that the agents of several machines share; None on one machine."""
        if (group.group_world_size or 1) == 1:
            return None
        return sealed_store(group.store, self._attempts.secret)

    def _wait(self, timeout_s: float) -> None:
        deadline, processes = time.monotonic() + timeout_s, self._context.subprocess_handlers.values()
        while time.monotonic() < deadline and any(one.proc.poll() is None for one in processes):
            time.sleep(POLL_S)


def _absence(exit_code: int | None, pid: int) -> str:
    """Returns how a rank has left the others without an error; "" for one that has not."""
    if exit_code == 0:
        return "has ended, while others still trained"
    look = look_at(pid) if exit_code is None else None
    return "is stopped (SIGSTOP)" if look is not None and look.letter == "T" else ""


@final
class ForkedHandler(SubprocessHandler):
    """elastic's handle of one worker; the worker is a fork of the server."""

    def __init__(self, context: ForkedContext, rank: int) -> None:
        self._server = context.server
        super().__init__(
            str(context.entrypoint),
            context.args[rank],
            context.envs[rank],
            context.stdouts[rank] or None,
            context.stderrs[rank] or None,
            rank,
            None,
        )

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        outputs = [None if file is None else file.name for file in (self._stdout, self._stderr)]
        worker = self._server.start(args[WORKER_ARGUMENTS:], env, outputs)
        if worker is None:
            raise RuntimeError("the process that forks workers has died")
        return worker


@final
class ForkedContext(SubprocessContext):
    """elastic's workers of one attempt, as forks of the server."""

    server: ForkServer

    @classmethod
    def of(cls, group: WorkerGroup, environments: dict[int, dict[str, str]], logs: Logs) -> Self:
        """Returns the workers of the group, not yet started."""
        spec = group.spec
        prefixes = {
            worker.local_rank: Template(logs.prefix).safe_substitute(
                role_name=spec.role, rank=worker.global_rank, local_rank=worker.local_rank
            )
            for worker in group.workers
        }
        arguments = {rank: tuple(macros.substitute([*spec.args], str(rank))) for rank in sorted(environments)}
        return cls(spec.role, str(spec.entrypoint), arguments, environments, logs, prefixes)

    def _start(self) -> None:
        self.subprocess_handlers = {rank: ForkedHandler(self, rank) for rank in self.args}


@final
class Logs(DefaultLogsSpecs):
    """Shows rank 0's output as it is and the others' line by line, unless the user chose; adds to the
    environment.
    """

    def __init__(self, folder: str, args: Any, extra: Mapping[str, str], prefix: str) -> None:
        chosen = {int(rank) for rank in args.local_ranks_filter.split(",") if rank}
        redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
        super().__init__(folder, redirects, tee, chosen or None)
        self._user_chose = (args.redirects, args.tee) != ("0", "0")
        self._extra, self.prefix, self._attempt = extra, prefix, 0

    def begin_attempt(self, number: int) -> None:
        """Says which attempt the next workers are of, from 0."""
        self._attempt = number

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Returns where each local rank's output goes; adds to its environment."""
        for env in envs.values():
            env.update(self._extra, TORCHELASTIC_RESTART_COUNT=str(self._attempt))
        if not self._user_chose:
            self._tee = {rank: Std.NONE if env["RANK"] == "0" else Std.ALL for rank, env in envs.items()}
        return super().reify(envs)


@final
class Lines(io.TextIOBase):
    """Writes whole lines to a file descriptor at once; a reader that closed its end (`| head`) is ignored."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str, /) -> int:
        """Writes one line; a text without a line end gets one."""
        data = (text if text.endswith("\n") else f"{text}\n").encode(errors="backslashreplace")
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._fd, data) :]
        return len(text)


@contextlib.contextmanager
def lifeline(path: Path) -> Iterator[None]:
    """Creates a named pipe at `path` which only this process holds open for writing."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def catchable_signals(*, meets: bool) -> Iterator[str]:
    """Yields the names of the signals that the agent may catch, without ignored ones (nohup); restores
    handlers after.

    While machines meet, C++ code handles no signal for minutes; during that time a Ctrl-C ends the process at
    once.
    """
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
    handled = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {one: signal.getsignal(one) for one in handled}
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and meets and previous[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield ",".join(one.name for one, handler in previous.items() if handler is not signal.SIG_IGN)
    finally:
        for one, handler in previous.items() if in_main else ():
            signal.signal(one, handler or signal.SIG_DFL)  # None: C code installed it; it cannot be restored
