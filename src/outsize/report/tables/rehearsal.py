"""Builds the table of a rehearsal in 80 columns: what each small world has proven, and what none proves."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.ir.answers.runs.rehearsal import Culprit, ProofResult, Rehearsal, RehearsedWorld
from outsize.ir.formatting import seconds_text
from outsize.report.tables import table_style

# Columns of the table by proof.
_MOST_CHANGES = 6
_COLUMNS = {
    "messages": "messages",
    "numbers": "numbers",
    "memory of steps": "3 steps",
    "death": "death",
    "resume": "resume",
}


def rehearsal_table(rehearsal: Rehearsal) -> Group:
    """Returns the verdict, a row for each world, who was wrong, what was proven and what was not."""
    holds = rehearsal.holds
    word = Text("holds", "bold green") if holds else Text("DOES NOT HOLD", "bold red")
    heading = Text.assemble((rehearsal.model, "bold"), ": the plan ", word, " in rehearsal")
    culprits = [world.culprit for world in rehearsal.worlds if world.culprit is not None]
    parts: list[RenderableType] = [
        table_style.facts(list(_facts(rehearsal))),
        _worlds(rehearsal),
        *(Text(_culprit_text(culprit), "bold red") for culprit in culprits),
        *table_style.listed("Proven", list(_proven(rehearsal))),
        *table_style.listed("Not proven", list(_unproven(rehearsal))),
    ]
    return Group(heading, *table_style.spaced(*parts))


def _facts(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    axes = ", ".join(f"{name} {size}" for name, size in rehearsal.axes.used.items())
    yield "plan", f"{rehearsal.axes.world_size} devices: {axes}; {_schedule_text(rehearsal)}"
    large, small = rehearsal.parameters, rehearsal.small_parameters
    yield "parameters", f"{large:,} -> {small:,}"
    changes = sorted(rehearsal.changes, key=lambda change: -change.before / change.now)
    shown = [f"{change.name} {change.before} -> {change.now}" for change in changes[:_MOST_CHANGES]]
    if len(changes) > _MOST_CHANGES:
        shown.append(f"{len(changes) - _MOST_CHANGES} others")
    if rehearsal.dropped:
        shown.append(f"{rehearsal.dropped} repeated modules left out")
    if shown:
        yield "smaller", "; ".join(shown)
    yield "kinds of units", f"{rehearsal.kinds - len(rehearsal.missing_kinds)} of {rehearsal.kinds}"
    yield "where", f"processes on {rehearsal.device}, {seconds_text(rehearsal.seconds)} in all"


def _schedule_text(rehearsal: Rehearsal) -> str:
    return f"{rehearsal.schedule}, {rehearsal.stages} stages, {rehearsal.microbatches} microbatches"


def _worlds(rehearsal: Rehearsal) -> RenderableType:
    columns: list[table_style.Column] = [(name, "left") for name in _COLUMNS.values()]
    table = table_style.table(("small world", "left"), ("ranks", "right"), *columns)
    for world in rehearsal.worlds:
        results = {result.proof: result for result in world.results}
        cells = (_cell(results.get(proof)) for proof in _COLUMNS)
        table.add_row(_axes_text(world), str(world.axes.world_size), *cells)
    return table


def _axes_text(world: RehearsedWorld) -> str:
    return " ".join(f"{name}={size}" for name, size in world.axes.used.items())


def _cell(result: ProofResult | None) -> Text:
    if result is None or result.holds is None:
        return Text("-")
    if not result.holds:
        return Text("WRONG", "bold red")
    if result.relative_diff is not None:
        return Text(f"{result.relative_diff:.0e}")
    return Text("bits" if result.bits else "ok", "green")


def _culprit_text(culprit: Culprit) -> str:
    who = "a rank" if culprit.rank is None else f"rank {culprit.rank}"
    stage = "" if culprit.stage is None else f" (stage {culprit.stage})"
    return f"{who}{stage}, {culprit.action}: {culprit.seen}"


def _proven(rehearsal: Rehearsal) -> Iterator[str]:
    if rehearsal.actions:
        counted = f"{rehearsal.actions:,} actions, {rehearsal.messages:,} sends"
        yield f"the whole schedule ends on paper, also in NCCL's order of messages: {counted}"
    shown = {result.proof for world in rehearsal.worlds for result in world.results if result.holds}
    if not all(world.holds for world in rehearsal.worlds):
        shown &= {result.proof for result in rehearsal.worlds[-1].results if result.holds}
    if "messages" in shown:
        seen = sum(world.messages for world in rehearsal.worlds)
        yield f"no deadlock, and {seen:,} messages between stages came in as they were sent, byte by byte"
    if "numbers" in shown:
        all_results = [result for world in rehearsal.worlds for result in world.results]
        relative = [one.relative_diff for one in all_results if one.relative_diff is not None]
        how = f"within {max(relative):.0e} of their largest element" if relative else "bit by bit"
        yield f"loss and gradients are those of the plain loop in one process, {how}"
    if "memory of steps" in shown:
        yield "after three steps of AdamW ranks with the same weights have the same bits"
    if "death" in shown:
        yield "a rank that was killed in a step is named, and all start again (--max-restarts 1)"
    if "resume" in shown:
        yield "from the checkpoint the same two steps have the same bits"
    if rehearsal.met:
        yield "axes that met: " + ", ".join(" with ".join(pair) for pair in rehearsal.met)


def _unproven(rehearsal: Rehearsal) -> Iterator[str]:
    yield "speed, and memory of the devices: outsize plan predicts both, doctor --gpu measures devices"
    backend = "NCCL" if rehearsal.device == "cpu" else "links between devices"
    yield f"{backend}, machines and networks: the ranks are processes of this machine"
    yield "kernels at the model's own sizes, and convergence of the training"
    if rehearsal.unlike:
        yield "; ".join(rehearsal.unlike)
    if rehearsal.missing_kinds:
        yield "units of kinds that the small model has not: " + ", ".join(rehearsal.missing_kinds[:4])
    if rehearsal.apart:
        yield "axes that never met: " + ", ".join(" with ".join(pair) for pair in rehearsal.apart)
