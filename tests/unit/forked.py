"""Several ranks for a unit test: forks of this process that meet over gloo through a file."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outsize.train.rendezvous import loopback_interface

PATIENCE_S = 60


def on_ranks(folder: Path, count: int, work: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """`work(group)` on every rank; their results, or the first traceback."""
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_rank, args=(folder, r, count, work), daemon=True) for r in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE_S)
    if any(process.is_alive() for process in started):
        for process in started:
            process.kill()
        raise AssertionError(f"ranks still wait for each other after {PATIENCE_S} s:\n{_said(folder)}")
    assert all(process.exitcode == 0 for process in started), _said(folder)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(count)]


def _said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("rank*.txt")))


def _rank(folder: Path, rank: int, count: int, work: Callable[[dist.ProcessGroup], Any]) -> None:
    import os

    try:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
        torch.set_num_threads(1)
        meeting = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
        assert dist.group.WORLD is not None
        torch.save(work(dist.group.WORLD), folder / f"rank{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
