"""`outsize.check(trainer=...)`: the first number, gradient or weight that differs from a plain trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_worker
from test_transformers_trainer import trainer_of, twice
from trainer_worker import transformers

import outsize
from outsize.errors import BadOption
from outsize.integrations.transformers import Trainer

ARGUMENTS = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2}


def test_a_trainer_that_computes_the_same_is_equal_and_stays_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, twice(Trainer), arguments=ARGUMENTS, outsize={"stages": 2})
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    verdict = outsize.check(trainer=trainer)
    assert (verdict.bit_equal, verdict.holds, verdict.first_divergence) == (True, True, None)
    assert (len(verdict.stages), verdict.microbatches, verdict.processes) == (2, 2, 0)
    assert verdict.model.startswith("Twice of GPT2LMHeadModel")
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())
    assert trainer.state.global_step == 0
    assert Trainer in type(trainer).__mro__


def test_a_loss_that_is_recorded_is_checked_as_well(tmp_path: Path) -> None:
    assert outsize.check(trainer=trainer_of(tmp_path, arguments=ARGUMENTS, outsize={"stages": 2})).bit_equal


def test_divided_batches_are_equal_but_for_rounding(tmp_path: Path) -> None:
    split = {"stages": 2, "microbatches": 4}
    verdict = outsize.check(trainer=trainer_of(tmp_path, twice(Trainer), arguments=ARGUMENTS, outsize=split))
    assert not verdict.bit_equal
    assert verdict.relative_diff is not None
    assert 0 < verdict.relative_diff <= verdict.within
    assert verdict.first_divergence is None


class _Weighted(Trainer):
    """Its loss is another one where it runs split, which is a mistake."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        return loss * (1.5 if self.is_split and loss.item() > 0 else 1.0)

    @property
    def is_split(self) -> bool:
        return isinstance(self, Trainer)


class _Decaying(Trainer):
    """Its optimizer moves one weight a second time in the second update where it runs split."""

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer()
        if isinstance(self, Trainer) and not getattr(self, "hooked", False):
            self.hooked = True
            steps = list[int]()

            def more(*_: Any) -> None:
                steps.append(1)
                if len(steps) == 2:
                    with torch.no_grad():
                        self.model.transformer.ln_f.bias.add_(1e-3)

            optimizer.register_step_post_hook(more)
        return optimizer


class _Counting(twice(Trainer)):
    """Its model counts calls of a loss in a buffer, by twos where it runs split."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.model.calls.add_(2 if isinstance(self, Trainer) else 1)
        return super().compute_loss(*args, **kwargs)


def test_a_buffer_that_differs_is_named(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, _Counting, arguments=ARGUMENTS, outsize={"stages": 2})
    trainer.model.register_buffer("calls", torch.zeros(()))
    verdict = outsize.check(trainer=trainer)
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.startswith("buffer calls after update 1: ")
    assert verdict.buffer_diff == 4.0
    assert (verdict.grad_diff, verdict.parameter_diff) == (0.0, 0.0)


def test_the_first_number_that_differs_is_named(tmp_path: Path) -> None:
    verdict = outsize.check(
        trainer=trainer_of(tmp_path, _Weighted, arguments=ARGUMENTS, outsize={"stages": 2})
    )
    assert not verdict.holds
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.startswith("loss of update 1: ")
    assert verdict.loss_diff > 1
    assert verdict.grad_diff > 0


def test_the_first_weight_that_differs_is_named_with_its_update(tmp_path: Path) -> None:
    verdict = outsize.check(
        trainer=trainer_of(tmp_path, _Decaying, arguments=ARGUMENTS, outsize={"stages": 2})
    )
    assert verdict.first_divergence == "weight transformer.ln_f.bias after update 2: 1.0e-03 apart"
    assert (verdict.loss_diff, verdict.grad_diff) == (0, 0)


def test_what_is_no_split_trainer_is_refused_with_what_to_type(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, transformers.Trainer)
    with pytest.raises(BadOption, match=r"a Trainer, which does not run split. Next: class Split\("):
        outsize.check(trainer=plain)
    with pytest.raises(BadOption, match=r"a trainer is checked as it is"):
        outsize.check(trainer_worker.model_of({}), trainer=plain)
    with pytest.raises(BadOption, match=r"a trainer is checked as it is: .*; stages\."):
        outsize.check(trainer=plain, stages=3)
