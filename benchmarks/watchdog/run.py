"""What does the watchdog cost? The calls of a step on the main thread, and the CPU time of its thread.

`python benchmarks/watchdog/run.py`: microseconds of one process, over a TCP store of this machine.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from outsize.ops.watchdog.options import WatchOptions
from outsize.ops.watchdog.watcher import Watchdog, WatchedRun
from outsize.run.progress import Progress

STEPS, BEATS = 100_000, 2_000


def main() -> None:
    """Prints the two figures."""
    progress = Progress()
    begin_s = time.thread_time()
    for step in range(STEPS):
        progress.begin("step", step)
        progress.end()
    step_us = (time.thread_time() - begin_s) / STEPS * 1e6
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    run = WatchedRun(PrefixStore("watchdog", store).clone(), 0, 2, print, print)
    watcher = Watchdog(progress, run, WatchOptions())
    begin_s = time.thread_time()
    for step in range(BEATS):
        progress.begin("step", step)  # Something has moved, so every beat writes a card.
        watcher.beat(progress)
        progress.end()
    beat_us = (time.thread_time() - begin_s) / BEATS * 1e6
    print(f"{step_us:.1f} us a step on the main thread; {beat_us:.0f} us a second on the watchdog's thread")
    print(f"of steps of 50 ms: {100 * (step_us / 50e3 + beat_us / 1e6):.4f} %")


if __name__ == "__main__":
    main()
