"""Several ranks for a unit test: forks of this process that meet over gloo through a file."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_python import preload, reset_malloc
from patience import WHOLE_S

from outsize.train.world.rendezvous import loopback_interface


def on_ranks(folder: Path, count: int, work: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """`work(group)` on every rank; their results, or the first traceback."""

    def rank(number: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
        meeting = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=count)
        assert dist.group.WORLD is not None
        torch.save(work(dist.group.WORLD), folder / f"rank{number}.pt")
        dist.destroy_process_group()

    in_forks(folder, count, rank)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(count)]


def in_forks(folder: Path, count: int, work: Callable[[int], None], patience_s: float = WHOLE_S) -> None:
    """`work(rank)` in so many forks, a thread each; when one fails the others are ended, and it is told.

    What is written to a fork's stderr, by C++ too, is part of that, and goes to this process's otherwise.
    """
    preload()
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_rank, args=(folder, r, work), daemon=True) for r in range(count)]
    for process in started:
        process.start()
    deadline = time.monotonic() + patience_s
    while waiting := [process for process in started if process.exitcode is None]:
        if time.monotonic() > deadline or any(process.exitcode for process in started):
            break
        wait([process.sentinel for process in waiting], deadline - time.monotonic())
    for process in waiting:
        process.kill()
    codes = [process.exitcode for process in started]
    written = [folder / f"rank{rank}.stderr" for rank in range(count)]
    texts = [path.read_text(errors="backslashreplace") for path in written if path.exists()]
    for path in written:
        path.unlink(missing_ok=True)
    said = "\n".join([*(path.read_text() for path in sorted(folder.glob("rank*.txt"))), *texts])
    failed = waiting or any(codes)
    assert not failed, f"ranks have ended with {codes}; None still waited for others\n{said}"
    os.write(2, "".join(texts).encode())


def _rank(folder: Path, rank: int, work: Callable[[int], None]) -> None:
    try:
        gc.freeze()  # what the parent has is not looked through, and not copied, again and again
        reset_malloc()
        torch.set_num_threads(1)
        os.dup2(os.open(folder / f"rank{rank}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        work(rank)
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
