"""Builds the answer of `outsize fit` as text: a word, the devices by cause, the largest units, what to
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outsize.ir.answers.fit import Change, Contributor, DeviceFit, Fit, ForwardSpeed
from outsize.ir.formatting import byte_unit, bytes_text, count_text, percent_text, seconds_text
from outsize.policies.activations import activation_policy
from outsize.policies.weights import weight_policy
from outsize.report.tables import table_style
from outsize.report.wording import options_text, refusal_text, sentences

COLOURS = {"YES": "bold green", "YES IF": "bold yellow", "NO": "bold red"}
# So many causes leave room for two blanks between columns of 80; more of them have one.
ROOMY: Final = 7
# Each column shows one field of DeviceFit; a column of zeros is left out.
CAUSES = {
    "weights": "weights_bytes",
    "grads": "gradients_bytes",
    "master": "master_bytes",
    "optim.": "optimizer_bytes",
    "activ.": "activations_bytes",
    "buf.": "boundary_bytes",
    "work": "workspace_bytes",
    "kv": "cache_bytes",
    "ctx": "context_bytes",
    "cache": "kept_bytes",
}


def fit_table(fit: Fit) -> Group:
    """Returns the whole answer."""
    changes = table_style.spaced(_changes(fit.changes)) if fit.changes else []
    largest = [*table_style.spaced(Text("Largest", "bold")), _largest(fit.largest)] if fit.largest else []
    notes = table_style.listed("How sure", sentences(fit.sure))
    return Group(
        _heading(fit),
        *changes,
        *(table_style.spaced(devices_table(fit.devices)) if fit.devices else ()),
        *_others(fit.changes),
        *largest,
        *table_style.spaced(*notes),
    )


def _heading(fit: Fit) -> RenderableType:
    fits = "does not fit" if fit.answer == "NO" else "fits"
    first = Text.assemble(
        (fit.answer, COLOURS[fit.answer]),
        ("  ", ""),
        (fit.model, "bold"),
        f" ({parameters_text(fit)}) {fits} {fit.cluster}{_condition(fit.changes)}",
    )
    setting = setting_text(fit)
    lines = [first, Text(f"It does not as {setting}" if fit.answer == "YES IF" else setting)]
    if not fit.whole:
        lines.append(
            Text(
                "This counts only weights, gradients and states: activations are added to it.", "bold yellow"
            )
        )
    if fit.speed is not None:
        lines.append(Text(speed_text(fit.speed, fit.batch_size)))
    if fit.alone and not fit.inference:
        lines.append(Text("One device is enough: replicas on the others would be faster."))
    if fit.devices_needed is not None:
        lines.append(Text(f"{fit.devices_needed} such devices would be enough."))
    if fit.refused is not None:
        lines.append(Text(refusal_text(fit.refused)))
    return Group(*lines)


def _condition(changes: tuple[Change, ...]) -> str:
    """Returns with what it fits: with what `plan` does by itself, or with one of several changes."""
    if not changes:
        return ""
    first, *others = changes
    with_first = f" with {options_text(first.options)}"
    if first.planned:
        return f"{with_first}, which outsize plan takes by itself"
    return " with one of these changes" if others else with_first


def parameters_text(fit: Fit) -> str:
    """Returns how many parameters there are, and how many of them are trained where some are frozen."""
    frozen = 0 < fit.trained < fit.parameters
    return f"{count_text(fit.parameters)} parameters" + frozen * f", {count_text(fit.trained)} trained"


def speed_text(speed: ForwardSpeed, samples: int) -> str:
    """Returns the predicted seconds of a forward, or of a prompt and of each token after it."""
    if speed.token_s is None:
        return f"Forward of {samples} samples: {seconds_text(speed.batch_s)} predicted"
    prompt = f"{samples} prompts of {speed.tokens:,} tokens: {seconds_text(speed.batch_s)}"
    least, most = seconds_text(speed.token_s), seconds_text(speed.eager_token_s or speed.token_s)
    token = least if least == most else f"{least} (memory) to {most} (launched op by op)"
    return f"{prompt}, then {token} a token, predicted"


def setting_text(fit: Fit) -> str:
    """Returns how the step runs: stages, axes, schedule, batch, optimizer, precision, recompute."""
    replicas = fit.axes.replicas
    size = -(-fit.batch_size // (fit.microbatches * replicas))
    shared = f"{replicas} replicas x " if replicas > 1 else ""
    parts = [f"{fit.axes.pp} stage{'s' if fit.axes.pp > 1 else ''}", fit.axes.beyond_pp]
    parts += [weight_policy(fit.weights).text, "" if fit.inference else fit.schedule]
    cut = f" as {shared}{fit.microbatches} x {size}" if fit.devices else ""
    parts += [f"batch {fit.batch_size}{cut}", "inference" if fit.inference else fit.optimizer]
    parts += [fit.precision, activation_policy(fit.recompute).text]
    return ", ".join(filter(None, parts))


def _changes(changes: tuple[Change, ...]) -> Table:
    made = table_style.table(
        ("if", "left"), *table_style.rights("fullest", "full"), ("what it costs", "left")
    )
    for change in changes:
        peak = bytes_text(change.p95_bytes)
        effects = "; ".join(sentences(change.effects))
        made.add_row(Text(options_text(change.options), "bold"), peak, percent_text(change.share), effects)
    return made


def _others(changes: tuple[Change, ...]) -> Iterator[RenderableType]:
    """Yields the devices after each change that makes another kind of plan."""
    for change in changes:
        if change.devices:
            yield from table_style.spaced(Text(f"With {options_text(change.options)}", "bold"))
            yield devices_table(change.devices)


def devices_table(devices: tuple[DeviceFit, ...]) -> Table:
    """Returns a row for each device, or run of devices that hold the same, with its bytes by cause."""
    unit, size = byte_unit(max(d.p95_bytes for d in devices))
    shown_causes = {c: f for c, f in CAUSES.items() if any(getattr(d, f) >= 0.05 * size for d in devices)}
    limits = {d.memory_bytes for d in devices}
    of = f"{unit} of {limits.pop() / size:.1f}" if len(limits) == 1 else unit
    made = table_style.table((of, "left"), *table_style.rights(*shown_causes, "P50", "P95", "full"))
    if len(shown_causes) > ROOMY:
        made.padding = 0

    def cells(device: DeviceFit) -> tuple[str, ...]:
        cause_bytes = [getattr(device, field) for field in shown_causes.values()]
        sizes = (*cause_bytes, device.p50_bytes, device.p95_bytes)
        return tuple(f"{number / size:.1f}" for number in sizes)

    for texts, same in groupby(devices, key=cells):
        run = list(same)
        made.add_row(_run(run), *texts, table_style.full(run[0].share))
    return made


def _run(devices: list[DeviceFit]) -> str:
    """Returns `cuda:3`, or `cuda:3-22` for a run of devices that hold the same."""
    first, last = devices[0].device, devices[-1].device
    return first if first == last else f"{first}-{last.rpartition(':')[2]}"


def _largest(largest: tuple[Contributor, ...]) -> Table:
    made = table_style.table(("unit", "left"), ("device", "left"), *table_style.rights("states", "saved"))
    for contributor in largest:
        name = f"{contributor.name} ({contributor.kind})"
        made.add_row(
            name,
            contributor.device,
            bytes_text(contributor.states_bytes),
            bytes_text(contributor.saved_bytes),
        )
    return made
