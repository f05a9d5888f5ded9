"""Compares the numbers of outsize on this machine's devices with the plain loop on one of them.

    alone         two stages on one device of this process
    together      a stage or a replica for each process, judged on rank 0, which runs the plain loop as well

Bits are compared where DESIGN promises them: pipelines, offload, clipping, a scaler, autocast without a
weight that several stages cast. Where ranks add up in another order, weights may differ by ROUNDING.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from outsize.api.device_checks import plain_loop
from outsize.api.device_checks.models import CONVOLUTIONS, MODELS, PERCEPTRON, DeviceModel
from outsize.api.device_checks.plain_loop import Trained, Training
from outsize.api.device_checks.setting import Finding, Setting
from outsize.api.planning import plan as make_plan
from outsize.api.running import parallelize
from outsize.ir.plan import Plan
from outsize.ir.schedule import COMPOSED_NAME, CUSTOM_NAME, SCHEDULES

ROUNDING: Final = 1e-4
"""Relative to a tensor's largest element, after two steps in float32."""
STAGES_ALONE: Final = 2


def schedules_alone(setting: Setting) -> Finding:
    """Runs all models in every schedule, with two stages on this device."""
    return _schedules(setting, STAGES_ALONE)


def schedules_together(setting: Setting) -> Finding:
    """Runs all models in every schedule over all processes: a tied weight and skips cross several stages."""
    return _schedules(setting, setting.world.world_size)


def _schedules(setting: Setting, stages: int) -> Finding:
    wrong, tried = list[str](), 0
    names = [name for name in SCHEDULES if name not in (COMPOSED_NAME, CUSTOM_NAME)]
    for case in MODELS:
        expected = _plain(setting, case, Training())
        for name in names:
            found = _split(setting, case, Training(), stages=stages, schedule=name)
            wrong += [f"{case.name} in {name}: {what}" for what in expected.differences(found)][:1]
            tried += 1
    return Finding({"runs": tried}, tuple(wrong))


def features(setting: Setting) -> Finding:
    """Runs two stages with autocast, with a GradScaler, with clipping, and with all of them."""
    kind = setting.device.type
    autocast = partial(torch.autocast, kind, dtype=torch.bfloat16)
    scaler = partial(torch.amp.GradScaler, kind, init_scale=1024.0)
    trainings = {
        "autocast": Training(autocast=autocast),
        "scaler": Training(scaler=scaler),
        "clipping": Training(clip_norm=0.01),
        "all": Training(autocast=autocast, scaler=scaler, clip_norm=0.01),
    }
    wrong = list[str]()
    for case in (PERCEPTRON, CONVOLUTIONS):
        for name, training in trainings.items():
            expected = _plain(setting, case, training)
            found = _split(setting, case, training, stages=STAGES_ALONE)
            wrong += [f"{case.name} with {name}: {what}" for what in expected.differences(found)][:1]
    return Finding({"runs": 2 * len(trainings)}, tuple(wrong))


def replicas(setting: Setting) -> Finding:
    """Runs a replica of the model in each process."""
    return _axis(setting, PERCEPTRON, dp_replicate=setting.world.world_size)


def shards(setting: Setting) -> Finding:
    """Runs the model with its weights sharded over the processes."""
    return _axis(setting, PERCEPTRON, dp_shard=setting.world.world_size)


def tensor_parallel(setting: Setting) -> Finding:
    """Runs each layer divided over the processes."""
    return _axis(setting, PERCEPTRON, tp=setting.world.world_size, batches=1)


def _axis(setting: Setting, case: DeviceModel, *, batches: int = 0, **axis: int) -> Finding:
    ranks = setting.world.world_size
    expected = _plain(setting, case, Training(microbatches=ranks))
    found = _split(setting, case, Training(microbatches=batches * ranks or 1), stages=1, **axis)
    if setting.world.rank:
        return Finding()
    difference = expected.relative_difference(found)
    wrong = () if difference <= ROUNDING else (f"weights by {difference:.3g}",)
    return Finding({"relative_difference": difference}, wrong)


def offload(setting: Setting) -> Finding:
    """Trains with the weights on the host, and measures how much of their copies hides behind the kernels."""
    case, training = PERCEPTRON, Training()
    expected = _plain(setting, case, training)
    figures, seconds = dict[str, float](), dict[str, float]()
    plans = {kept: _offload_plan(setting, case, kept) for kept in ("resident", "host")}
    wrong = expected.differences(_split(setting, case, training, plan=plans["host"]))
    x, y = _batch(setting, case)
    for kept, plan in plans.items():
        places: dict[str, Any] = {"devices": [str(setting.device)]} if kept == "resident" else {}
        engine = parallelize(case.build(setting.width), **_example(setting, case), plan=plan, **places)
        seconds[kept] = setting.seconds(lambda engine=engine: engine.step(x, target=y, update=False))
        figures[f"{kept}_step_s"] = seconds[kept]
    moved = 2 * training.microbatches * sum(p.nbytes for p in case.build(setting.width).parameters())
    pinned = torch.empty(moved, dtype=torch.uint8).pin_memory()
    there = torch.empty(moved, dtype=torch.uint8, device=setting.device)
    copies_s = setting.seconds(lambda: there.copy_(pinned, non_blocking=True))
    hidden_s = seconds["resident"] + copies_s - seconds["host"]
    figures["overlap"] = max(0.0, min(1.0, hidden_s / min(copies_s, seconds["resident"])))
    return Finding(figures, wrong)


def _offload_plan(setting: Setting, case: DeviceModel, kept: Any) -> Plan:
    options: dict[str, Any] = {"cluster": "1x12GB", "weights": kept, "microbatches": 4}
    return make_plan(case.build(setting.width), **_example(setting, case), **options)


def _plain(setting: Setting, case: DeviceModel, training: Training) -> Trained:
    with _repeatable():
        model = case.build(setting.width).to(setting.device)
        return plain_loop.train(model, _batch(setting, case), case.loss_fn, training)


def _split(setting: Setting, case: DeviceModel, training: Training, **layout: Any) -> Trained:
    """Trains by outsize and returns losses and all weights; on other ranks than 0 no weights."""
    with _repeatable():
        x, y = _batch(setting, case)
        plan = layout.get("plan")
        if plan is None:
            layout = {"microbatches": training.microbatches, **layout}
        engine = parallelize(
            case.build(setting.width),
            optimizer=lambda parameters: plain_loop.sgd(list(parameters)),
            clip_norm=training.clip_norm,
            scaler=None if training.scaler is None else training.scaler(),
            **_example(setting, case),
            **_places(setting, layout.get("stages", 1), plan),
            **layout,
        )
        losses = list[float]()
        for _ in range(training.steps):
            with training.autocast():
                losses.append(float(engine.step(x, target=y).loss))
        state = engine.full_state_dict() or {}
    names = dict(case.build(setting.width).named_parameters())
    return Trained(tuple(losses), {name: t.cpu() for name, t in state.items() if name in names})


def _example(setting: Setting, case: DeviceModel) -> dict[str, Any]:
    x, y = case.batch(setting.width)
    return {"args": (x,), "loss_fn": case.loss_fn, "target": y}


def _places(setting: Setting, stages: int, plan: Plan | None) -> dict[str, Any]:
    """Returns the option that puts all stages on this device, unless each has a process or a plan's own."""
    if not setting.is_alone or plan is not None:
        return {}
    return {"devices": [str(setting.device)] * stages}


def _batch(setting: Setting, case: DeviceModel) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = case.batch(setting.width)
    return x.to(setting.device), y.to(setting.device)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Asks for kernels whose sums always have one order, in both runs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
