"""Step times: predict all runs, look at the few that decide most, correct; errors, regrets of choices."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from calibrate import Vector
from kriging import covariance, krige
from runs import Run
from transformer_step import Multipliers, step_s

NAMES = tuple(Multipliers.model_fields)
ONE_NODE = "deepspeed, one node"
# Where a system is believed to be before a run of the site is seen: tune.py, on one half of the rows.
# Times of Megatron-DeepSpeed on one node are those of a step that recomputes nothing, whatever its label.
PRIORS = {
    "megatron": Multipliers(
        matmul=1.092,
        memory=0.888,
        wide_matmul=0.461,
        kernel_s=1.09e-05,
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
        matmul=0.969,
        memory=1.06,
        wide_matmul=1,
        kernel_s=2.1e-06,
        host_s=5.02e-05,
        inner=1.08,
        outer=1,
        skew_s=1e-05,
        exposed=0.1,
        optimizer=0.996,
        fixed_s=0.00498,
    ),
    ONE_NODE: Multipliers(
        matmul=1.026,
        memory=0.783,
        wide_matmul=2.75,
        kernel_s=2.5e-05,
        host_s=8.27e-05,
        inner=1.22,
        outer=1,
        skew_s=8.95e-05,
        exposed=0.147,
        optimizer=0.912,
        fixed_s=0.00142,
    ),
}
# How far predictions are off, by the likelihood of the tuned half: standard deviations of logarithms, and by
# how many doublings of a dimension errors of one kind of layer, or of one layout of layers, are still alike.
DOUBT_ALONE, DOUBT_TP, NOISE = 0.04, 0.1, 0.01
LAYER, LAYOUT = 0.5, 60.0
LENGTHS = (LAYER, LAYER, LAYER, LAYOUT, LAYOUT, LAYOUT, LAYOUT)


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
    """Every run predicted, after a look at no more than `calibrate` of them, and at most at half."""
    read = [(as_tuned(run), _vector(priors[kind(run)])) for run in runs]
    believed = np.log([predict([run], prior, simulated=True)[0] for run, prior in read])
    count = min(calibrate, len(runs) // 2)
    told, seen = krige(
        believed, doubt(runs), choices(runs), lambda i: math.log(runs[i].seconds), count, NOISE
    )
    return [Timed(run, math.exp(told[i]), i in seen) for i, run in enumerate(runs)]


def doubt(runs: Sequence[Run]) -> Vector:
    """Covariance of the logarithms of the errors: of runs alike, at one site; [runs, runs]."""
    points = np.log2([_features(run) for run in runs]).reshape(-1, len(LENGTHS))
    spread = np.array([DOUBT_TP if run.job.sharding.tp > 1 else DOUBT_ALONE for run in runs])
    sites = [run.site for run in runs]
    together = np.array([[a == b for b in sites] for a in sites]).reshape(len(runs), len(runs))
    return together * covariance(points, LENGTHS, spread)


def choices(runs: Sequence[Run]) -> list[list[int]]:
    """Places of the runs between which there is a choice."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        groups[run.group].append(i)
    return [group for group in groups.values() if len(group) > 1]


def mape(timed: Iterable[Timed]) -> float | None:
    """Mean absolute error of the runs that calibration did not see."""
    errors = [t.error for t in timed if not t.seen]
    return statistics.fmean(errors) if errors else None


def regrets(timed: Sequence[Timed]) -> list[float]:
    """Measured time of the plan ranked first over the best measured, per group with a choice."""
    return [_regret([timed[i] for i in group]) for group in choices([t.run for t in timed])]


def _regret(group: Sequence[Timed]) -> float:
    chosen = min(group, key=lambda t: t.predicted)
    return chosen.run.seconds / min(t.run.seconds for t in group)


def kind(run: Run) -> str:
    """The prior that holds for a run."""
    if "DeepSpeed" in run.system and run.nodes == 1:
        return ONE_NODE
    return "megatron 2022" if "2022" in run.system else "megatron"


def as_tuned(run: Run) -> Run:
    """The run as its prior reads it, where its label of recompute is not from the measurement itself."""
    return run if run.recompute_certain or kind(run) != ONE_NODE else run.with_recompute("none")


def predict(runs: Sequence[Run], by: Vector, simulated: bool = False) -> Vector:
    """Seconds of each run."""
    multipliers = Multipliers(**dict(zip(NAMES, map(float, by), strict=True)))
    return np.array([step_s(run.job, run.cluster, multipliers, simulated) for run in runs])


def _vector(multipliers: Multipliers) -> Vector:
    return np.array([getattr(multipliers, name) for name in NAMES])


def _features(run: Run) -> tuple[int, ...]:
    """What makes a layer's time, then how often and where it runs."""
    job = run.job
    layer = (job.model.hidden, job.sharding.tp, job.sharding.microbatch)
    return (*layer, job.model.layers, job.pp, job.dp, job.microbatches)
