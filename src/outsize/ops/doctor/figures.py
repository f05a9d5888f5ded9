"""Compares what a plan predicts with what one device does, and measures what outsize itself costs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Final

import torch

from outsize.api.problem import case_of
from outsize.capture.measure.local_cluster import find_cluster
from outsize.device.accelerators import count_host_waits, peak_bytes, reset_peak
from outsize.ir.plan import Plan
from outsize.ops.doctor.check_place import CheckAnswer, CheckPlace
from outsize.ops.doctor.models import BLOCKS, MODELS, PERCEPTRON, DeviceModel, stacked
from outsize.ops.training import parallelize
from outsize.planner.costs.roofline import mean_ops
from outsize.train.engine.engine import Engine

MICROBATCHES: Final = 4
NARROW: Final = 32
"""A width at which every kernel is over before the host has launched the next one."""
DEPTHS: Final = (4, 20)


def memory(place: CheckPlace) -> CheckAnswer:
    """Measures the peak of tensors of one step, against what the plan counts; P95 must not be exceeded.

    The plan's P95 also has the device's context and what the allocator holds beyond its tensors.
    """
    figures, wrong = dict[str, float](), list[str]()
    for case in MODELS:
        engine, plan, step = _made(place, case)
        assert plan.expected is not None
        step()
        reset_peak(place.device)
        step()
        peak, expected = peak_bytes(place.device), plan.expected.stages[0]
        figures |= {
            f"{case.name}_peak_bytes": peak,
            f"{case.name}_p50_bytes": expected.p50_bytes,
            f"{case.name}_p95_bytes": expected.p95_bytes,
        }
        if peak > expected.p95_bytes:
            wrong.append(f"{case.name}: {peak} bytes of tensors, P95 is {expected.p95_bytes}")
        del engine
    return CheckAnswer(figures, tuple(wrong))


def steps(place: CheckPlace) -> CheckAnswer:
    """Measures the seconds of a step of each model, beside its prediction and a plain loop's seconds."""
    figures = dict[str, float]()
    for case in MODELS:
        engine, plan, step = _made(place, case)
        assert plan.expected is not None
        measured = place.seconds(step)
        figures |= {
            f"{case.name}_step_s": measured,
            f"{case.name}_predicted_s": plan.expected.step_s,
            f"{case.name}_measured_over_predicted": measured / plan.expected.step_s,
            f"{case.name}_plain_loop_s": place.seconds(_plain_step(place, case)),
        }
        del engine
    return CheckAnswer(figures)


def host(place: CheckPlace) -> CheckAnswer:
    """Measures the host's seconds for an op of a training loop, with modules and autograd.

    The device has next to nothing to do for a narrow model, so the seconds of forward and backward are the
    host's; those of a shallow model are taken off, since a step has some whatever its depth. Plans with
    `--cluster report.json` use them.
    """
    figures, ops_s = dict[str, float](), list[float]()
    for name, block in BLOCKS.items():
        (few, few_s), (many, many_s) = (_host_of(place, stacked(block, depth)) for depth in DEPTHS)
        ops_s.append((many_s - few_s) / (many - few))
        figures |= {f"{name}_op_s": ops_s[-1], f"{name}_ops": many - few}
    return CheckAnswer({"op_s": max(0.0, statistics.fmean(ops_s)), **figures})


def _host_of(place: CheckPlace, case: DeviceModel) -> tuple[float, float]:
    """Returns the ops of a narrow model's forward and backward, in ops of mean length, and their seconds."""
    narrow = dataclasses.replace(place, width=NARROW)
    example, target = case.batch(NARROW)
    training = case_of(case.build(NARROW), (example,), None, {"loss_fn": case.loss_fn, "target": target})
    cluster = find_cluster("local")
    graph = training.on(cluster).captured(len(example)).graph
    _, _, step = _made(narrow, case, 1, update=False)
    return mean_ops(graph, cluster.devices[0]), narrow.seconds(step)


def compilation(place: CheckPlace) -> CheckAnswer:
    """Measures a step with its stages compiled by inductor against the same without."""
    seconds = dict[str, float]()
    for name, options in {"plain": {}, "compiled": {"compiled": "inductor"}}.items():
        _, _, step = _made(place, PERCEPTRON, **options)
        seconds[name] = place.seconds(step)
    steps_s = {f"{name}_step_s": step_s for name, step_s in seconds.items()}
    return CheckAnswer(steps_s | {"speed_up": seconds["plain"] / seconds["compiled"]})


def host_waits(place: CheckPlace) -> CheckAnswer:
    """Counts how often the host waits for the device in one steady step, at 4 and at 16 microbatches."""
    figures = dict[str, float]()
    for microbatches in (4, 16):
        _, _, step = _made(place, PERCEPTRON, microbatches=microbatches)
        step()
        waits = count_host_waits(place.device, step)
        if waits is None:
            return CheckAnswer(
                missing=f"a way to count waits: torch's module of {place.device.type} has none"
            )
        figures[f"waits_at_{microbatches}_microbatches"] = waits
    return CheckAnswer(figures)


def _plain_step(place: CheckPlace, case: DeviceModel) -> Callable[[], object]:
    """Returns a function that makes a step of gradient accumulation as a user writes it."""
    model, batch = case.build(place.width).to(place.device), case.batch(place.width)
    x, y = (given.to(place.device) for given in batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (case.loss_fn(model(part), target) / MICROBATCHES).backward()
        optimizer.step()

    return step


def _made(
    place: CheckPlace,
    case: DeviceModel,
    microbatches: int = MICROBATCHES,
    update: bool = True,
    **options: Any,
) -> tuple[Engine, Plan, Callable[[], object]]:
    """Returns an engine of one stage on this device, its plan, and a function that makes a step."""
    example, target = case.batch(place.width)
    x, y = example.to(place.device), target.to(place.device)
    options = {"devices": [str(place.device)], "stages": 1, "microbatches": microbatches, **options}
    engine = parallelize(
        case.build(place.width),
        (example,),
        loss_fn=case.loss_fn,
        target=target,
        optimizer=torch.optim.AdamW,
        **options,
    )
    return engine, engine.plan, lambda: engine.step(x, target=y, update=update)
