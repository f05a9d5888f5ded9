"""The engine around the pipeline: guards, errors, generators, the cache of programs."""

from __future__ import annotations

import copy
import random
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity_runs import Combination, batch_of, engine_for, fresh, planned, variants_of
from torch import Tensor, nn
from zoo import case, tokens

import outsize
from outsize.errors import BadOption, ExampleRejected
from outsize.train.check.compare import adamw
from outsize.train.engine.engine import Engine
from outsize.train.variants.variant import KEPT


def split(model: nn.Module, *args: Any, microbatches: int = 4, **options: Any) -> Engine:
    """A two-stage engine in this process."""
    options = {"loss_fn": F.mse_loss, "optimizer": adamw, "stages": 2, "schedule": "1f1b", **options}
    return outsize.parallelize(model, args, microbatches=microbatches, cluster="2xcpu", **options)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# -- decisions on masks are guards --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
@pytest.mark.sample("mixtral", "bert")
def test_padding_in_one_microbatch_and_none_in_another(name: str) -> None:
    """transformers drops a mask of ones: microbatch 1 of 3 runs another program than 0 and 2."""
    ids = tokens(6)
    mask = torch.ones_like(ids)
    mask[2, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    targets = labels if name == "bert" else labels[:, 1:]  # a causal model predicts the next token
    counts = [int((part != -100).sum()) for part in targets.split(2)]
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    plain = fresh(name)
    losses = []
    for rows, count in zip((slice(0, 2), slice(2, 4), slice(4, 6)), counts, strict=True):
        loss = plain(**{k: v[rows] for k, v in kwargs.items()}).loss
        (loss * (count / sum(counts))).backward()
        losses.append(loss.detach() * (count / sum(counts)))
    plan = planned(Combination(name, 6, 2, "1f1b")).model_copy(update={"microbatches": 3, "batch_size": 6})
    engine = engine_for(name, plan)
    result = engine.step(**kwargs, update=False)
    assert variants_of(engine)._made == 2
    assert torch.equal(result.loss, losses[0] + losses[1] + losses[2])
    expected, found = grads(plain), grads(engine.model)
    assert expected.keys() == found.keys()
    assert [n for n in expected if not torch.equal(expected[n], found[n])] == []


@final
class Halved(nn.Module):
    """Decides in Python on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * 0.5 if bool((x > 0).all()) else h)


def test_each_microbatch_goes_the_way_its_own_values_decide() -> None:
    model, x = Halved(), X.clone()
    x[:2], x[4:6] = x[:2].abs() + 0.1, x[4:6].abs() + 0.1
    plain = copy.deepcopy(model)
    engine = split(model, x, target=Y)
    for _ in range(2):
        found = engine.step(x, target=Y, update=False)
        total = torch.zeros(())
        for rows in torch.arange(8).split(2):
            loss = F.mse_loss(plain(x[rows]), Y[rows])
            (loss * 0.25).backward()
            total = total + loss.detach() * 0.25
        assert torch.equal(found.loss, total)
    assert all(torch.equal(g, grads(plain)[n]) for n, g in grads(engine.model).items())


# -- the user's things stay the user's ------------------------------------------------------------------


def test_a_step_and_an_evaluation_leave_the_users_generators_alone() -> None:
    engine = split(mlp(), X, target=Y)
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    engine.step(X, target=Y)
    engine.evaluate(X, target=Y)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


def test_each_step_draws_anew_and_a_seed_repeats_them() -> None:
    def losses(seed: int) -> list[float]:
        engine = split(mlp(), X, target=Y, devices=outsize.Ranks(seed=seed))
        return [float(engine.step(X, target=Y, update=False).loss) for _ in range(3)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)
    assert len(set(losses(1))) == 3


def test_parallelize_does_not_change_the_numbers_of_the_model() -> None:
    model = mlp()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    engine = split(model, X, target=Y)
    assert engine.model is model
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert grads(model) == {}


# -- errors ------------------------------------------------------------------------------------------


@final
class Moody(nn.Module):
    """Raises when it is told to, at replay only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.angry_at = nn.Linear(4, 4), nn.Linear(4, 4), -1
        self.calls = 0
        self.b.register_forward_pre_hook(self._grumble)

    def _grumble(self, module: nn.Module, args: Any) -> None:
        if type(args[0]) is Tensor:
            self.calls += 1
            if self.calls == self.angry_at:
                raise ValueError("not today")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_after_an_error_in_the_model_the_next_step_is_as_if_nothing_had_been() -> None:
    torch.manual_seed(0)
    model = Moody()
    calm = copy.deepcopy(model)
    engine, other = split(model, X, target=Y), split(calm, X, target=Y)
    assert torch.equal(engine.step(X, target=Y).loss, other.step(X, target=Y).loss)
    model.angry_at = model.calls + 3
    with pytest.raises(ValueError, match="not today"):
        engine.step(X, target=Y)
    model.zero_grad()
    for _ in range(2):
        assert torch.equal(engine.step(X, target=Y).loss, other.step(X, target=Y).loss)
    assert all(torch.equal(t, calm.state_dict()[n]) for n, t in model.state_dict().items())


def test_a_batch_that_the_model_rejects_is_refused_and_the_engine_goes_on() -> None:
    engine = split(mlp(), X, target=Y)
    with pytest.raises(ExampleRejected, match=r"the model rejects the example batch"):
        engine.step(X[:, :3], target=Y)
    assert engine.steps == 0
    engine.step(X, target=Y)
    assert engine.steps == 1


# -- the cache of programs ---------------------------------------------------------------------------------


def test_programs_are_kept_up_to_a_number_and_the_least_used_goes_first() -> None:
    engine = split(mlp(), X, target=Y, microbatches=1)
    numbers: list[int] = []

    def step(size: int) -> int:
        x = torch.ones(size, 4)
        engine.step(x, target=x)
        (found,) = variants_of(engine)._known[next(reversed(variants_of(engine)._known))]
        return found.number

    first = step(8)
    numbers = [step(100 + k) for k in range(KEPT - 1)]
    assert step(8) == first, "still there, and now the newest"
    assert step(1) == 1 + numbers[-1]
    assert step(101) == numbers[1]
    assert step(100) == 2 + numbers[-1], "the least recently used was recorded again"
    assert sum(len(v) for v in variants_of(engine)._known.values()) == KEPT
    crew: Any = engine.crew
    assert len(crew._built) == KEPT


def test_train_and_eval_have_programs_of_their_own() -> None:
    engine = split(mlp(), X, target=Y)
    first = engine.evaluate(X, target=Y)
    assert first.loss is not None
    assert torch.equal(first.loss, engine.evaluate(X, target=Y).loss)  # type: ignore[arg-type]
    assert not torch.equal(first.loss, engine.step(X, target=Y, update=False).loss)
    assert len(variants_of(engine)._known) == 2


# -- one process, what the promise names -------------------------------------------------------------------


def test_evaluation_hands_out_each_microbatchs_output() -> None:
    engine = engine_for("gpt2", planned(Combination("gpt2", 3, 3, "gpipe")))
    batch = batch_of(case("gpt2"))
    result = engine.evaluate(**batch.kwargs)
    plain = fresh("gpt2").eval()
    assert result.outputs is not None
    for part, found in zip(batch.split(3), result.outputs, strict=True):
        with torch.no_grad():
            expected = plain(**part.kwargs)
        assert torch.equal(expected.logits, found.logits)


def test_the_report_of_a_step() -> None:
    engine = split(mlp(), X, target=Y)
    with pytest.raises(BadOption, match=r"no step has been measured.*Next: engine.step"):
        engine.report()
    engine.step(X, target=Y)
    used = engine.report()
    assert used.devices == ("cpu",)  # both stages take turns in this process
    assert 0 < used.busy[0] <= 1
    assert 0 < used.bound_s <= used.step_s
    assert used.idle is None
    assert str(used).startswith("step ")
