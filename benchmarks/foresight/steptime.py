"""Step times: calibrate each site on a few of its runs, predict the others; errors, regrets of choices."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from runs import Run

from outsize.planner.calibrate import Vector, fit, medoids
from outsize.planner.transformer_step import Multipliers, step_s

NAMES = tuple(Multipliers.model_fields)
# Where a system is believed to be before a run of the site is seen: tune.py, on one half of the rows.
# Times of Megatron-DeepSpeed on one node are those of a step that recomputes nothing, whatever its label.
PRIORS = {
    "megatron": Multipliers(
        matmul=1.16,
        memory=0.888,
        wide_matmul=0.461,
        kernel_s=1.89e-05,
        host_s=4.25e-05,
        inner=0.987,
        outer=1.05,
        some=1.85,
        skew_s=9.65e-06,
        exposed=0.082,
        optimizer=0.976,
        fixed_s=0.00527,
    ),
    "megatron 2022": Multipliers(
        matmul=1.03,
        memory=1.06,
        wide_matmul=1,
        kernel_s=1.01e-05,
        host_s=5.02e-05,
        inner=1.08,
        outer=1,
        skew_s=1e-05,
        exposed=0.1,
        optimizer=0.996,
        fixed_s=0.00498,
    ),
    "deepspeed, one node": Multipliers(
        matmul=1.09,
        memory=0.794,
        wide_matmul=2.7,
        kernel_s=3.3e-05,
        host_s=8.28e-05,
        inner=1.16,
        outer=1,
        skew_s=0.000287,
        exposed=0.144,
        optimizer=0.941,
        fixed_s=0.00141,
    ),
}
SPREAD = 0.1  # how far, as a logarithm, a site may well be from that
NOISE = 0.1  # of a row: few rows with errors of their own must not outweigh what many said before


@dataclass(frozen=True)
class Timed:
    """A run, its predicted seconds, and whether calibration saw it."""

    run: Run
    predicted: float
    seen: bool

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted / self.run.seconds - 1)


def time_all(runs: Sequence[Run], calibrate: int, priors: Mapping[str, Multipliers] = PRIORS) -> list[Timed]:
    """Every run predicted, after a look at no more than `calibrate` of them."""
    sites: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        sites[run.site].append(run)
    shares = apportion([len(site) for site in sites.values()], calibrate)
    return [t for site, share in zip(sites.values(), shares, strict=True) for t in _site(site, share, priors)]


def apportion(sizes: Sequence[int], total: int) -> list[int]:
    """Rows to look at in each site: by the logarithm of its size (d'Hondt), at most half of it."""
    shares = [0] * len(sizes)
    for _ in range(total):
        quotients = [
            math.log(1 + n) / (share + 1) if share < n // 2 else 0.0
            for n, share in zip(sizes, shares, strict=True)
        ]
        if not any(quotients):
            break
        shares[quotients.index(max(quotients))] += 1
    return shares


def mape(timed: Iterable[Timed]) -> float | None:
    """Mean absolute error of the runs that calibration did not see."""
    errors = [t.error for t in timed if not t.seen]
    return statistics.fmean(errors) if errors else None


def regrets(timed: Iterable[Timed]) -> list[float]:
    """Measured time of the plan ranked first over the best measured, per group with a choice."""
    groups: defaultdict[tuple[str, ...], list[Timed]] = defaultdict(list)
    for t in timed:
        groups[t.run.group].append(t)
    return [_regret(group) for group in groups.values() if len(group) > 1]


def _regret(group: Sequence[Timed]) -> float:
    chosen = min(group, key=lambda t: t.predicted)
    return chosen.run.seconds / min(t.run.seconds for t in group)


def _site(runs: Sequence[Run], calibrate: int, priors: Mapping[str, Multipliers]) -> list[Timed]:
    """The runs of one site, predicted after a fit on the few that stand best for all."""
    seen = set(medoids(np.log([_features(run) for run in runs]), calibrate))
    by, read_as = calibrated([runs[i] for i in sorted(seen)], runs, priors[kind(runs[0])])
    return [
        Timed(run, predict([run], by, read_as, simulated=True)[0], i in seen) for i, run in enumerate(runs)
    ]


def calibrated(few: Sequence[Run], runs: Sequence[Run], believed: Multipliers) -> tuple[Vector, bool]:
    """Multipliers fitted on `few` runs, and whether the label of recompute is to be believed.

    Where it is not from the measurement itself but from files beside it, the rows decide; without rows it is
    read as the prior was tuned.
    """
    prior = _vector(believed)
    spread = np.full(len(NAMES), SPREAD)
    measured = np.array([run.seconds for run in few])
    tuned = kind(runs[0]) != "deepspeed, one node"
    readings = (True,) if all(run.recompute_certain for run in runs) else (tuned, not tuned)
    fits = {
        reading: fit(lambda x, r=reading: predict(few, x, r), measured, prior, spread, NOISE)
        for reading in readings
    }
    best = min(fits, key=lambda reading: fits[reading].cost)
    return fits[best].multipliers, best


def kind(run: Run) -> str:
    """The prior that holds for a run."""
    if "DeepSpeed" in run.system and run.nodes == 1:
        return "deepspeed, one node"
    return "megatron 2022" if "2022" in run.system else "megatron"


def predict(runs: Sequence[Run], by: Vector, as_labelled: bool = True, simulated: bool = False) -> Vector:
    """Seconds of each run."""
    multipliers = Multipliers(**dict(zip(NAMES, map(float, by), strict=True)))
    read = (run if as_labelled or run.recompute_certain else run.with_recompute("none") for run in runs)
    return np.array([step_s(run.job, run.cluster, multipliers, simulated) for run in read])


def _vector(multipliers: Multipliers) -> Vector:
    return np.array([getattr(multipliers, name) for name in NAMES])


def _features(run: Run) -> tuple[int, ...]:
    job = run.job
    sizes = (job.model.layers, job.model.hidden, job.sharding.microbatch, job.microbatches)
    return (*sizes, job.sharding.tp, job.pp, job.dp)
