"""Where steptime.PRIORS are from: a fit on one half of the published rows.

python benchmarks/foresight/tune.py --runs CSV
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import runs
import steptime
from calibrate import Fit, fit
from transformer_step import Multipliers

TUNED_HALF = 0
NEUTRAL = Multipliers(kernel_s=2e-6, host_s=5e-5, inner=1.1, skew_s=1e-5, exposed=0.1, fixed_s=0.005)
WIDE = ("kernel_s", "host_s", "fixed_s", "wide_matmul", "skew_s", "exposed", "some")
SPREAD = 0.3
ROUNDS = 100


def tune(rows: Sequence[runs.Run]) -> Fit:
    """Multipliers of all these rows together, from a wide prior."""
    measured = np.array([row.seconds for row in rows])
    prior = np.array([getattr(NEUTRAL, name) for name in steptime.NAMES])
    spread = np.array([1.0 if name in WIDE else SPREAD for name in steptime.NAMES])
    return fit(lambda x: steptime.predict(rows, x), measured, prior, spread, rounds=ROUNDS)


def described(rows: Sequence[runs.Run]) -> str:
    """What `tune` finds, and how well it does."""
    found, measured = tune(rows), np.array([row.seconds for row in rows])
    errors = np.abs(steptime.predict(rows, found.multipliers) / measured - 1)
    values = ", ".join(f"{n}={v:.3g}" for n, v in zip(steptime.NAMES, found.multipliers, strict=True))
    return f"{len(rows)} rows, cost {found.cost:.0f}, mean error {errors.mean():.4f}: {values}"


def main() -> None:
    """Each prior; where the label of recompute is not certain, under both readings of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    found, _ = runs.read_all(parser.parse_args().runs)
    for kind in steptime.PRIORS:
        rows = [run for run in found if run.half == TUNED_HALF and steptime.kind(run) == kind]
        read = [steptime.as_tuned(run) for run in rows]
        for name, reading in {"as labelled": rows, "as read": read}.items():
            if reading is rows or read != rows:
                print(f"{kind}, {name}: {described(reading)}")


if __name__ == "__main__":
    main()
