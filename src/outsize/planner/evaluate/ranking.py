"""Ranks priced candidates: which one is taken, and what the plan says of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from outsize.errors import OutsizeError
from outsize.ir.findings import Difference, NoPipelineFits, NotChosen, Refusal
from outsize.ir.plan import Alternative, Expected, Plan
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.layout.layout import Layout
from outsize.policies.activations import KEEP, Recompute
from outsize.schedules.families import family_of

# A smaller difference is below what tells two layouts of one search apart.
CLOSE: Final = 1.01
# The bits of one device are given up for more than the error of a prediction: real steps of pipelines were
# within 5 % of theirs (benchmarks/prediction).
BITS: Final = 1.05
ALTERNATIVES: Final = 3


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the fastest candidate; of those within CLOSE of it, the first by `thrift`.

    More stages on a rank must save more than that: each costs Python and messages, which prices know least.
    """
    close_s = CLOSE * min(f.step_s for f in candidates)
    close = [f for f in candidates if f.step_s <= close_s]
    return min(
        (f for f in close if not any(_has_fewer_chunks(g.layout, f.layout) for g in close)), key=thrift
    )


def _has_fewer_chunks(one: Layout, other: Layout) -> bool:
    """Returns whether both have several stages on a rank, and one has fewer and is the same otherwise."""
    return 1 < one.chunks < other.chunks and replace(one, stages=other.stages) == other


def thrift(candidate: Candidate) -> tuple[object, ...]:
    """Orders equally fast candidates: least memory, fewest microbatches, preferred schedule."""
    layout = candidate.layout
    order = family_of(layout.schedule).preference
    axes = tuple(layout.axes.model_dump().values())
    return (
        candidate.peak_bytes,
        layout.microbatches,
        order,
        layout.weights,
        layout.stages,
        axes,
    )


def rivals(best: Layout, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates that were not chosen, the fastest first."""
    return sorted((f for f in candidates if f.layout is not best), key=lambda f: (f.step_s, *thrift(f)))


def shown(rivals: Sequence[Candidate]) -> list[Candidate]:
    """Returns the fastest ones."""
    return list(rivals[:ALTERNATIVES])


def alternative(batch_size: int, rival: Candidate) -> Alternative:
    """Returns a candidate as an alternative of the plan."""
    layout = rival.layout
    saving: list[Recompute] = [c.recompute for c in rival.cases if not c.activation_policy.keeps_all]
    return Alternative(
        schedule=layout.schedule,
        microbatches=layout.whole_microbatches,
        slices=layout.slices,
        axes=layout.axes,
        chunks=layout.chunks,
        weights=layout.weights,
        sequence_parallel=layout.sequence,
        recompute=saving[0] if saving else KEEP.name,
        step_s=rival.step_s,
        samples_per_s=batch_size / rival.step_s if rival.step_s else 0.0,
        peak_bytes=rival.peak_bytes,
    )


def compared_with(best: Candidate, rivals: Sequence[Candidate]) -> list[NotChosen]:
    """Compares with the same microbatches under the other schedules, and the fastest other number of
    microbatches.

    Sequence parallelism is compared only under the schedule that was chosen.
    """
    mine = best.layout
    rivals = [r for r in rivals if mine.schedule == r.layout.schedule or mine.sequence == r.layout.sequence]
    same = [r for r in rivals if r.layout.captured == mine.captured and r.layout.axes == mine.axes]
    other = [r for r in rivals if r.layout.captured != mine.captured and r.layout.schedule == mine.schedule]
    meshes = [r for r in rivals if r.layout.axes != mine.axes]
    shown = dict.fromkeys((*same, *other[:1], *meshes[:1]))
    return [_compared(best, rival) for rival in shown]


def is_as_fast(step_s: float, best_s: float) -> bool:
    """Returns whether a step differs from the best one by less than a prediction's error."""
    return not step_s > CLOSE * best_s > 0


def not_chosen(
    best: Alternative, other: Alternative, differs: tuple[Difference, ...], bit_identical: bool = False
) -> NotChosen:
    """Compares a plan that was not chosen with the one that was."""
    return NotChosen(
        schedule=other.schedule,
        microbatches=other.microbatches,
        slices=other.slices,
        stages_per_device=other.chunks,
        axes=other.axes.used,
        weights=other.weights,
        sequence_parallel=other.sequence_parallel,
        differs=differs,
        step_s=other.step_s,
        chosen_step_s=best.step_s,
        as_fast=is_as_fast(other.step_s, best.step_s),
        more_bytes=other.peak_bytes - best.peak_bytes,
        bit_identical=bit_identical,
    )


def _compared(best: Candidate, other: Candidate) -> NotChosen:
    """Compares a candidate with the one that was chosen."""
    layout, chosen = other.layout, best.layout
    same: dict[Difference, bool] = {
        "axes": layout.axes == chosen.axes,
        "weights": layout.weights == chosen.weights,
        "sequence_parallel": layout.sequence == chosen.sequence,
    }
    differs: tuple[Difference, ...] = tuple(name for name, equal in same.items() if not equal)
    return not_chosen(alternative(1, best), alternative(1, other), differs)


# -- a pipeline or a mesh ---------------------------------------------------------------------------------


def faster(given_plan: Plan, mesh: Plan) -> Plan:
    """Returns the mesh if its step is shorter by more than a prediction's error, otherwise the plan of the
    given axes; the other plan becomes an alternative.

    That error is BITS where the results of the first are bit-identical to one device and those of the mesh
    are not.
    """
    assert given_plan.expected is not None
    assert mesh.expected is not None
    loses_bits = given_plan.bit_identical and not mesh.bit_identical
    least = BITS if loses_bits else CLOSE
    mesh_wins = least * mesh.expected.step_s < given_plan.expected.step_s
    best, other = (mesh, given_plan) if mesh_wins else (given_plan, mesh)
    # The mesh's lower bound also holds for pipelines.
    gap = mesh.expected.gap if mesh_wins else _gap(given_plan.expected, mesh.expected)
    return _beside(best, other, ("axes",), gap)


def instead_of(plan: Plan, better: Plan, differs: tuple[Difference, ...]) -> Plan:
    """Returns the better plan, to which the other one is an alternative."""
    assert plan.expected is not None
    assert better.expected is not None
    return _beside(better, plan, differs, _gap(better.expected, plan.expected))


def _beside(best: Plan, other: Plan, differs: tuple[Difference, ...], gap: float | None) -> Plan:
    assert best.expected is not None
    alternatives = sorted(
        (as_alternative(other), *best.alternatives[: ALTERNATIVES - 1]), key=lambda a: a.step_s
    )
    identical = other.bit_identical and not best.bit_identical
    compared = not_chosen(as_alternative(best), as_alternative(other), differs, identical)
    return best.model_copy(
        update={
            "expected": best.expected.model_copy(update={"gap": gap}),
            "alternatives": tuple(alternatives),
            "why": (*best.why, compared),
        }
    )


def _gap(best: Expected, other: Expected) -> float | None:
    """Returns the gap of the best plan to the lower of both bounds."""
    if best.gap is None or other.gap is None or not other.step_s:
        return None
    return max(best.gap, best.step_s * (1 + other.gap) / other.step_s - 1)


def no_pipeline(refused: OutsizeError) -> NoPipelineFits:
    """Returns why the search opened axes that were not asked for."""
    return NoPipelineFits(refusal=refusal(refused))


def refusal(error: OutsizeError) -> Refusal:
    """Returns an error as a record."""
    return Refusal(error_code=error.code, what=error.what, numbers=error.numbers)


def as_alternative(plan: Plan) -> Alternative:
    """Returns a plan with expectations as an alternative of another plan."""
    assert plan.expected is not None
    used_bytes: dict[int, int] = {}
    for rank, figures in zip(plan.ranks, plan.expected.stages, strict=True):
        used_bytes[rank] = used_bytes.get(rank, 0) + figures.peak_bytes
    return Alternative(
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        slices=plan.slices,
        axes=plan.axes,
        chunks=max(1, len(plan.stages) // plan.axes.pp),
        weights=plan.weights,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        step_s=plan.expected.step_s,
        samples_per_s=plan.expected.samples_per_s,
        peak_bytes=max(used_bytes.values()),
    )
