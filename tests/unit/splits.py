"""Cut a small model everywhere it may be cut, and compare with the plain loop: loss, gradients, buffers,
parameters after a step, and the outputs of an evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from recorded_once import recorded_once
from torch import Tensor, nn

import outsize
from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.recording.fallbacks import record
from outsize.ir.answers.verdict import Verdict
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.program.tape import Instruction
from outsize.program.tree import leaves
from outsize.train.batch.batch import Batch, as_target
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine


def energy(output: Any, *target: Any) -> Tensor:
    """A loss of any output: the mean squares of its floating tensors, added up."""
    found = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    parts = [t.abs().square().mean() for t in found if t.is_floating_point() or t.is_complex()]
    return torch.stack(parts).sum()


def captured(
    model: nn.Module, *args: Any, loss_fn: Any = energy, target: tuple[Any, ...] = (), **kwargs: Any
) -> Captured:
    """The model recorded with a loss."""
    return build_graph(record(model, args, kwargs, loss_fn, target), model)


def named(found: Captured, name: str) -> Instruction:
    """The one instruction of this name."""
    (only,) = [i for i in found.tape.instructions if i.name == name]
    return only


def plan_of(graph: ModelGraph, bounds: tuple[int, ...], batch_size: int, microbatches: int) -> Plan:
    """A hand-made plan: stage s has the units `bounds[s] .. bounds[s + 1] - 1`."""
    count = len(bounds) - 1
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{count}xcpu",
        axes=Axes(pp=count),
        batch_size=batch_size,
        microbatches=microbatches,
        schedule="1f1b",
        stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{i}" for i in range(count))),
    )


def check_every_cut(
    model: nn.Module,
    *args: Any,
    loss_fn: Any = energy,
    target: Any = None,
    microbatches: int = 2,
    steps: int = 1,
    outputs: bool = True,
    **kwargs: Any,
) -> Captured:
    """Assert that every cut into two, and the cut into single units, give the plain loop's bits.

    Outputs of an evaluation are compared at the first cut and at the last, which has the boundaries of all.
    What the check of the first cut has recorded the others share.
    """
    batch = Batch(args, kwargs, as_target(target))
    part = batch.split(microbatches)[0]
    found = captured(model, *part.args, loss_fn=loss_fn, target=part.target, **part.kwargs)
    cuts = list(_all_bounds(len(found.graph.units)))
    for bounds in cuts:
        plan = plan_of(found.graph, bounds, batch.size, microbatches)
        with nullcontext() if bounds == cuts[0] else recorded_once():
            verdict = outsize.check(
                model, args, kwargs, plan=plan, loss_fn=loss_fn, target=target, steps=steps
            )
        assert verdict.bit_equal, describe(verdict)
        if outputs and bounds in (cuts[0], cuts[-1]):
            _insist_on_outputs(model, plan, batch, loss_fn)
    return found


def _all_bounds(units: int) -> Iterator[tuple[int, ...]]:
    yield from ((0, cut, units) for cut in range(1, units))
    if units > 2 or units == 1:
        yield tuple(range(units + 1))


def _insist_on_outputs(model: nn.Module, plan: Plan, batch: Batch, loss_fn: Any) -> None:
    plain = copy.deepcopy(model).eval()
    engine = make_engine(copy.deepcopy(model), plan, None, EngineOptions(loss_fn=loss_fn))
    target = batch.target or None
    result = engine.evaluate(*batch.args, target=target, **batch.kwargs)
    assert result.outputs is not None
    for part, output in zip(batch.split(plan.microbatches), result.outputs, strict=True):
        with torch.no_grad():
            expected = plain(*part.args, **part.kwargs)
        insist_on_same(expected, output)


def insist_on_same(expected: Any, found: Any) -> None:
    """Same structure, same bits."""
    assert type(expected) is type(found), (type(expected), type(found))
    for a, b in zip(leaves(expected), leaves(found), strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b), (a, b)
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        else:
            assert a == b


def describe(verdict: Verdict) -> str:
    """What differs, and where it was cut."""
    return (
        f"loss {verdict.loss_diff}, grads {verdict.grad_diff}, buffers {verdict.buffer_diff}, parameters "
        f"{verdict.parameter_diff}; first {verdict.first_divergence}; stages {verdict.stages}"
    )
