"""Question: how much do the figures owe to which half the priors were tuned on?

    python benchmarks/foresight/sensitivity.py --runs CSV [--splits 4]

Each split halves the groups of choices anew, tunes the priors on one half and predicts the other as if it
were a file of its own, calibrated on 10 of its rows. The formulas are the same in all splits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import runs
import steptime
import tune
from transformer_step import Multipliers

CALIBRATE = 10


def figures_of(found: Sequence[runs.Run], salt: str) -> tuple[float, ...]:
    """MAPE on one node, on many; regret, mean and worst, of the half that was not tuned on."""
    half = {run.group: runs.half_of(run.group, salt) for run in found}
    priors = {kind: _prior([r for r in found if not half[r.group]], kind) for kind in steptime.PRIORS}
    timed = steptime.time_all([r for r in found if half[r.group]], CALIBRATE, priors)
    vtrain, regrets = [t for t in timed if t.run.vtrain], steptime.regrets(timed)
    single = steptime.mape(t for t in vtrain if t.run.nodes == 1)
    multi = steptime.mape(t for t in vtrain if t.run.nodes > 1)
    none = float("nan")
    return single or none, multi or none, statistics.fmean(regrets), max(regrets)


def _prior(rows: Sequence[runs.Run], kind: str) -> Multipliers:
    """Tuned on the rows of a kind, where there are any."""
    of_kind = [steptime.as_tuned(run) for run in rows if steptime.kind(run) == kind]
    if not of_kind:
        return tune.NEUTRAL
    found = tune.tune(of_kind)
    return Multipliers(**dict(zip(steptime.NAMES, map(float, found.multipliers), strict=True)))


def main() -> None:
    """One line for each split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=4)
    options = parser.parse_args()
    found, _ = runs.read_all(options.runs)
    print("split  single   multi  regret   worst")
    for split in range(options.splits):
        print(f"{split:5}" + "".join(f"{x:8.4f}" for x in figures_of(found, str(split))), flush=True)


if __name__ == "__main__":
    main()
