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

from outsize.api.planning import plan as make_plan
from outsize.api.records import Loss
from outsize.axes.axis import Axis
from outsize.axes.replicate import REPLICATE
from outsize.axes.shard import SHARD
from outsize.axes.tensor import TENSOR
from outsize.errors import TooManyStages
from outsize.ir.plan import Plan
from outsize.ops.doctor import plain_loop
from outsize.ops.doctor.check_place import CheckAnswer, CheckPlace
from outsize.ops.doctor.models import CONVOLUTIONS, MODELS, PERCEPTRON, TIED, DeviceModel
from outsize.ops.doctor.plain_loop import Trained, Training
from outsize.ops.training import parallelize
from outsize.policies.weights import HOST, RESIDENT
from outsize.schedules.families import built

ROUNDING: Final = 1e-4
"""Relative to a tensor's largest element, after two steps in float32."""
STAGES_ALONE: Final = 2


def schedules_alone(place: CheckPlace) -> CheckAnswer:
    """Runs all models in every schedule, with two stages on this device."""
    return _schedules(place, STAGES_ALONE)


def schedules_together(place: CheckPlace) -> CheckAnswer:
    """Runs all models in every schedule over all processes: a tied weight and skips cross several stages."""
    return _schedules(place, place.world.world_size)


def _schedules(place: CheckPlace, stages: int) -> CheckAnswer:
    wrong, tried = list[str](), 0
    names = built()
    for case in MODELS:
        expected = _plain(place, case, Training())
        for name in names:
            try:
                found = _split(place, case, Training(), stages=stages, schedule=name)
            except TooManyStages:  # The schedule wants several stages on each device.
                continue
            wrong += [f"{case.name} in {name}: {what}" for what in expected.differences(found)][:1]
            tried += 1
    return CheckAnswer({"runs": tried}, tuple(wrong))


def features(place: CheckPlace) -> CheckAnswer:
    """Runs two stages with autocast, with a GradScaler, with clipping, and with all of them."""
    kind = place.device.type
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
            expected = _plain(place, case, training)
            found = _split(place, case, training, stages=STAGES_ALONE)
            wrong += [f"{case.name} with {name}: {what}" for what in expected.differences(found)][:1]
    return CheckAnswer({"runs": 2 * len(trainings)}, tuple(wrong))


def replicas(place: CheckPlace) -> CheckAnswer:
    """Runs a replica of the model in each process."""
    return _axis(place, PERCEPTRON, REPLICATE)


def shards(place: CheckPlace) -> CheckAnswer:
    """Runs the model with its weights sharded over the processes."""
    return _axis(place, PERCEPTRON, SHARD)


def tensor_parallel(place: CheckPlace) -> CheckAnswer:
    """Runs each layer divided over the processes."""
    return _axis(place, TIED, TENSOR, batches=1)


def _axis(place: CheckPlace, case: DeviceModel, axis: Axis, *, batches: int = 0) -> CheckAnswer:
    ranks = place.world.world_size
    expected = _plain(place, case, Training(microbatches=ranks))
    found = _split(
        place, case, Training(microbatches=batches * ranks or 1), stages=1, axes={axis.name: ranks}
    )
    if place.world.rank:
        return CheckAnswer()
    difference = expected.relative_difference(found)
    wrong = () if difference <= ROUNDING else (f"weights by {difference:.3g}",)
    return CheckAnswer({"relative_difference": difference}, wrong)


def offload(place: CheckPlace) -> CheckAnswer:
    """Trains with the weights on the host, and measures how much of their copies hides behind the kernels."""
    case, training = PERCEPTRON, Training()
    expected = _plain(place, case, training)
    figures, seconds = dict[str, float](), dict[str, float]()
    plans = {kept: _offload_plan(place, case, kept) for kept in (RESIDENT.name, HOST.name)}
    wrong = expected.differences(_split(place, case, training, plan=plans[HOST.name]))
    x, y = _batch(place, case)
    for kept, plan in plans.items():
        on_device = not plan.weight_policy.on_host
        places: dict[str, Any] = {"devices": [str(place.device)]} if on_device else {}
        engine = parallelize(case.build(place.width), **_example(place, case), plan=plan, **places)
        seconds[kept] = place.seconds(lambda engine=engine: engine.step(x, target=y, update=False))
        figures[f"{kept}_step_s"] = seconds[kept]
    moved = 2 * training.microbatches * sum(p.nbytes for p in case.build(place.width).parameters())
    pinned = torch.empty(moved, dtype=torch.uint8).pin_memory()
    there = torch.empty(moved, dtype=torch.uint8, device=place.device)
    copies_s = place.seconds(lambda: there.copy_(pinned, non_blocking=True))
    resident_s = seconds[RESIDENT.name]
    hidden_s = resident_s + copies_s - seconds[HOST.name]
    figures["overlap"] = max(0.0, min(1.0, hidden_s / min(copies_s, resident_s)))
    return CheckAnswer(figures, wrong)


def _offload_plan(place: CheckPlace, case: DeviceModel, kept: Any) -> Plan:
    options: dict[str, Any] = {"cluster": "1x12GB", "weights": kept, "microbatches": 4}
    return make_plan(case.build(place.width), **_example(place, case), **options)


def _plain(place: CheckPlace, case: DeviceModel, training: Training) -> Trained:
    with _repeatable():
        model = case.build(place.width).to(place.device)
        return plain_loop.train(model, _batch(place, case), case.loss_fn, training)


def _split(place: CheckPlace, case: DeviceModel, training: Training, **layout: Any) -> Trained:
    """Trains by outsize and returns losses and all weights; on other ranks than 0 no weights."""
    with _repeatable():
        x, y = _batch(place, case)
        plan, scaler = layout.get("plan"), None if training.scaler is None else training.scaler()
        if plan is None:
            layout = {"microbatches": training.microbatches, **layout}
        engine = parallelize(
            case.build(place.width),
            optimizer=lambda parameters: plain_loop.sgd(list(parameters)),
            clip_norm=training.clip_norm,
            **_example(place, case) | {"loss_fn": Loss(case.loss_fn, scaler=scaler)},
            **_places(place, layout.get("stages", 1), plan),
            **layout,
        )
        losses = list[float]()
        for _ in range(training.steps):
            with training.autocast():
                losses.append(float(engine.step(x, target=y).loss))
        state = engine.weights.full_state_dict() or {}
    names = dict(case.build(place.width).named_parameters())
    return Trained(tuple(losses), {name: t.cpu() for name, t in state.items() if name in names})


def _example(place: CheckPlace, case: DeviceModel) -> dict[str, Any]:
    x, y = case.batch(place.width)
    return {"args": (x,), "loss_fn": case.loss_fn, "target": y}


def _places(place: CheckPlace, stages: int, plan: Plan | None) -> dict[str, Any]:
    """Returns the option that puts all stages on this device, unless each has a process or a plan's own."""
    if not place.is_alone or plan is not None:
        return {}
    return {"devices": [str(place.device)] * stages}


def _batch(place: CheckPlace, case: DeviceModel) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = case.batch(place.width)
    return x.to(place.device), y.to(place.device)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Asks for kernels whose sums always have one order, in both runs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
