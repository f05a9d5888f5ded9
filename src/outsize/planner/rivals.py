"""Which of the ways that were priced is taken, and what is said of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from outsize.ir.offload import weights_text
from outsize.ir.plan import Alternative, Recompute, ScheduleName
from outsize.ir.text import bytes_text, percent_text, seconds_text
from outsize.planner.estimate import Estimate
from outsize.planner.layout import Layout
from outsize.planner.reasons import axes_text, microbatches_text

# Less than this is no difference that a prediction could tell.
CLOSE: Final = 1.01
ALTERNATIVES: Final = 3
# Of schedules that are equal in all else, the one that is known best.
ORDER: Final[tuple[ScheduleName, ...]] = (
    "1f1b",
    "gpipe",
    "naive",
    "interleaved",
    "zero-bubble",
    "zero-bubble-v",
    "auto",
)


def choose(found: Sequence[Estimate]) -> Estimate:
    """The fastest; of those as fast within CLOSE the thriftiest."""
    close_s = CLOSE * min(f.step_s for f in found)
    return min((f for f in found if f.step_s <= close_s), key=thrift)


def thrift(found: Estimate) -> tuple[object, ...]:
    """Among equals: what runs today, least memory, fewest microbatches, the schedule that is known best."""
    layout = found.layout
    order = ORDER.index(layout.schedule)
    axes = tuple(layout.axes.model_dump().values())
    return layout.what_if, found.peak_bytes, layout.microbatches, order, layout.weights, layout.stages, axes


def rivals(best: Layout, found: Iterable[Estimate]) -> list[Estimate]:
    """Those not chosen, the fastest first."""
    return sorted((f for f in found if f.layout is not best), key=lambda f: (f.step_s, *thrift(f)))


def shown(rivals: Sequence[Estimate]) -> list[Estimate]:
    """The fastest ones; one of them runs today, if any does."""
    first = list(rivals[:ALTERNATIVES])
    today = next((r for r in rivals if not r.layout.what_if), None)
    return first if today is None or today in first else [*first[: ALTERNATIVES - 1], today]


def alternative(batch_size: int, rival: Estimate) -> Alternative:
    """What a plan says of one of them."""
    layout = rival.layout
    again: list[Recompute] = [case.recompute for case in rival.cases if case.recompute != "none"]
    return Alternative(
        schedule=layout.schedule,
        microbatches=layout.microbatches,
        axes=layout.axes,
        chunks=layout.chunks,
        weights=layout.weights,
        sequence_parallel=layout.sequence,
        recompute=again[0] if again else "none",
        step_s=rival.step_s,
        samples_per_s=batch_size / rival.step_s if rival.step_s else 0.0,
        peak_bytes=rival.peak_bytes,
        what_if=layout.what_if,
    )


def compared_with(best: Estimate, rivals: Sequence[Estimate]) -> list[str]:
    """The same microbatches under the other schedules, and the fastest other number of microbatches.

    Whether what lies between layers is divided is compared under the schedule that was chosen.
    """
    mine = best.layout
    rivals = [r for r in rivals if mine.schedule == r.layout.schedule or mine.sequence == r.layout.sequence]
    same = [r for r in rivals if r.layout.captured == mine.captured and r.layout.axes == mine.axes]
    other = [r for r in rivals if r.layout.captured != mine.captured and r.layout.schedule == mine.schedule]
    meshes = [r for r in rivals if r.layout.axes != mine.axes]
    shown = dict.fromkeys((*same, *other[:1], *meshes[:1]))
    return [_compared(best, rival) for rival in shown]


def _compared(best: Estimate, other: Estimate) -> str:
    layout = other.layout
    axes = f" on {axes_text(layout.axes)}" if layout.axes != best.layout.axes else ""
    if layout.weights != best.layout.weights:
        axes += f", {weights_text(layout.weights) or 'weights resident'}"
    if layout.sequence != best.layout.sequence:
        axes += ", sequence parallel" if layout.sequence else ", not sequence parallel"
    chunks = f" ({layout.chunks} stages a device)" if layout.chunks > 1 else ""
    name = f"not {layout.schedule}{chunks} with {microbatches_text(layout.microbatches)}{axes}"
    if other.step_s > CLOSE * best.step_s > 0:
        slower = percent_text(other.step_s / best.step_s - 1)
        times = f"{seconds_text(other.step_s)} a step against {seconds_text(best.step_s)}"
        return f"{name}: {times}, {slower} slower"
    more = other.peak_bytes - best.peak_bytes
    memory = f"{bytes_text(more)} more on its fullest device" if more > 0 else "no less memory"
    return f"{name}: as fast within a percent, and {memory}"
