"""Callbacks, results on every rank, and the parts of a step that other loops call one by one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.errors import BadWeights
from outsize.train.context.callback import (
    CheckpointFacts,
    EvaluationFacts,
    ReplanFacts,
    StartFacts,
    StepFacts,
)
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def engine_of(model: nn.Module, stages: int = 2, **options: Any) -> outsize.Engine:
    options = {"loss_fn": F.cross_entropy, "microbatches": 4, "optimizer": torch.optim.AdamW, **options}
    return outsize.parallelize(model, (X,), target=Y, stages=stages, **options)


@final
class Kept(outsize.Callback):
    """Keeps the facts that it is told."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.facts = every, list[Any]()

    def on_step(self, facts: StepFacts) -> None:
        self.facts.append(facts)

    def on_evaluate(self, facts: EvaluationFacts) -> None:
        self.facts.append(facts)

    def on_checkpoint(self, facts: CheckpointFacts) -> None:
        self.facts.append(facts)

    def on_replan(self, facts: ReplanFacts) -> None:
        self.facts.append(facts)


def test_a_callback_is_told_what_happens(tmp_path: Path) -> None:
    kept, second = Kept(), Kept(every=2)
    engine = engine_of(mlp(), clip_norm=1.0, callbacks=[kept, second])
    results = [engine.step(X, target=Y) for _ in range(2)]
    engine.evaluate(X, target=Y)
    folder = engine.save(tmp_path)
    one, two, evaluated, saved = kept.facts
    assert [f.loss for f in (one, two)] == [float(r.loss) for r in results]
    assert [f.grad_norm for f in (one, two)] == [
        float(r.grad_norm) for r in results if r.grad_norm is not None
    ]
    assert (one.step, two.step, one.learning_rate) == (1, 2, 1e-3)
    assert one.utilisation.step_s > 0
    assert len(one.utilisation.busy) == 1
    assert one.memory_bytes[0] > 0
    assert len(one.planned_bytes) == 2
    assert evaluated == EvaluationFacts(2, float(engine.evaluate(X, target=Y).loss or 0))
    assert saved == CheckpointFacts(2, folder)
    assert [type(f) for f in second.facts if isinstance(f, StepFacts)] == [StepFacts]


@final
class Begun(outsize.Callback):
    """Writes on each rank that its run begins, and wants no steps."""

    every = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_start(self, facts: StartFacts) -> None:
        world = facts.world
        (self.folder / f"{world.rank} of {world.world_size}").write_text(f"{facts.plan.microbatches}")

    def on_step(self, facts: StepFacts) -> None:
        raise AssertionError("it wants none")


def test_each_rank_is_told_that_the_run_begins(tmp_path: Path) -> None:
    def work() -> None:
        world = join()
        engine = engine_of(mlp(), callbacks=[Begun(tmp_path)])
        engine.step(X, target=Y)
        leave(world)

    run_in_forks(2, work)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0 of 2": "4", "1 of 2": "4"}


def test_what_is_like_a_callback_is_told_of_steps_alone() -> None:
    """Whoever wrote one before `on_start` was there goes on."""

    @final
    class Own:
        every, every_s, steps = 1, 0.0, 0

        def on_step(self, facts: StepFacts) -> None:
            self.steps = facts.step

    own: Any = Own()
    engine_of(mlp(), callbacks=[own]).step(X, target=Y)
    assert own.steps == 1


def test_an_accumulated_step_is_told_when_it_is_taken() -> None:
    kept = Kept()
    engine = engine_of(mlp(), callbacks=[kept])
    engine.step(X, target=Y, update=False)
    assert kept.facts == []
    engine.update()
    assert [f.step for f in kept.facts] == [1]


def test_a_run_that_goes_on_by_another_plan_says_so(tmp_path: Path) -> None:
    engine_of(mlp()).save(tmp_path)
    kept = Kept()
    engine = engine_of(mlp(), stages=3, callbacks=[kept], resume=tmp_path)
    (facts,) = kept.facts
    assert (len(facts.before.stages), len(facts.after.stages), facts.after) == (2, 3, engine.plan)
    same = Kept()
    engine_of(mlp(), callbacks=[same], resume=tmp_path)
    assert same.facts == []


@pytest.mark.parametrize("by_modules", [False, True])
def test_losses_that_are_added_as_they_are(by_modules: bool) -> None:
    """The loss divides by a count of the whole batch, as transformers' `num_items_in_batch` does."""
    weights = torch.tensor([1.0, 3.0, 0.5, 2.0, 1.0, 1.0, 4.0, 1.0])

    def loss_fn(output: Any, target: Any, weight: Any, total: Any) -> Any:
        return (F.cross_entropy(output, target, reduction="none") * weight).sum() / total

    total = weights.sum()
    model, plain = (ByModules(), ByModules()) if by_modules else (mlp(), mlp())
    parts = [
        outsize.microbatch(x, target=(y, w, total))
        for x, y, w in zip(X.split(2), Y.split(2), weights.split(2), strict=True)
    ]
    engine = outsize.parallelize(
        model,
        (X,),
        target=(Y, weights, total),
        loss_fn=outsize.Loss(loss_fn, counting="sum"),
        stages=2,
        microbatches=4,
    )
    result = engine.step(parts, update=False, gather=True)
    losses = []
    for x, y, w in zip(X.split(2), Y.split(2), weights.split(2), strict=True):
        losses.append(loss_fn(plain(x), y, w, total))
        losses[-1].backward()
    assert result.losses is not None
    assert all(map(torch.equal, result.losses, losses))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_clipping_by_hand_is_torchs() -> None:
    model, plain = mlp(), mlp()
    engine = engine_of(model, optimizer=None)
    engine.step(X, target=Y, update=False)
    for parameter, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        parameter.grad = ours.grad.clone()
    assert torch.equal(engine.clip_grad_norm(float("inf")), engine.clip_grad_norm(0.1))
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for parameter, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, ours.grad)  # type: ignore[arg-type]
    engine.drop_gradients()
    assert all(p.grad is None for p in model.parameters())


def test_weights_and_states_are_saved_apart(tmp_path: Path) -> None:
    engine = engine_of(mlp())
    engine.step(X, target=Y)
    folder = engine.save(tmp_path / "states", weights=False)
    engine.weights.full_state_dict(to=tmp_path / "weights")
    assert not any(path.name.startswith("model") for path in folder.iterdir())
    expected = engine.step(X, target=Y).loss, copy.deepcopy(engine.weights.module.state_dict())
    other = engine_of(mlp(), stages=3)
    other.weights.load(tmp_path / "weights")
    assert other.state.resume(tmp_path / "states") == 1
    assert torch.equal(other.step(X, target=Y).loss, expected[0])
    for name, value in other.weights.module.state_dict().items():
        assert torch.equal(value, expected[1][name]), name


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    engine_of(mlp()).weights.full_state_dict(to=tmp_path)
    wider = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(BadWeights, match=r"0\.weight has another shape .*\[8, 4\] in the file, \[9, 4\]"):
        engine_of(wider).weights.load(tmp_path)
    longer = nn.Sequential(*mlp(), nn.Linear(3, 3))
    with pytest.raises(BadWeights, match=r"lacks weights of Sequential; 2 missing: 5\.weight, 5\.bias"):
        engine_of(longer).weights.load(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("by_modules", [False, True])
def test_two_ranks_know_outputs_losses_and_facts(tmp_path: Path, by_modules: bool) -> None:
    def model() -> nn.Module:
        return ByModules() if by_modules else mlp()

    alone = engine_of(model(), clip_norm=1.0)
    expected = alone.step(X, target=Y, gather="outputs"), alone.evaluate(X, target=Y, gather=True)
    assert expected[1].losses is None
    assert expected[1].outputs is not None
    losses = [F.cross_entropy(out, y) for out, y in zip(expected[1].outputs, Y.split(2), strict=True)]

    def work() -> None:
        world, kept = join(), Kept()
        engine = engine_of(model(), clip_norm=1.0, callbacks=[kept])
        step, evaluated = (
            engine.step(X, target=Y, gather="outputs"),
            engine.evaluate(X, target=Y, gather=True),
        )
        assert step.losses is not None
        assert expected[0].losses is not None
        assert all(map(torch.equal, step.losses, expected[0].losses))
        assert step.outputs is not None
        assert expected[0].outputs is not None
        assert not any(part.requires_grad for part in step.outputs)
        assert all(map(torch.equal, step.outputs, expected[0].outputs))
        assert evaluated.outputs is not None
        assert expected[1].outputs is not None
        assert all(map(torch.equal, evaluated.outputs, expected[1].outputs))
        known = engine.evaluate(X, target=Y, gather="losses")
        assert known.outputs is None
        assert known.losses is not None
        assert all(map(torch.equal, known.losses, losses))
        if world.rank:
            assert kept.facts == []
        else:
            (facts, *_) = kept.facts
            assert facts.loss == float(expected[0].loss)
            assert facts.grad_norm == float(expected[0].grad_norm)  # type: ignore[arg-type]
            assert len(facts.utilisation.busy) == len(facts.memory_bytes) == len(facts.planned_bytes) == 2
        engine.weights.full_state_dict(to=tmp_path)
        engine.step(X, target=Y)
        engine.weights.load(tmp_path)
        again = engine.evaluate(X, target=Y, gather=True).outputs
        assert again is not None
        assert all(map(torch.equal, again, evaluated.outputs))
        leave(world)

    run_in_forks(2, work)


def test_outputs_of_a_training_step_are_those_of_the_plain_model() -> None:
    model = mlp()
    expected = [model(part).detach() for part in X.chunk(4)]
    result = engine_of(model).step(X, target=Y, update=False, gather="outputs")
    assert result.outputs is not None
    assert all(map(torch.equal, result.outputs, expected))
    assert engine_of(mlp()).step(X, target=Y, gather=True).outputs is None


@pytest.mark.dist
def test_code_of_the_users_runs_over_two_ranks() -> None:
    """A loop that is no model's forward: two losses, a branch on one of them, and clipping of one part."""

    def gradients(model: nn.Module) -> dict[str, Any]:
        first = F.cross_entropy(model(X), Y)
        second = model(X * 2).square().mean() if first.item() > 0 else first * 0
        (first + second).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients(mlp())
    weights = [plain["2.weight"].clone(), plain["2.bias"].clone()]
    total = nn.utils.get_total_norm(weights)

    def work() -> None:
        world, model = join(), mlp()
        engine = engine_of(model)
        with engine.by_modules():
            found = gradients(model)
        assert 0 < len(found) < len(plain)
        assert all(torch.equal(gradient, plain[name]) for name, gradient in found.items())
        assert torch.equal(engine.clip_grad_norm(1e-3, ["2.weight", "2.bias"]), total)
        kept = {n: g for n, g in found.items() if not n.startswith("2.")}
        assert all(torch.equal(gradient, plain[name]) for name, gradient in kept.items())
        leave(world)

    run_in_forks(2, work)


@final
class ByModules(nn.Module):
    """Decides on an activation in Python, so no tape of it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Any) -> Any:
        x = self.layers[1](self.layers[0](x))
        if float(x.sum()) > 1e9:
            x = -x
        return self.layers[4](self.layers[3](self.layers[2](x)))
