"""One pinned rank of one case: every system in the same two processes, in turns.

torch   torch.distributed.pipelining, 1F1B on hand-cut halves of ResNet-50 (the tutorial's cut), by split size
forum   equal parameter counts per device, run by outsize: 1F1B by microbatches, and naive
ours    what `outsize.tune` finds here, before anything else is measured

Rank 0 writes one JSON: seconds of each lap, forward and backward, between two barriers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cases import CASES
from systems import engine_system, forum_systems, in_turns, joined, torch_system

import outsize
from outsize.train.world.world import leave


def main() -> None:
    """Rounds of all systems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--against", choices=("torch", "forum"), required=True)
    parser.add_argument("--microbatches", required=True, help="of the systems that it is against, as 2,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    world = joined()
    case = CASES[options.case]()
    counts = [int(m) for m in options.microbatches.split(",")]
    tuned = outsize.tune(case.model, case.args, case.kwargs, **case.example)
    systems = {"outsize": engine_system(case, tuned.plan)}
    if options.against == "torch":
        systems |= {f"torch 1f1b {m}": torch_system(case, m, world.rank) for m in counts}
    else:
        systems |= forum_systems(case, counts)
    laps = in_turns(systems, options.rounds)
    if world.rank == 0:
        options.out.write_text(json.dumps({"laps_s": laps, "tuned": tuned.document()}))
    leave(world)


if __name__ == "__main__":
    main()
