"""Predicted bytes alive on each rank over a predicted step: what the plan expects, laid out in time.

Weights, gradients and optimizer are always there; a forward adds a microbatch's activations, its backward (or
the weights' half of a split one) frees them. A stage's expected activations are those of its fullest moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from outsize.ir.plan import Expected, StageFigures
from outsize.ir.schedule import Action, Kind
from outsize.ir.timeline import Sample, Timeline

Change = tuple[float, int]


def with_memory(timeline: Timeline, expected: Expected) -> Timeline:
    """The timeline with a sample at its start and at each end of a forward or backward."""
    actions = [(Action.parse(s.action), s) for s in timeline.spans if s.lane == "compute"]
    frees = Kind.W if any(a.kind is Kind.W for a, _ in actions) else Kind.B
    sign = {Kind.F: 1, frees: -1}
    ends: defaultdict[tuple[int, int], list[Change]] = defaultdict(list)
    for action, span in actions:
        if action.kind in sign:
            ends[span.rank, action.stage].append((span.end_s, sign[action.kind]))
    samples: list[Sample] = []
    for rank in range(timeline.ranks):
        own = [stage for at, stage in ends if at == rank]
        always = sum(_always(expected.stages[stage]) for stage in own)
        changes = [c for stage in own for c in _bytes(sorted(ends[rank, stage]), expected.stages[stage])]
        alive = accumulate((size for _, size in sorted(changes)), initial=always)
        times = [0.0, *(time_s for time_s, _ in sorted(changes))]
        samples += [Sample(rank=rank, time_s=t, alive_bytes=b) for t, b in zip(times, alive, strict=True)]
    return timeline.model_copy(update={"samples": tuple(samples)})


def _always(figures: StageFigures) -> int:
    return figures.weights_bytes + figures.gradients_bytes + figures.optimizer_bytes


def _bytes(ends: list[Change], figures: StageFigures) -> Iterator[Change]:
    """Counts of microbatches as bytes: at the most of them, all the activations that were expected."""
    most = max(accumulate(count for _, count in ends), default=1)
    return ((time_s, count * (figures.activations_bytes // max(1, most))) for time_s, count in ends)
