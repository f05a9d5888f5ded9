"""Break one rule of exactness on purpose: `outsize.check` must say so, and say equal without the fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from parity_runs import BATCH_SIZE, SEED, Combination, batch_of, captured, fresh, planned
from zoo import case, tokens

import outsize
from outsize.ir.answers.verdict import Verdict
from outsize.ir.schedule import Kind, Schedule
from outsize.run.stage.boundary import Boundary
from outsize.run.stage.rng import seeder
from outsize.run.stage.stage import Gradients, StageExecutor
from outsize.schedules.builders import build
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import LossShares
from outsize.train.check.compare import PlainLoop, adamw, compare, engine_snapshot, reference_snapshot
from outsize.train.context.options import EngineOptions
from outsize.train.crew import crew
from outsize.train.engine import pipelined
from outsize.train.engine.factory import make_engine
from outsize.train.variants import variant

pytestmark = pytest.mark.usefixtures("shared_recordings")

Patch = pytest.MonkeyPatch


def verdict(name: str, stages: int = 3, dropout: bool = False, steps: int = 1, **options: Any) -> Verdict:
    """`outsize.check` of a zoo model."""
    found = case(name)
    args, kwargs = found.batch(BATCH_SIZE)
    return outsize.check(
        fresh(name, dropout),
        args,
        kwargs,
        stages=stages,
        loss_fn=found.loss,
        target=found.target(BATCH_SIZE),
        steps=steps,
        **options,
    )


@cache
def healthy(name: str, stages: int = 3, dropout: bool = False) -> bool:
    """The same question without a fault."""
    return verdict(name, stages, dropout).bit_equal


# -- the faults -----------------------------------------------------------------------------------------

Backward = Callable[[StageExecutor, int, float, Gradients], Gradients]
backward: Backward = StageExecutor.backward


def drop_tied_gradients(
    stage: StageExecutor, microbatch: int, weight: float, gradients: Gradients
) -> Gradients:
    """Law 3 broken: the owner of a tied weight does not hear of its other use."""
    kept = {key: g for key, g in gradients.items() if key not in stage._own}
    return backward(stage, microbatch, weight, kept)


def add_at_the_end(stage: StageExecutor, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
    """Law 2 broken: a later consumer's part is added to this stage's when that is complete."""
    received = {b.key for b in stage.program.received if b.weight is None}
    later = {key: g for key, g in gradients.items() if key in received and g is not None}
    sink = backward(stage, microbatch, weight, {k: g for k, g in gradients.items() if k not in later})
    for key, part in later.items():
        own = sink.get(key)
        sink[key] = part if own is None else own + part
    return sink


forward = StageExecutor.forward


def run_twice(stage: StageExecutor, *args: Any) -> Any:
    """Law 5 broken: a hidden extra forward, as a careless recompute would do."""
    with torch.no_grad():
        stage._function(*(args[1][p] for p in stage.program.inputs), *args[2], args[3])
    return forward(stage, *args)


def backward_in_reverse(name: Any, stages: int, microbatches: int, ranks: int, *_: Any) -> Schedule:
    """Law 1 broken: GPipe with the backwards from the last microbatch to the first."""
    made = build(name, stages, microbatches, ranks)
    rows = []
    for row in made.actions:
        turned = iter([a for a in row if a.kind is Kind.B][::-1])
        rows.append(tuple(next(turned) if a.kind is Kind.B else a for a in row))
    return Schedule(made.name, microbatches, tuple(rows))


# -- each is found ---------------------------------------------------------------------------------------


def test_a_dropped_tied_gradient_is_found(monkeypatch: Patch) -> None:
    assert healthy("gpt2")
    monkeypatch.setattr(StageExecutor, "backward", drop_tied_gradients)
    found = verdict("gpt2")
    assert not found.bit_equal
    assert (found.loss_diff, found.buffer_diff) == (0, 0)
    assert found.grad_diff > 1e-4
    assert found.first_divergence == "lm_head (backward)", "the backward reaches the tied weight there first"


def a_chain(name: str, stages: int) -> Boundary:
    """A value of the model that several stages use."""
    from outsize.run.stage.cut import cut, in_runs

    found = captured(name, 4)
    plan = planned(Combination(name, 4, stages, "1f1b"))
    owners = in_runs([found.starts[u] for u in plan.bounds(found.graph)])
    made = cut(found.tape, fresh(name), owners, outputs=False)
    return next(b for b in made.boundaries if b.weight is None and len(b.consumers) > 1 and b.requires_grad)


def test_partial_gradients_added_at_the_end_are_found(monkeypatch: Patch) -> None:
    assert len(a_chain("t5", 4).consumers) > 1
    assert healthy("t5", 4)
    monkeypatch.setattr(StageExecutor, "backward", add_at_the_end)
    found = verdict("t5", 4)
    assert not found.bit_equal
    assert found.loss_diff == 0
    assert 0 < found.grad_diff < 1e-4, "only the order of the sum differs"
    assert (found.first_divergence or "").endswith("(backward)")


def test_a_second_forward_of_batchnorm_is_found(monkeypatch: Patch) -> None:
    assert healthy("unet")
    monkeypatch.setattr(StageExecutor, "forward", run_twice)
    found = verdict("unet")
    assert not found.bit_equal
    assert (found.loss_diff, found.grad_diff) == (0, 0), "the statistics of a batch do not show it"
    assert found.buffer_diff > 0
    assert found.first_divergence == "down1.1 (buffers)"


def test_a_shifted_generator_is_found(monkeypatch: Patch) -> None:
    assert healthy("gpt2", dropout=True)
    monkeypatch.setattr(pipelined, "seeder", lambda seed, step, mb: seeder(seed, step, mb + 1))
    found = verdict("gpt2", dropout=True)
    assert not found.bit_equal
    assert found.loss_diff > 1e-4
    assert found.first_divergence == "transformer.drop (forward)", "the first dropout"
    assert verdict("gpt2").bit_equal, "without dropout no random number is drawn"


def test_a_backward_out_of_order_is_found(monkeypatch: Patch) -> None:
    assert verdict("gpt2", schedule="gpipe").bit_equal
    monkeypatch.setattr(crew, "planned", backward_in_reverse)
    monkeypatch.setattr(crew, "check", lambda *_: None)
    found = verdict("gpt2", schedule="gpipe")
    assert not found.bit_equal
    assert found.loss_diff == 0
    assert 0 < found.grad_diff < 1e-4, "only the order of the sum differs"


def test_one_over_m_on_ragged_tokens_is_found() -> None:
    ids = tokens(BATCH_SIZE)
    lengths = torch.arange(BATCH_SIZE) % 7 + 3
    labels = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -100)
    batch = Batch((), {"input_ids": ids, "labels": labels})
    plan, tape = planned(Combination("gpt2", 4, 3, "1f1b")), captured("gpt2", 4).tape
    reference = reference_snapshot(fresh("gpt2"), tape, batch, PlainLoop(4, None, steps=1, seed=SEED))

    def split_with(counting: Any) -> Any:
        made = make_engine(
            fresh("gpt2"), plan, None, EngineOptions(optimizer=adamw, seed=SEED, counting=counting)
        )
        return compare(reference, engine_snapshot(made, batch, steps=1))

    assert split_with("auto").bit_equal
    found = split_with("samples")
    assert not found.bit_equal
    assert min(found.loss, found.grads, found.parameters) > 1e-5


def test_check_names_the_weights_of_microbatches(monkeypatch: Patch) -> None:
    """Law 4 broken: 1/M for microbatches of 4, 3, 3 and 3 samples."""
    args, kwargs = case("vit").batch(13)
    assert outsize.check(fresh("vit"), args, kwargs, stages=3).bit_equal
    equal = {"measured": lambda _shares, _part: [[1]], "limits": ((),)}
    monkeypatch.setattr(variant, "LossShares", type("EqualShares", (LossShares,), equal))
    found = outsize.check(fresh("vit"), args, kwargs, stages=3)
    assert not found.bit_equal
    assert found.first_divergence == "the loss (weights of microbatches)"


def test_compare_tells_missing_from_zero() -> None:
    wanted = Combination("mlp", 4, 2, "1f1b")
    found = engine_snapshot(
        make_engine(
            fresh("mlp"), planned(wanted), None, EngineOptions(loss_fn=case("mlp").loss, optimizer=adamw)
        ),
        batch_of(case("mlp")),
        steps=1,
    )
    assert compare(found, found).bit_equal
    name = next(iter(found.grads))
    without = type(found)(
        found.loss, {n: g for n, g in found.grads.items() if n != name}, {}, found.parameters
    )
    assert compare(found, without).grads == float("inf")
    assert compare(without, found).wrong_grads == {name}
    assert not compare(found, without).bit_equal
