"""Which models a trainer's own Python calls, and the engines by which their calls run over stages.

trainer.model        trained; planned for an update: as many calls as it has batches, each of one microbatch
trainer.ref_model    what else it holds, a reference or a teacher: forwards alone, over as many stages
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from torch import nn

from outsize.api.records import Request
from outsize.capture.graph.by_modules import unit_modules
from outsize.device.accelerators import is_accelerator
from outsize.device.malloc import keep_freed_memory
from outsize.integrations.split_options import batches_of_replica, split_into
from outsize.ir.plan import Plan
from outsize.ops.training import parallelize
from outsize.train.batch.batch import Batch
from outsize.train.batch.samples import lists_in
from outsize.train.engine.engine import Engine
from outsize.train.split.calls import insist_on_calls, tell_of_modules

_DECIDED: Final = frozenset({"cluster", "stages", "microbatches", "axes"})


def models_beside(trainer: object, trained: nn.Module, stages: int) -> list[nn.Module]:
    """Returns the models besides the trained one that a trainer holds, and that have so many stages.

    A part of the trained model is none of them, nor is what holds it.
    """
    own = set(map(id, trained.parameters()))
    found: dict[int, nn.Module] = {}
    for value in vars(trainer).values():
        if isinstance(value, nn.Module):
            weights = {id(weight) for weight in value.parameters()}
            if weights and not weights & own and len(unit_modules(value)) >= stages:
                found[id(value)] = value
    return list(found.values())


def stages_in(options: Mapping[str, Any]) -> int | None:
    """Returns how many stages these options ask for; None where they do not say it."""
    plan = options.get("plan")
    if isinstance(plan, Plan):
        return plan.axes.pp
    return options.get("stages") or Request.of(plan, "plan").stages


def beside(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a model beside the one for which these are: a plan is that of one model."""
    plan = options.get("plan")
    if not isinstance(plan, Plan):
        return dict(options)
    layout = {"stages": plan.axes.pp, "microbatches": plan.microbatches}
    return {name: value for name, value in options.items() if name != "plan"} | layout


def has_weights_of(one: nn.Module, other: nn.Module) -> bool:
    """Tells whether two models have weights of the same names, shapes and types."""
    first, second = ([(n, w.shape, w.dtype) for n, w in each.named_parameters()] for each in (one, other))
    return first == second


def planned(options: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns options with a plan that has decided some of them."""
    return {name: value for name, value in options.items() if name not in _DECIDED} | {"plan": plan}


def called_engine(model: nn.Module, example: Batch, count: int, options: Mapping[str, Any]) -> Engine:
    """Returns the engine of a model that a loop calls `count` times for each update, each time with as many
    samples as the example has.

    Raises what `parallelize` raises, and UnsupportedPlan for a plan whose calls are no part of a graph.
    """
    samples, own = count * example.size, dict(options)
    if not isinstance(own.get("plan"), Plan):
        own = split_into(own, batches_of_replica(own, count, example.size), samples)
        own["plan"] = replace(own["plan"], loop=True)
    # Where others have other numbers of rows, as patches of images, or a list has an item for each sample,
    # `parallelize` finds the samples'.
    is_plain = all(tensor.shape[:1] in ((), (example.size,)) for tensor in example.tensors())
    is_plain &= not any(len(part) == example.size for _, part in lists_in(example.tree()))
    whole = example.resized(samples) if is_plain else example
    engine = parallelize(model, whole.args, whole.kwargs, **own)
    insist_on_calls(engine.plan, engine.crew.local_replicas)
    tell_of_modules(engine.plan, engine.rank)
    if not is_accelerator(engine.plan.stages[0].device):
        keep_freed_memory()  # As in outsize.split: gradients of all weights come for each microbatch anew.
    return engine


@contextmanager
def generating_over_ranks(engine: Engine) -> Iterator[None]:
    """Lets code call `generate` of the model, as a step of Seq2SeqTrainer does: module by module, each where
    its weights are.
    """
    model: Any = engine.model
    really = getattr(model, "generate", None)
    if not callable(really) or engine.crew.world_size == 1:
        yield
        return

    @functools.wraps(really)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with engine.by_modules():
            return really(*args, **kwargs)

    before = vars(model).get("generate")
    vars(model)["generate"] = generate
    try:
        yield
    finally:
        del vars(model)["generate"]
        if before is not None:
            vars(model)["generate"] = before
