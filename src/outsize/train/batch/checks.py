"""Checks before a step, so that the user reads a message instead of a traceback from inside torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.recording.weight_cache import is_caching
from outsize.errors import BadOption, ModelMismatch
from outsize.errors.arguments import is_number, shown
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.units.names import prefixes, unroll
from outsize.program.tape import Meta, Tape
from outsize.run.host.optimizer_step import steps_in_parts
from outsize.run.host.speculative_step import Speculation
from outsize.train.batch.batch import Batch

_OPTIMIZER = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"


def insist_on_loss(tape: Tape) -> None:
    """Raises BadOption when the tape has no loss to run a backward from."""
    insist_on_gradient(tape.metas[tape.loss.slot] if tape.loss is not None else None)


def insist_on_gradient(loss: Any) -> None:
    """Raises BadOption when the loss is missing, is no tensor or does not require a gradient."""
    if loss is None:
        raise BadOption(
            "a training step needs a loss, and the model returns none",
            next_step="pass loss_fn=... and target=..., or labels among the model's arguments",
        )
    if not isinstance(loss, Meta | Tensor):
        raise BadOption(
            f"the loss is a {type(loss).__name__}; it must be a tensor, from which gradients follow",
            next_step="return the loss itself, without .item(), float() or numpy()",
        )
    if not loss.requires_grad:
        raise BadOption(
            "the loss depends on no trainable parameter, so nothing would be trained",
            next_step="look for requires_grad_(False), detach() or torch.no_grad() on the way to the loss",
        )


def insist_on_step_options(update: Any, loss_scale: Any, gather: Any) -> None:
    """Raises BadOption for options of a step that say nothing."""
    insist_on_flag("update", update)
    if not is_number(loss_scale) or not math.isfinite(loss_scale):
        raise BadOption(
            f"loss_scale={loss_scale!r} is a {type(loss_scale).__name__} that scales no loss",
            next_step="loss_scale=1 / 4 for a mean over four accumulated steps; "
            "fp16 has outsize.Loss(..., scaler=GradScaler())",
        )
    if gather not in (True, False, "outputs"):
        raise BadOption(
            f"gather={gather!r} says nothing",
            next_step='gather=True for the losses of the microbatches, "outputs" for outputs as well',
        )


def insist_on_evaluation_options(gather: Any) -> None:
    """Raises BadOption for options of an evaluation that say nothing."""
    if gather not in (True, False, "losses"):
        raise BadOption(
            f"gather={shown(gather)} says nothing",
            next_step='gather=True for outputs on every rank, "losses" for the losses of the microbatches',
        )


def insist_on_flag(name: str, value: Any) -> None:
    """Raises BadOption for what is neither true nor false; None and a text would count as one of them."""
    if value not in (True, False):
        raise BadOption(f"{name}={shown(value)} says nothing", next_step=f"{name}=True, or False")


def insist_on_norm(name: str, norm: Any, next_step: str) -> None:
    """Raises BadOption for a norm that is no positive number; torch would turn gradients around."""
    if not is_number(norm) or norm <= 0:
        raise BadOption(
            f"{name}={shown(norm)} is no norm that gradients can have",
            numbers="a number above 0; infinity only measures",
            next_step=next_step,
        )


def insist_on_names_of(names: Any, known: Collection[str]) -> None:
    """Raises BadOption for names of parameters that no rank trains, and for what is no list of names."""
    unknown = [names] if isinstance(names, str) else [name for name in names if name not in known]
    if unknown:
        raise BadOption(
            f"names has {shown(unknown[0])}, which is no list of names"
            if isinstance(names, str)
            else f"names has {shown(unknown[0])}, which is no trained parameter of the model",
            numbers=f"{len(known)} are trained: {', '.join(list(known)[:3])}, ...",
            next_step="names=[name for name, _ in model.named_parameters() if ...]",
        )


def insist_on_own_weights() -> None:
    """Raises BadOption in `parametrize.cached()`, where the backward of the first microbatch frees the graph
    of the weights that the second one uses.
    """
    if is_caching():
        raise BadOption(
            "a training step in parametrize.cached() would use the weights' graph once for each microbatch",
            next_step="call step() outside of it, and open the cache in the model's forward",
        )


def insist_on_values(named: Iterable[tuple[str, Tensor]], batch: Batch) -> None:
    """Raises BadOption when weights (parameters or buffers) or inputs are on meta."""
    missing = next((name for name, weight in named if weight.is_meta), None)
    if missing is not None:
        raise BadOption(
            f"weight {missing} is on meta and has no values",
            next_step="weight_files='FOLDER or FILE.safetensors', or model.load_state_dict(..., assign=True)",
        )
    if any(t.is_meta for t in batch.tensors()):
        raise BadOption("an input is on meta and has no values", next_step="pass a real batch")


def insist_on_model(plan: Plan, graph: ModelGraph) -> None:
    """Raises ModelMismatch when the plan is of another model, BadPlan where it does not say of which.

    The same model has other units with another loss, mode or input; then each stage of the plan still finds
    some of its own units, and the weights are as many as those that were planned for.
    """
    if plan.fingerprint == graph.fingerprint:
        return
    planned = _planned_parameters(plan)
    here = sum(p.count for p in graph.parameters if p.name in graph.owner_of)
    if plan.model == graph.model and planned not in (None, here):
        raise ModelMismatch(
            f"the plan was made for a {plan.model} of {planned:,} parameters, and this one has {here:,}",
            numbers=f"fingerprint {plan.fingerprint} against {graph.fingerprint}",
            next_step="outsize plan MODEL --out plan.json with this model, or leave out plan=",
        )
    names = {pattern for unit in graph.units for pattern in prefixes(unit.name)}
    most = len(graph.units)
    missing = [s for s in plan.stages if names.isdisjoint(name for p in s.units for name in unroll(p, most))]
    if plan.model != graph.model or missing or not plan.fingerprint:
        plan.check_model(graph)


def _planned_parameters(plan: Plan) -> int | None:
    """Returns the number of parameters that a plan was made for; None for a plan without figures."""
    return None if plan.expected is None else sum(stage.parameters for stage in plan.expected.stages)


def made_optimizer(
    make: Callable[[Any], Any],
    own: list[nn.Parameter],
    every: Collection[nn.Parameter],
    device: torch.device | None = None,
) -> Optimizer:
    """Returns the user's optimizer over the parameters that a rank owns, of `every` one of the model.

    Where the function makes a group of some weights (those of two dims, say), such a group may have no weight
    on this rank, which torch refuses: then an empty weight stands in for each form of weight that other ranks
    have, as for a rank that owns nothing at all. Schedules of learning rates want an optimizer on every rank.
    Raises BadOption when `make` does not return an optimizer of the model's weights.
    """
    if not callable(make):
        raise BadOption(
            f"optimizer is a {type(make).__name__}; it must be a function from parameters to an optimizer",
            next_step=_OPTIMIZER,
        )
    if not _takes_parameters(make):
        raise BadOption(
            "optimizer is a function that cannot be called with the parameters alone", next_step=_OPTIMIZER
        )
    mine = {id(parameter) for parameter in own}
    others = [parameter for parameter in every if id(parameter) not in mine]
    try:
        optimizer = make(own or [nn.Parameter(torch.empty(0, device=device))])
    except ValueError:
        if not others:
            raise
        optimizer = make([*own, *_stand_ins(others, device)])
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad")):
        raise BadOption(
            f"the optimizer function returned {type(optimizer).__name__}, no optimizer", next_step=_OPTIMIZER
        )
    _insist_on_weights_of_the_model(optimizer, own, every)
    return optimizer


def _takes_parameters(make: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C
        return True
    try:
        signature.bind(())
    except TypeError:
        return False
    return True


def _stand_ins(weights: Collection[nn.Parameter], device: torch.device | None) -> list[nn.Parameter]:
    """Returns an empty parameter for each number of dims, dtype and flag that weights have."""
    forms = dict.fromkeys((max(1, w.ndim), w.dtype, w.requires_grad) for w in weights)
    return [
        nn.Parameter(torch.empty([0] * ndim, dtype=dtype, device=device), requires_grad=trained)
        for ndim, dtype, trained in forms
    ]


def _insist_on_weights_of_the_model(
    optimizer: Any, own: Collection[nn.Parameter], every: Collection[nn.Parameter]
) -> None:
    """Raises BadOption where an optimizer has weights, and none of them is a weight of the model."""
    known = {id(parameter) for parameter in (*own, *every)}
    groups = getattr(optimizer, "param_groups", ())
    held = [p for group in groups for p in group["params"] if isinstance(p, Tensor) and p.numel()]
    if held and own and not any(id(parameter) in known for parameter in held):
        raise BadOption(
            "no weight of the optimizer is one of the model's, so nothing would be trained",
            numbers=f"{len(held)} parameters of {type(optimizer).__name__}, {len(own)} of the model here",
            next_step=_OPTIMIZER,
        )


def wants_closure(optimizer: Optimizer | None) -> bool:
    """Returns whether the optimizer's step cannot be called without a closure that evaluates the batch."""
    if optimizer is None:
        return False
    step: Any = optimizer.step
    function = getattr(step, "__func__", step)
    return (
        _needs_closure(function) if isinstance(function, FunctionType) else _needs_closure.__wrapped__(step)
    )


@lru_cache(maxsize=64)
def _needs_closure(step: Callable[..., Any]) -> bool:
    """Reads the signature of a step, which every training step asks for, once for each function."""
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def insist_on_closure(optimizer: Optimizer, processes: int, *, scaled: bool) -> None:
    """Raises BadOption for an optimizer that wants a closure, where its numbers would be others."""
    if wants_closure(optimizer) and (processes > 1 or scaled):
        raise refused_closure(type(optimizer).__name__, processes, scaled=scaled)


def refused_closure(kind: str, processes: int, *, scaled: bool = False) -> BadOption:
    """Returns the error for an optimizer that evaluates the batch, which all ranks raise."""
    error = BadOption(
        f"{kind} takes each step from all weights together, by evaluating the batch several times",
        numbers="a GradScaler cannot skip a part of it" if scaled else f"{processes} ranks share them",
        next_step="an optimizer that treats each weight by itself, such as AdamW, or one process "
        "without a GradScaler",
    )
    return error.on_all_ranks()


def insist_on_exchange(optimizer: Any, weights: Iterable[nn.Parameter], processes: int) -> None:
    """Raises BadOption for an optimizer that takes the place of an engine's own and would not step as it does
    in one process: over several processes, or over other weights than the engine's.
    """
    known = {id(weight) for weight in weights}
    stepped = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    foreign = sum(id(p) not in known for p in stepped)
    if processes == 1 and stepped and not foreign:
        return
    own = f"{len(stepped) - foreign} of its {len(stepped)} weights are the engine's"
    raise BadOption(
        f"the optimizer of an engine is exchanged for another {type(optimizer).__name__}",
        numbers=f"{processes} processes share the weights" if processes > 1 else own,
        next_step="parallelize(optimizer=lambda weights: ...), once; its groups may change: "
        "engine.optimizer.param_groups",
    )


def insist_on_parts(optimizer: Optimizer, speculation: Speculation | None) -> None:
    """Raises BadOption when steps may have to be undone and this optimizer cannot step in parts."""
    if speculation is not None and not steps_in_parts(optimizer):
        raise BadOption(
            f"clipping='speculative' wants an optimizer that steps in parts, and {type(optimizer).__name__} "
            "steps once",
            numbers="in parts: those of torch.optim, but for LBFGS, and without hooks on their step",
            next_step="clipping='exact'",
        )
