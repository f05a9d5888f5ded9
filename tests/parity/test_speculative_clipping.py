"""Steps that begin before the norm is known: the plain loop to the bit, if they stand or are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload_parity import adamw, ids, momentum, odd_engine, residency_of
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from turns import in_pairs

from outsize.errors import BadOption
from outsize.planner.advice.utilisation import utilisation
from outsize.policies.weights import HOSTED, Weights
from outsize.run.stage.stage import StageExecutor
from outsize.train.batch.batch import Batch
from outsize.train.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("shared_recordings")
STEPS = 4
# Largest norm -> steps of STEPS that are taken back, with AdamW; under 1e3 none is, over 1e-4 all are.
LIMITS: dict[str, tuple[float, range]] = {
    "under": (1e3, range(1)),
    "over": (1e-4, range(STEPS, STEPS + 1)),
    "both": (4.8, range(1, STEPS)),
}


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def clipped(weights: Weights, limit: float, **how: Any) -> Engine:
    """With its optimizer there from the first step on; steps of the host in a thread, as beside a GPU."""
    engine = odd_engine(weights, clip_norm=limit, **how)
    if weights in HOSTED:
        residency_of(engine).landing._pool = ThreadPoolExecutor(1)
    engine.prepare(Batch((ids(),), {}))
    return engine


def states(engine: Engine) -> Iterator[tuple[str, Any]]:
    """Of model and optimizer, by name."""
    assert engine.optimizer is not None
    yield from engine.weights.full_state_dict().items()
    for number, state in engine.optimizer.state_dict()["state"].items():
        yield from ((f"{number}.{key}", value) for key, value in state.items())


def trained(engine: Engine) -> Iterator[tuple[str, Any]]:
    """Without buffers, which forwards write."""
    buffers = {name for name, _ in engine.model.named_buffers()}
    return ((name, value) for name, value in states(engine) if name not in buffers)


def insist_on_same(ours: Engine, theirs: Engine) -> None:
    left, right = dict(states(ours)), dict(states(theirs))
    assert sorted(left) == sorted(right)
    assert [name for name in left if not same(left[name], right[name])] == []


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize(("limit", "make", "hosted"), in_pairs(LIMITS, [adamw, momentum, adafactor], HOSTED))
def test_bit_equal_to_steps_that_wait(limit: str, make: Any, hosted: Weights) -> None:
    most, expected = LIMITS[limit]
    ours = clipped(hosted, most, optimizer=make, clipping="speculative")
    theirs = clipped("resident", most, optimizer=make)
    for step in range(STEPS):
        norms = [torch.as_tensor(engine.step(ids(step)).grad_norm) for engine in (ours, theirs)]
        assert torch.equal(*norms)
        insist_on_same(ours, theirs)
    taken_back = residency_of(ours).landing.speculation
    assert taken_back is not None
    assert taken_back.steps == STEPS
    assert taken_back.taken_back in expected


@pytest.mark.parametrize("limit", list(LIMITS))
def test_after_accumulation_and_in_files(limit: str, tmp_path: Path) -> None:
    """Gradients of two steps; what is put by is in files as well, and rates change between steps."""
    most, _ = LIMITS[limit]
    ours = clipped("host", most, clipping="speculative", offload_folder=tmp_path)
    theirs = clipped("resident", most)
    for engine in (ours, theirs):
        assert engine.optimizer is not None
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        for step in range(4):
            engine.step(ids(step), update=step % 2 == 1)
            for _ in range(step % 2):
                scheduler.step()
    insist_on_same(ours, theirs)
    assert list(tmp_path.iterdir()) == []


def half(parameters: Any) -> torch.optim.Optimizer:
    """Over some of the parameters, as where another optimizer has the rest."""
    return adamw(list(parameters)[::2])


@pytest.mark.parametrize("hosted", HOSTED)
@pytest.mark.parametrize("how", [{}, {"clip_norm": 1e3}, {"clip_norm": 1e3, "clipping": "speculative"}])
@pytest.mark.sample("how0-host-optimizer", "how1-host", "how2-host-activations")
def test_gradients_that_the_optimizer_does_not_take_are_kept(hosted: Weights, how: dict[str, Any]) -> None:
    """They add up until somebody drops them, and count in the norm."""
    ours = odd_engine(hosted, optimizer=half, **how)
    theirs = odd_engine("resident", optimizer=half, **{k: v for k, v in how.items() if k != "clipping"})
    for engine in (ours, theirs):
        engine.prepare(Batch((ids(),), {}))
    for step in range(3):
        norms = [engine.step(ids(step)).grad_norm for engine in (ours, theirs)]
        assert norms[0] is None or torch.equal(*map(torch.as_tensor, norms))
        insist_on_same(ours, theirs)
        left, right = ([p.grad for p in engine.model.parameters()] for engine in (ours, theirs))
        assert [a is None for a in left] == [b is None for b in right]
        assert all(
            torch.equal(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None
        )
    assert any(p.grad is not None for p in ours.model.parameters())


def test_hooks_on_all_optimizers_see_a_step_once() -> None:
    called: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *given: called.append(given))
    try:
        engine = odd_engine("host")
        engine.prepare(Batch((ids(),), {}))
        engine.step(ids())
    finally:
        hook.remove()
    assert len(called) == 1


def test_what_it_costs_of_the_host() -> None:
    """Weights and states once more, beside gradients that are kept."""
    ours, exact = (clipped("host", 1e3, clipping=how) for how in ("speculative", "exact"))
    for engine in (ours, exact):
        for step in range(2):
            engine.step(ids(step))
    assert ours.optimizer is not None
    held = [p for p in ours.model.parameters() if p in ours.optimizer.state]
    size = sum(p.nbytes + sum(s.nbytes for s in ours.optimizer.state[p].values()) for p in held)
    more = residency_of(ours).host_bytes - residency_of(exact).host_bytes
    assert size <= more <= size + 64 * 4 * len(held), "each tensor begins at a multiple of 64 bytes"


def test_a_step_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward of the first stage, when the last ones have stepped."""
    really, broken = StageExecutor.backward, list[int]()

    def failing(stage: StageExecutor, *given: Any) -> Any:
        if stage.program.stage in broken:
            raise RuntimeError("no memory")
        return really(stage, *given)

    monkeypatch.setattr(StageExecutor, "backward", failing)
    engine = clipped("host", 1e3, clipping="speculative")
    engine.step(ids(0))
    before = {name: torch.as_tensor(value).clone() for name, value in trained(engine)}
    broken.append(0)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step(ids(1))
    after = {name: torch.as_tensor(value) for name, value in trained(engine)}
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []


def test_the_report_says_how_often() -> None:
    engine = clipped("host", 1e-4, clipping="speculative", explain=utilisation)
    engine.step(ids(0))
    said = "clipping   1 of 1 speculative steps were taken back"
    assert f'{said}; clipping="exact" is faster' in str(engine.report())
    engine = clipped("host", 1e4, clipping="speculative", explain=utilisation)
    engine.step(ids(0))
    assert str(engine.report()).endswith("clipping   0 of 1 speculative steps were taken back")


@pytest.mark.parametrize(
    ("weights", "how"),
    [
        ("resident", {"clip_norm": 1.0}),
        ("host", {}),
        ("host", {"clip_norm": 1.0, "scaler": torch.amp.GradScaler("cpu")}),
    ],
)
def test_where_no_step_could_be_taken_back(weights: Weights, how: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match="for steps that begin while gradients land on the host"):
        odd_engine(weights, clipping="speculative", **how)


def test_another_word_hears_those_that_there_are() -> None:
    with pytest.raises(BadOption, match="clipping='exactt'; 'exact' or 'speculative'"):
        odd_engine("host", clipping="exactt", clip_norm=1.0)


def test_an_optimizer_that_steps_once_is_refused() -> None:
    with pytest.raises(BadOption, match="wants an optimizer that steps in parts, and LBFGS steps once"):
        clipped("host", 1.0, clipping="speculative", optimizer=torch.optim.LBFGS)
