"""Runs a loop of the judge on several ranks, each a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.bench import Bench, SplitBench, noted
from split.loops import Loop


def on_ranks(folder: Path, bench_of: Callable[[], SplitBench], ranks: int, each: Loop) -> list[Bench]:
    """What each rank has noted; `bench_of()` makes the bench of one."""

    def work() -> None:
        world = join()
        torch.set_num_threads(1)
        bench = noted(each.run, bench_of())
        torch.save((bench.notes, bench.refused), folder / f"{world.rank}.pt")
        leave(world)

    run_in_forks(ranks, work)
    found = list[Bench]()
    for rank in range(ranks):
        notes, refused = torch.load(folder / f"{rank}.pt")
        found.append(replace(bench_of(), notes=notes, refused=refused))
    return found
