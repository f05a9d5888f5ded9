"""Samples the predicted bytes on each rank over a predicted step, for traces.

Weights, gradients and optimizer states exist throughout; a forward adds a microbatch's activations, and its
backward (or the W half of a split one) frees them. A stage's activations are scaled to its expected peak.
Where a stage is played in blocks, its last block's forward and its first block's backward count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from outsize.ir.plan import Expected, StageFigures
from outsize.ir.schedule import Action, Kind
from outsize.ir.timeline import Sample, Timeline

Change = tuple[float, int]


def with_memory_samples(timeline: Timeline, expected: Expected, stage_of: Sequence[int]) -> Timeline:
    """Returns the timeline with a sample at its start and at each end of a forward or backward;
    `stage_of[part]` are the stages that the parts of the timeline belong to.
    """
    actions = [(Action.parse(s.action), s) for s in timeline.spans if s.lane == "compute"]
    frees = Kind.W if any(a.kind is Kind.W for a, _ in actions) else Kind.B
    sign = {Kind.F: 1, frees: -1}
    # The last of these ends is that of the pass of the whole stage.
    passes: dict[tuple[int, int, Kind, int], float] = {}
    for action, span in actions:
        if action.kind in sign:
            key = span.rank, stage_of[action.stage], action.kind, action.microbatch
            passes[key] = max(span.end_s, passes.get(key, 0.0))
    ends: defaultdict[tuple[int, int], list[Change]] = defaultdict(list)
    for (rank, stage, kind, _), end_s in passes.items():
        ends[rank, stage].append((end_s, sign[kind]))
    samples: list[Sample] = []
    for rank in range(timeline.ranks):
        own = [stage for at, stage in ends if at == rank]
        lasting_bytes = sum(_lasting_bytes(expected.stages[stage]) for stage in own)
        changes = [c for stage in own for c in _bytes(sorted(ends[rank, stage]), expected.stages[stage])]
        alive = accumulate((size for _, size in sorted(changes)), initial=lasting_bytes)
        times = [0.0, *(time_s for time_s, _ in sorted(changes))]
        samples += [Sample(rank=rank, time_s=t, alive_bytes=b) for t, b in zip(times, alive, strict=True)]
    return timeline.model_copy(update={"samples": tuple(samples)})


def _lasting_bytes(figures: StageFigures) -> int:
    return figures.weights_bytes + figures.gradients_bytes + figures.optimizer_bytes


def _bytes(ends: list[Change], figures: StageFigures) -> Iterator[Change]:
    """Converts changes of the microbatch count to bytes: the largest count has all the expected
    activations.
    """
    peak_count = max(accumulate(count for _, count in ends), default=1)
    return ((time_s, count * (figures.activations_bytes // max(1, peak_count))) for time_s, count in ends)
