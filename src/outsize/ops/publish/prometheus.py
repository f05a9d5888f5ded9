"""Writes the state of a run as Prometheus reads it (text format 0.0.4,
https://prometheus.io/docs/instrumenting/exposition_formats/).

    outsize_step{run="4711",model="GPT"} 40
    outsize_device_memory_bytes{run="4711",model="GPT",rank="0",device="cuda:0",kind="measured"} 2.2e+10
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from outsize.ir.answers.run_state import RunOnMachine, RunState

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_FIGURES: Final = {
    "step": "Steps that are over.",
    "total_steps": "Steps that the run will have.",
    "loss": "Loss of the latest step.",
    "evaluation_loss": "Loss of the latest evaluation.",
    "learning_rate": "Learning rate of the optimizer's first group.",
    "grad_norm": "Norm of the gradients before clipping.",
    "expert_imbalance": "Rows of experts on the fullest rank by those on the mean rank.",
    "step_s": "Seconds from step to step.",
    "planned_step_s": "Seconds of a step that the plan expects.",
    "samples_per_s": "Samples a second.",
    "left_s": "Seconds of the steps that are left.",
    "bubble": "Share of all device time without compute.",
    "planned_bubble": "The bubble that the plan expects.",
    "replans": "Plans that followed the first one.",
    "updated_unix_s": "When the figures were published.",
}
_UNITS: Final = {"_unix_s": "_timestamp_seconds", "_per_s": "_per_second", "_s": "_seconds"}


def prometheus_text(run: RunOnMachine) -> str:
    """Returns the metrics of a run; what is not known is left out."""
    return "".join(f"{line}\n" for line in _lines(run))


def _lines(run: RunOnMachine) -> Iterator[str]:
    labels = {"run": str(run.launch.pid)}
    yield from _metric("outsize_up", "1 while the run goes on.", [(labels, 1.0)])
    state = run.state
    if state is None:
        return
    labels["model"] = state.model
    for field, about in _FIGURES.items():
        value = getattr(state, field)
        if value is not None:
            yield from _metric(f"outsize_{_with_unit(field)}", about, [(labels, float(value))])
    if state.checkpoint is not None:
        saved = [(labels, float(state.checkpoint.step))]
        yield from _metric("outsize_checkpoint_step", "Steps in the newest checkpoint.", saved)
    yield from _devices(state, labels)


def _devices(state: RunState, labels: Mapping[str, str]) -> Iterator[str]:
    own = [({**labels, "rank": str(one.rank), "device": one.name}, one) for one in state.devices]
    busy = [(where, one.busy) for where, one in own if one.busy is not None]
    yield from _metric("outsize_device_busy", "Share of a step in which a device computes.", busy)
    memory = [
        ({**where, "kind": kind}, float(size))
        for where, one in own
        for kind, size in (
            ("measured", one.memory_bytes),
            ("planned", one.planned_bytes),
            ("reserved", one.reserved_bytes),
            ("device", one.device_bytes),
        )
        if size
    ]
    yield from _metric("outsize_device_memory_bytes", "Memory of a device.", memory)
    slow = {one.rank for one in state.slow_ranks}
    held = [(where, float(one.rank in slow)) for where, one in own]
    yield from _metric("outsize_device_is_straggler", "1 where a rank has held up the others.", held)


def _metric(name: str, about: str, samples: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    if samples:
        yield f"# HELP {name} {about}"
        yield f"# TYPE {name} gauge"
    for labels, value in samples:
        named = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
        yield f"{name}{{{named}}} {value:.10g}"


def _with_unit(field: str) -> str:
    """Returns a field's name with Prometheus's word for its unit."""
    for short, long in _UNITS.items():
        if field.endswith(short):
            return field.removesuffix(short) + long
    return field
