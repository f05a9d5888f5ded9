"""torch's elastic agent with our manners: one traceback, a short grace time, nothing left behind.

torch.distributed.elastic starts the workers, restarts them, meets other machines. On its public extension
points (`_monitor_workers` of the agent, `LogsSpecs.reify`, `RendezvousHandler`) this adds:
- the rank that failed first is told from those that only lost their connection to it (failure.py), also when
  it ran on another machine: an agent leaves its failure in the store that the agents share;
- `grace_s` instead of 30 s between the signal and the kill, and the kill reaches each worker's children;
- rank 0 has the terminal, the lines of the others are prefixed with `[rank] ` (elastic's tee);
- on one machine the agents' store listens on the loopback interface alone;
- a pipe whose write end only this process has: at its end of file a worker knows that its launcher is gone.

Restarts and changing node counts are elastic's, unchanged; what ended an attempt is shown when it ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, final

from torch.distributed import DistError, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from outsize.train.failure import Failure, first_failure, read_failure
from outsize.train.rendezvous import ENDED, LOOPBACK, loopback_store

SETTLE_S, POLL_S = 0.3, 0.05
STORE_S = 300.0
STDOUT, STDERR = 1, 2
FAILED = "outsize/failed"


@final
class Agent(LocalElasticAgent):
    """Runs one machine's workers; `failure` is what ended the last attempt, of any machine.

    `ended(failure, world_size, restarts left)` is called at the end of each attempt that failed.
    """

    def __init__(
        self, spec: WorkerSpec, logs: Logs, grace_s: int, ended: Callable[[Failure, int, int], None]
    ) -> None:
        super().__init__(
            spec, logs, shutdown_timeout=grace_s, log_line_prefix_template=logs.prefix, start_method="spawn"
        )
        self._grace_s, self._ended = grace_s, ended
        self.failure: Failure | None = None
        self._said_ended: set[int] = set()

    # torch's own are decorated by a function without types
    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        self.failure, self._said_ended = None, set()
        with contextlib.redirect_stdout(Lines(STDOUT)), contextlib.redirect_stderr(Lines(STDERR)):
            return cast("Any", super())._start_workers(worker_group)  # whose tee writes to what stdout is now

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> RunResult:
        told = self._told(worker_group)
        if told is None and not self._failures(worker_group):
            self._tell_ended(worker_group)
            result: RunResult = cast("Any", super())._monitor_workers(worker_group)
            if not result.is_failed():  # else one has failed between the two looks
                return result
        self._tell(worker_group)
        self._wait(SETTLE_S)  # the other ranks' failures arrive, so that the first can be told from them
        found = [*self._failures(worker_group), *filter(None, [told or self._told(worker_group)])]
        self.failure = first_failure(found)
        if told is not None:
            self._remaining_restarts = 0  # there the last attempt has ended
        self._context.close(signal.SIGTERM, self._grace_s)
        self.kill()
        self._ended(self.failure, worker_group.workers[0].world_size, self._remaining_restarts)
        return RunResult(WorkerState.FAILED)

    def kill(self) -> None:
        """End every worker and its children at once; those that are gone do no harm."""
        if self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    @property
    def _context(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def _failures(self, group: WorkerGroup) -> list[Failure]:
        """Of the workers here that have ended badly, or are about to (a record is written before)."""
        ended = ((rank, one.proc) for rank, one in self._context.subprocess_handlers.items())
        found = (
            read_failure(
                Path(self._context.error_files[local_rank]),
                rank=group.workers[local_rank].global_rank,
                pid=process.pid,
                exit_code=process.poll(),
            )
            for local_rank, process in ended
        )
        return [failure for failure in found if failure is not None]

    def _tell(self, group: WorkerGroup) -> None:
        """Let the other machines know, unless this may be a consequence, or elastic tries again."""
        causes = [failure for failure in self._failures(group) if not failure.is_consequence]
        if causes and self._remaining_restarts == 0 and (store := _shared(group)) is not None:
            with contextlib.suppress(DistError):
                store.set(FAILED, first_failure(causes).to_json())

    def _tell_ended(self, group: WorkerGroup) -> None:
        """Nobody need wait for a process that has ended well without joining."""
        for local_rank, one in self._context.subprocess_handlers.items():
            if local_rank not in self._said_ended and one.proc.poll() == 0:
                self._said_ended.add(local_rank)
                with contextlib.suppress(DistError):
                    cast("Store", group.store).set(f"{ENDED}/{group.workers[local_rank].global_rank}", "")

    def _told(self, group: WorkerGroup) -> Failure | None:
        """What another machine has let us know; a store that is gone went with the machine of rank 0."""
        store = _shared(group)
        try:
            if store is not None and store.check([FAILED]):
                return Failure.from_json(store.get(FAILED))
        except DistError as error:
            return Failure.lost(f"{type(error).__name__}: Connection reset by peer")
        return None

    def _wait(self, timeout_s: float) -> None:
        deadline, processes = time.monotonic() + timeout_s, self._context.subprocess_handlers.values()
        while time.monotonic() < deadline and any(one.proc.poll() is None for one in processes):
            time.sleep(POLL_S)


def _shared(group: WorkerGroup) -> Store | None:
    """What the agents of several machines share."""
    return cast("Store", group.store) if (group.group_world_size or 1) > 1 else None


@final
class Logs(DefaultLogsSpecs):
    """Rank 0 as it is, the others teed line by line, unless the user has said; more environment for all."""

    def __init__(self, folder: str, args: Any, extra: Mapping[str, str], prefix: str) -> None:
        chosen = {int(rank) for rank in args.local_ranks_filter.split(",") if rank}
        redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
        super().__init__(folder, redirects, tee, chosen or None)
        self._said = (args.redirects, args.tee) != ("0", "0")
        self._extra, self.prefix = extra, prefix

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where each local rank's output goes; adds to its environment."""
        for env in envs.values():
            env.update(self._extra)
        if not self._said:
            self._tee = {rank: Std.NONE if env["RANK"] == "0" else Std.ALL for rank, env in envs.items()}
        return super().reify(envs)


@final
class Lines(io.TextIOBase):
    """Writes whole lines to a file descriptor at once; a reader that went away (`| head`) stops nobody."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str, /) -> int:
        """One line, or the last one's beginning, which gets its end."""
        data = (text if text.endswith("\n") else f"{text}\n").encode(errors="backslashreplace")
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._fd, data) :]
        return len(text)


@final
class Loopback(RendezvousHandler):
    """One machine alone: each attempt has a store of its own, on the loopback interface."""

    def __init__(self, port: int) -> None:
        self._port = port

    def next_rendezvous(self) -> RendezvousInfo:
        """The only agent is the first of one."""
        store = loopback_store(self._port, STORE_S)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    @property
    def use_agent_store(self) -> bool:
        """The workers meet in the agent's store."""
        return True

    def get_backend(self) -> str:
        """Its name in torch's events."""
        return "loopback"

    def get_run_id(self) -> str:
        """What workers see as TORCHELASTIC_RUN_ID."""
        return "outsize"

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """None."""
        return 0

    def shutdown(self) -> bool:
        """The stores go with the process."""
        return True


@contextlib.contextmanager
def lifeline(path: Path) -> Iterator[None]:
    """A named pipe at `path` which this process alone holds open for writing."""
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    try:
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def signals_kept(*, meets: bool) -> Iterator[str]:
    """Names of the signals that the agent may catch: a nohup stays one. Afterwards they are as before.

    While machines meet, in C++ that looks at no signal for minutes, a Ctrl-C ends the process at once.
    """
    usual = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {one: signal.getsignal(one) for one in usual}
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and meets and before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield ",".join(one.name for one, handler in before.items() if handler is not signal.SIG_IGN)
    finally:
        for one, handler in before.items() if in_main else ():
            signal.signal(one, handler or signal.SIG_DFL)  # None: installed by C, not to be had back
