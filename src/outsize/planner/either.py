"""Of a pipeline and a mesh of other axes, which is taken, and what the plan says of the one that is not."""

from __future__ import annotations

from typing import Final

from outsize.errors import OutsizeError
from outsize.ir.plan import Alternative, Expected, Plan
from outsize.ir.text import percent_text, seconds_text
from outsize.planner.reasons import axes_text, microbatches_text
from outsize.planner.rivals import ALTERNATIVES, CLOSE

# What a person reads of it.
BITS: Final = "and that gives one device's bits"


def faster(row: Plan, mesh: Plan) -> Plan:
    """The mesh where its step is shorter by more than a prediction can tell; with the other beside it."""
    assert row.expected is not None
    assert mesh.expected is not None
    taken = CLOSE * mesh.expected.step_s < row.expected.step_s
    best, other = (mesh, row) if taken else (row, mesh)
    assert best.expected is not None
    beside = sorted((as_alternative(other), *best.alternatives[: ALTERNATIVES - 1]), key=lambda a: a.step_s)
    # The mesh's floor is that of pipelines, too.
    gap = best.expected.gap if taken else _gap(row.expected, mesh.expected)
    return best.model_copy(
        update={
            "expected": best.expected.model_copy(update={"gap": gap}),
            "alternatives": tuple(beside),
            "why": (*best.why, _compared(best.expected, other)),
        }
    )


def _gap(best: Expected, other: Expected) -> float | None:
    """Of the best to the lower of both floors."""
    if best.gap is None or other.gap is None or not other.step_s:
        return None
    return max(best.gap, best.step_s * (1 + other.gap) / other.step_s - 1)


def _compared(best: Expected, other: Plan) -> str:
    """`not pp 16 with 16 microbatches: 4.50 s a step against 3.66 s, 23 % slower, and ...`."""
    assert other.expected is not None
    name = f"not {axes_text(other.axes)} with {microbatches_text(other.microbatches)}"
    slower = other.expected.step_s / best.step_s - 1
    times = f"{seconds_text(other.expected.step_s)} a step against {seconds_text(best.step_s)}"
    how = f"{percent_text(slower)} slower" if slower > CLOSE - 1 else "as fast within a percent"
    return f"{name}: {times}, {how}{'' if other.axes.group_size > 1 else f', {BITS}'}"


def no_row_reason(refused: OutsizeError) -> str:
    """Why axes were opened that nobody had asked for."""
    return f"no pipeline fits, so every axis that runs was searched: {refused.what}; {refused.numbers}"


def as_alternative(plan: Plan) -> Alternative:
    """What another plan says of one that has expectations."""
    assert plan.expected is not None
    held: dict[int, int] = {}
    for rank, figures in zip(plan.ranks, plan.expected.stages, strict=True):
        held[rank] = held.get(rank, 0) + figures.peak_bytes
    return Alternative(
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        axes=plan.axes,
        chunks=max(1, len(plan.stages) // plan.axes.pp),
        weights=plan.weights,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        step_s=plan.expected.step_s,
        samples_per_s=plan.expected.samples_per_s,
        peak_bytes=max(held.values()),
        what_if=bool(plan.beyond),
    )
