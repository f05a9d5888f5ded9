"""Compares what a plan predicts with what one device does, and measures what outsize itself costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.api.device_checks.check_place import CheckAnswer, CheckPlace
from outsize.api.device_checks.models import MODELS, PERCEPTRON, DeviceModel
from outsize.api.running import parallelize
from outsize.device.accelerators import peak_bytes, reset_peak
from outsize.device.host_waits import count_host_waits
from outsize.ir.plan import Plan
from outsize.train.engine.engine import Engine


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
    """Measures the seconds of a step of each model, beside the plan's prediction and the plain model's."""
    figures = dict[str, float]()
    for case in MODELS:
        engine, plan, step = _made(place, case)
        assert plan.expected is not None
        measured = place.seconds(step)
        figures |= {
            f"{case.name}_step_s": measured,
            f"{case.name}_predicted_s": plan.expected.step_s,
            f"{case.name}_measured_over_predicted": measured / plan.expected.step_s,
        }
        del engine
    return CheckAnswer(figures)


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


def _made(
    place: CheckPlace, case: DeviceModel, microbatches: int = 4, **options: Any
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
    return engine, engine.plan, lambda: engine.step(x, target=y)
