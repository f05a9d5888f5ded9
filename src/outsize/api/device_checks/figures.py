"""Compares what a plan predicts with what one device does, and measures what outsize itself costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.api.device_checks.models import MODELS, PERCEPTRON, DeviceModel
from outsize.api.device_checks.setting import Finding, Setting
from outsize.api.running import parallelize
from outsize.device.accelerators import peak_bytes, reset_peak
from outsize.device.host_waits import count_host_waits
from outsize.ir.plan import Plan
from outsize.train.engine.engine import Engine


def memory(setting: Setting) -> Finding:
    """Measures the peak of tensors of one step, against what the plan counts; P95 must not be exceeded.

    The plan's P95 also has the device's context and what the allocator holds beyond its tensors.
    """
    figures, wrong = dict[str, float](), list[str]()
    for case in MODELS:
        engine, plan, step = _made(setting, case)
        assert plan.expected is not None
        step()
        reset_peak(setting.device)
        step()
        peak, expected = peak_bytes(setting.device), plan.expected.stages[0]
        figures |= {
            f"{case.name}_peak_bytes": peak,
            f"{case.name}_p50_bytes": expected.p50_bytes,
            f"{case.name}_p95_bytes": expected.p95_bytes,
        }
        if peak > expected.p95_bytes:
            wrong.append(f"{case.name}: {peak} bytes of tensors, P95 is {expected.p95_bytes}")
        del engine
    return Finding(figures, tuple(wrong))


def steps(setting: Setting) -> Finding:
    """Measures the seconds of a step of each model, beside the plan's prediction and the plain model's."""
    figures = dict[str, float]()
    for case in MODELS:
        engine, plan, step = _made(setting, case)
        assert plan.expected is not None
        measured = setting.seconds(step)
        figures |= {
            f"{case.name}_step_s": measured,
            f"{case.name}_predicted_s": plan.expected.step_s,
            f"{case.name}_measured_over_predicted": measured / plan.expected.step_s,
        }
        del engine
    return Finding(figures)


def compilation(setting: Setting) -> Finding:
    """Measures a step with its stages compiled by inductor against the same without."""
    seconds = dict[str, float]()
    for name, options in {"plain": {}, "compiled": {"compiled": "inductor"}}.items():
        _, _, step = _made(setting, PERCEPTRON, **options)
        seconds[name] = setting.seconds(step)
    steps_s = {f"{name}_step_s": step_s for name, step_s in seconds.items()}
    return Finding(steps_s | {"speed_up": seconds["plain"] / seconds["compiled"]})


def host_waits(setting: Setting) -> Finding:
    """Counts how often the host waits for the device in one steady step, at 4 and at 16 microbatches."""
    figures = dict[str, float]()
    for microbatches in (4, 16):
        _, _, step = _made(setting, PERCEPTRON, microbatches=microbatches)
        step()
        waits = count_host_waits(setting.device, step)
        if waits is None:
            return Finding(missing=f"a way to count waits: torch's module of {setting.device.type} has none")
        figures[f"waits_at_{microbatches}_microbatches"] = waits
    return Finding(figures)


def _made(
    setting: Setting, case: DeviceModel, microbatches: int = 4, **options: Any
) -> tuple[Engine, Plan, Callable[[], object]]:
    """Returns an engine of one stage on this device, its plan, and a function that makes a step."""
    example, target = case.batch(setting.width)
    x, y = example.to(setting.device), target.to(setting.device)
    options = {"devices": [str(setting.device)], "stages": 1, "microbatches": microbatches, **options}
    engine = parallelize(
        case.build(setting.width),
        (example,),
        loss_fn=case.loss_fn,
        target=target,
        optimizer=torch.optim.AdamW,
        **options,
    )
    return engine, engine.plan, lambda: engine.step(x, target=y)
