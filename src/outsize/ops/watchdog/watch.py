"""A callback that watches each rank: its connection to the store, where it speaks, how it ends the process.

`outsize run` shows the error that the rank records, and who has forked ranks raises it; under any other
launcher the rank says it itself. The process ends without waiting for its main thread, which hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch.distributed as dist

from outsize.errors import RunHung
from outsize.ops.watchdog.options import ON_HANG, OnHang, WatchOptions
from outsize.ops.watchdog.watcher import Watchdog, WatchedRun
from outsize.run.progress import Progress
from outsize.run.transport.run_secret import sealed_store
from outsize.train.context.callback import Callback, StartFacts
from outsize.train.world.failure import shown, write_failure
from outsize.train.world.join import error_file, run_secret
from outsize.train.world.rendezvous import STORE
from outsize.train.world.world import World

STDERR: Final = 2
_TOGETHER_S: Final = 0.2  # Until then every rank has read the verdict.
_CONNECT_S: Final = 30.0  # A store that does not answer by then has ended with rank 0.


@final
class WatchRanks(Callback):
    """Watches each rank of a run from its start on, by what is given and the launcher's options for the rest.

    Raises BadOption.
    """

    every = 0

    def __init__(
        self, timeout_s: float | None = None, on_hang: OnHang | None = None, verify: int | None = None
    ) -> None:
        self._given = timeout_s, on_hang, verify
        # What makes no sense is refused before the run starts.
        self.options = WatchOptions.given(*self._given, {})

    def on_start(self, facts: StartFacts) -> None:
        """Starts the watchdog of this rank."""
        self.options = WatchOptions.given(*self._given, facts.world.variables)
        _watch(facts.progress, facts.world, self.options)


def _watch(progress: Progress, world: World, options: WatchOptions) -> None:
    """Watches this rank from now on; a run of one process has nobody to wait for."""
    if world.group is None or world.world_size == 1 or not options.timeout_s:
        return
    store = _own_connection()
    if store is None:
        return
    run = WatchedRun(
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        say=_say,
        end=partial(_end, is_supervised=_is_supervised(world)),
    )
    watcher = Watchdog(progress, run, options)
    progress.watched_by(watcher.absent)
    watcher.start()
    atexit.register(watcher.stop)


def _is_supervised(world: World) -> bool:
    """Tells whether whoever has started this rank shows the error that it records: our launcher, or the
    process whose fork it is.
    """
    return ON_HANG in world.variables or (STORE in world.variables and error_file() is not None)


def _own_connection() -> Any:
    """Returns another connection to the default group's store; None where there is no store (MPI), or none
    any more: rank 0 has failed meanwhile, and this rank finds out why itself, and not after half an hour.
    """
    try:
        run: Any = dist.distributed_c10d
        shared = run.PrefixStore("outsize/watchdog", run._get_default_store())
        before = shared.timeout
        shared.set_timeout(min(before, timedelta(seconds=_CONNECT_S)))
        try:
            own = shared.clone()
        finally:
            shared.set_timeout(before)
        own.set_timeout(before)
        return sealed_store(own, run_secret())
    except (RuntimeError, ValueError):
        return None


def _say(text: str) -> None:
    os.write(STDERR, f"{text}\n".encode(errors="backslashreplace"))


def _end(error: RunHung | None, *, is_supervised: bool) -> None:
    """Ends this process, at the same moment as the others: no main thread sees a connection break."""
    end_s, status, record = time.monotonic() + _TOGETHER_S, RunHung.exit_code, error_file()
    if error is not None and record is not None:
        write_failure(record, error, status)
    if error is not None and not is_supervised:
        _say(shown(error))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    time.sleep(max(0.0, end_s - time.monotonic()))
    os._exit(status)
