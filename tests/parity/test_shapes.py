"""Every microbatch of its own shape, in one pipeline: bit-equal to the plain loop over the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_runs import fresh
from shapes_runs import NAMES, differing, engine_of, plain_step, steps_of
from torch import nn
from turns import in_turns

import outsize
from outsize.errors import BadOption
from outsize.train.engine.pipelined import Pipelined
from outsize.train.variants.variant import Variants

pytestmark = pytest.mark.usefixtures("shared_recordings")


def variants_of(engine: outsize.Engine) -> Variants:
    assert isinstance(engine._executor, Pipelined)
    return engine._executor.variants


@pytest.mark.parametrize(
    ("name", "schedule"), in_turns(NAMES, ["gpipe", "interleaved", "1f1b", "zero-bubble"], each=1)
)
@pytest.mark.sample("llama", "narrow_resnet18")
def test_each_microbatch_of_its_own_shape(name: str, schedule: str) -> None:
    model, plain = fresh(name), fresh(name)
    engine = engine_of(name, model, schedule)
    for parts in steps_of(name):
        found = engine.step([part for part, _ in parts], update=False)
        assert torch.equal(found.loss, plain_step(plain, name, parts))
        assert differing(engine, plain) == []


def test_recomputed_stages_take_any_shape() -> None:
    engine, plain = (
        engine_of("gpt2", fresh("gpt2"), "1f1b", plan=outsize.Request(recompute="full")),
        fresh("gpt2"),
    )
    for parts in steps_of("gpt2"):
        engine.step([part for part, _ in parts], update=False)
        plain_step(plain, "gpt2", parts)
        assert differing(engine, plain) == []


def test_they_run_in_one_pipeline_and_a_shape_is_captured_once() -> None:
    engine = engine_of("gpt2", fresh("gpt2"), "1f1b")
    (parts, *_), made = steps_of("gpt2"), variants_of(engine)._made
    for _ in range(3):
        engine.step([part for part, _ in parts], update=False)
    assert variants_of(engine)._made - made == 3  # three lengths and a short last; one was there already
    names = [s.action for s in engine.timeline().spans if s.lane == "compute" and s.rank == 0]
    # 1F1B's warm-up and steady state over all six, where a group for each shape would drain in between
    assert names[:4] == ["0F0", "0F1", "0B0", "0F2"]
    assert len(names) == 12


def test_a_batch_that_does_not_divide_is_one_pipeline_too() -> None:
    x = torch.randn(7, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    engine = outsize.parallelize(model, (x,), stages=2, microbatches=3, loss_fn=torch.sum, schedule="1f1b")
    engine.step(x)
    names = [s.action for s in engine.timeline().spans if s.lane == "compute" and s.rank == 0]
    assert names == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]


def test_more_shapes_than_are_kept_in_one_step_and_over_steps() -> None:
    model, plain = fresh("gpt2"), fresh("gpt2")
    engine = engine_of("gpt2", model, "1f1b", compiled=outsize.Compile(captures=2))
    for parts in (*steps_of("gpt2"), *steps_of("gpt2")):
        found = engine.step([part for part, _ in parts], update=False)
        assert torch.equal(found.loss, plain_step(plain, "gpt2", parts))
        assert len(variants_of(engine)) <= 2
        kept = {v.number for same in variants_of(engine)._known.values() for v in same}
        assert {number for number, *_ in engine.crew._executors} <= kept
        assert all(kept.issuperset(numbers) for numbers, *_ in engine.crew._built._values)
    assert differing(engine, plain) == []
    assert variants_of(engine)._made > 8, "what went was captured again"


def test_an_evaluation_gives_each_its_own_outputs() -> None:
    model = fresh("gpt2")
    engine = engine_of("gpt2", model, "1f1b")
    (parts, *_) = steps_of("gpt2")
    found = engine.evaluate([part for part, _ in parts])
    assert found.outputs is not None
    model.eval()
    with torch.no_grad():
        for (part, _), output in zip(parts, found.outputs, strict=True):
            assert torch.equal(model(**part.kwargs).logits, output.logits)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda e, p: e.step([p, torch.ones(2)]), "1 other items in it, 0 arguments beside it"),
        (lambda e, p: e.step([p], target=torch.ones(2)), "0 other items in it, 1 arguments beside it"),
        (lambda e, p: e.step([outsize.microbatch()]), "the batch holds no tensor"),
    ],
    ids=["mixed", "beside", "empty"],
)
def test_what_is_no_list_of_microbatches(call: Any, text: str) -> None:
    engine = engine_of("gpt2", fresh("gpt2"), "1f1b")
    with pytest.raises(BadOption, match=text):
        call(engine, steps_of("gpt2")[0][0][0])


def test_a_cache_of_nothing_is_refused() -> None:
    with pytest.raises(BadOption, match="captures=0 makes no sense; a whole number from"):
        engine_of("gpt2", fresh("gpt2"), "1f1b", compiled=outsize.Compile(captures=0))
