"""The answer of `outsize fit` as text: a word, the devices by cause, the largest units, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outsize.ir.fit import Change, Contributor, DeviceFit, Fit
from outsize.ir.offload import weights_text
from outsize.ir.text import byte_unit, bytes_text, count_text, percent_text
from outsize.report import pieces

COLOURS = {"YES": "bold green", "YES IF": "bold yellow", "NO": "bold red"}
# column -> field of DeviceFit; a column of zeros is left out
CAUSES = {
    "weights": "weights_bytes",
    "grads": "gradients_bytes",
    "master": "master_bytes",
    "optim.": "optimizer_bytes",
    "activ.": "activations_bytes",
    "buf.": "boundary_bytes",
    "work": "workspace_bytes",
    "ctx": "context_bytes",
}


def fit_table(fit: Fit) -> Group:
    """The whole answer."""
    changes = pieces.spaced(_changes(fit.changes)) if fit.changes else []
    largest = [*pieces.spaced(Text("Largest", "bold")), _largest(fit.largest)] if fit.largest else []
    notes = pieces.listed("How sure", fit.sure)
    return Group(
        _heading(fit),
        *changes,
        *(pieces.spaced(_devices(fit.devices)) if fit.devices else ()),
        *_others(fit.changes),
        *largest,
        *pieces.spaced(*notes),
    )


def _heading(fit: Fit) -> RenderableType:
    fits = {"YES": "fits", "YES IF": "does not fit as asked on", "NO": "does not fit"}[fit.answer]
    first = Text.assemble(
        (fit.answer, COLOURS[fit.answer]),
        ("  ", ""),
        (fit.model, "bold"),
        f" ({count_text(fit.parameters)} parameters) {fits} {fit.cluster}",
    )
    lines = [first, Text(_setting(fit))]
    if not fit.whole:
        lines.append(
            Text("That is weights, gradients and states alone: activations come on top.", "bold yellow")
        )
    if fit.alone:
        lines.append(Text("One of the devices is enough: replicas on the others would be faster."))
    if fit.devices_needed is not None:
        lines.append(Text(f"{fit.devices_needed} such devices would do."))
    if fit.refused:
        lines.append(Text(fit.refused))
    return Group(*lines)


def _setting(fit: Fit) -> str:
    replicas = fit.axes.replicas
    size = -(-fit.batch_size // (fit.microbatches * replicas))
    shared = f"{replicas} replicas x " if replicas > 1 else ""
    again = {"none": "", "full": ", all recomputed", "offload": ", activations on the host"}
    parts = [f"{fit.axes.pp} stage{'s' if fit.axes.pp > 1 else ''}", fit.axes.beyond_pp]
    parts += [weights_text(fit.weights), fit.schedule]
    cut = f" as {shared}{fit.microbatches} x {size}" if fit.devices else ""
    parts += [f"batch {fit.batch_size}{cut}", fit.optimizer]
    how = again.get(fit.recompute, ", some recomputed")
    return ", ".join(filter(None, parts)) + f", {fit.precision}{how}"


def _changes(changes: tuple[Change, ...]) -> Table:
    made = pieces.table(("if", "left"), *pieces.rights("fullest", "full"), ("what it costs", "left"))
    for change in changes:
        peak = bytes_text(change.p95_bytes)
        made.add_row(Text(change.options, "bold"), peak, percent_text(change.share), change.sentence)
    return made


def _others(changes: tuple[Change, ...]) -> Iterator[RenderableType]:
    """The devices after a change that is no pipeline of the same kind."""
    for change in changes:
        if change.devices:
            yield from pieces.spaced(Text(f"With {change.options}", "bold"))
            yield _devices(change.devices)


def _devices(devices: tuple[DeviceFit, ...]) -> Table:
    unit, size = byte_unit(max(d.p95_bytes for d in devices))
    shown = {c: f for c, f in CAUSES.items() if any(getattr(d, f) >= 0.05 * size for d in devices)}
    limits = {d.memory_bytes for d in devices}
    of = f"{unit} of {limits.pop() / size:.1f}" if len(limits) == 1 else unit
    made = pieces.table((of, "left"), *pieces.rights(*shown, "P50", "P95", "full"))

    def cells(device: DeviceFit) -> tuple[str, ...]:
        held = [getattr(device, field) for field in shown.values()]
        sizes = (*held, device.p50_bytes, device.p95_bytes)
        return tuple(f"{number / size:.1f}" for number in sizes)

    for texts, same in groupby(devices, key=cells):
        run = list(same)
        made.add_row(_run(run), *texts, pieces.full(run[0].share))
    return made


def _run(devices: list[DeviceFit]) -> str:
    """`cuda:3`, or `cuda:3-22` for a run of alike ones."""
    first, last = devices[0].device, devices[-1].device
    return first if first == last else f"{first}-{last.rpartition(':')[2]}"


def _largest(largest: tuple[Contributor, ...]) -> Table:
    made = pieces.table(("unit", "left"), ("device", "left"), *pieces.rights("states", "saved"))
    for held in largest:
        name = f"{held.name} ({held.kind})"
        made.add_row(name, held.device, bytes_text(held.states_bytes), bytes_text(held.saved_bytes))
    return made
