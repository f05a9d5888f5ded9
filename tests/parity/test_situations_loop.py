"""What users do between steps and around them, each against the plain loop on at least six models."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from parity_runs import batch_of
from situations import (
    BARE,
    SEED,
    Both,
    Entry,
    Note,
    Situation,
    Trainer,
    differing,
    fresh,
    insist_on_parity,
    state_of,
    step,
    train,
)
from torch import Tensor
from turns import in_turns
from zoo import Case, case

from outsize.ir.plan import ScheduleName
from outsize.train.batch.batch import Batch
from outsize.train.engine.engine import Engine

MODELS = ("toy", "mlp", "unet", "gpt2", "llama", "bert", "t5", "lstm")
RANDOM = ("gpt2", "t5", "bart", "bert", "swin", "lstm")
# With --all alone: further models of a kind that is there.
LIKE_GPT2 = [pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen3", "mixtral")]
LIKE_OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("llama", "bert", "t5")]


def evaluating(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """Between forward-backward and update, where nothing may be touched, and after the update."""
    for batch in batches:
        loss = step(trainer, batch, update=False).loss
        note(trainer.evaluate(*batch.args, target=batch.target or None, **batch.kwargs).loss)
        note(loss)
        trainer.update()
        with torch.inference_mode():
            note(trainer.evaluate(*batch.args, target=batch.target or None, **batch.kwargs).loss)


def in_eval_mode(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """Fine-tuning with frozen statistics and without dropout, then in train mode again."""
    trainer.model.eval()
    train(trainer, batches[:2], note)
    trainer.model.train()
    train(trainer, batches[2:], note)


def half_in_eval_mode(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    children = list(trainer.model.children())
    for child in children[: (len(children) + 1) // 2]:
        child.eval()
    train(trainer, batches, note)


def drawing(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """The user draws noise and shuffles between steps; the numbers must be the same in both loops."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for batch in batches:
        train(trainer, [batch], note)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(torch.randn(()) * 1e-3 + random.random() * 1e-3 + float(np.random.rand()) * 1e-3)


SITUATIONS = (
    Situation("evaluation between", loop=evaluating, changes=False),
    Situation("eval mode", loop=in_eval_mode, changes=False),
    Situation("half in eval mode", loop=half_in_eval_mode, changes=False, changes_state=True, dropout=True),
    Situation("the user draws", loop=drawing, dropout=True),
)


@pytest.mark.parametrize(("found", "name"), in_turns(SITUATIONS, MODELS, each=1))
def test_between_steps(found: Situation, name: str) -> None:
    insist_on_parity(replace(found, changes=False), case(name))


# -- sequence lengths --------------------------------------------------------------------------------------


def lengths(found: Case) -> list[Batch]:
    """Another length in each step, as with a sampler that buckets."""
    cut = (16, 9, 12)
    known = batch_of(found, 24).split(3)
    return [
        Batch((), {k: v[:, :n].contiguous() for k, v in part.kwargs.items()})
        for part, n in zip(known, cut, strict=True)
    ]


@pytest.mark.parametrize("name", ["gpt2", "mamba", pytest.param("bert", marks=pytest.mark.full), *LIKE_GPT2])
@pytest.mark.sample("gpt2")
def test_another_length_in_every_step(name: str) -> None:
    insist_on_parity(Situation("lengths", batches=lengths, changes=False), case(name))


def ragged(found: Case) -> list[Batch]:
    """Padding of another length in every row, so that microbatches differ in what they count and mask."""
    batches = []
    for part in batch_of(found, 24).split(3):
        ids = part.kwargs["input_ids"]
        mask = torch.arange(ids.shape[1]) < (torch.arange(len(ids)) * 2 % 11 + 4)[:, None]
        labels = ids.masked_fill(~mask, -100)
        batches.append(Batch((), {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}))
    return batches


def by_tokens(parts: Sequence[Batch]) -> list[float]:
    """What the mean over the whole batch gives to each part; a causal model predicts from token two on."""
    counts = [int((p.kwargs["labels"] != -100).sum()) for p in parts]
    return [c / sum(counts) for c in counts]


def by_shifted_tokens(parts: Sequence[Batch]) -> list[float]:
    counts = [int((p.kwargs["labels"][:, 1:] != -100).sum()) for p in parts]
    return [c / sum(counts) for c in counts]


@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "t5", pytest.param("bart", marks=pytest.mark.full), *LIKE_GPT2]
)
@pytest.mark.sample("gpt2", "bert")
def test_padding_weighs_by_tokens(name: str) -> None:
    causal = name in ("gpt2", "llama", "qwen3", "mixtral")
    weigh = by_shifted_tokens if causal else by_tokens
    insist_on_parity(Situation("ragged", batches=ragged, weigh=weigh, changes=False), case(name))


# -- random numbers ----------------------------------------------------------------------------------------


@cache
def dropped(name: str) -> list[Entry]:
    """The numbers of the plain loop with dropout."""
    both = Both(replace(BARE, dropout=True), case(name))
    return both.run(both.plain())


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turns(RANDOM, ["1-1f1b", "2-gpipe", "3-1f1b", "4-gpipe", "4-1f1b"], each=2),
)
@pytest.mark.sample("gpt2", "t5", "bert", "lstm", "swin-4-1f1b")
def test_dropout_does_not_know_the_layout(name: str, layout: str) -> None:
    """Against the plain loop, and so against each other: 1 to 4 stages under both schedules."""
    stages, _, schedule = layout.partition("-")
    base = replace(BARE, dropout=True, stages=int(stages), schedule=cast("ScheduleName", schedule))
    both = Both(base, case(name))
    assert not differing(dropped(name), both.run(both.engine()))


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.sample("gpt2", "bert", "swin", "lstm")
def test_a_stopped_run_goes_on_with_the_numbers_of_one_that_was_not(name: str) -> None:
    """Weights, optimizer and the count of steps are all that a run is made of."""
    both = Both(replace(BARE, dropout=True, stages=3), case(name))
    whole = both.run(both.engine())
    first, notes = both.engine(), []

    def note(engine: Engine) -> Any:
        return lambda loss: notes.append(state_of(engine, loss))

    train(first, both.batches[:1], note(first))
    saved = copy.deepcopy((first.weights.full_state_dict(), _state(first), first.steps))
    other = Both(replace(BARE, dropout=True, stages=2), case(name))
    second = other.engine()
    second.model.load_state_dict(saved[0])
    assert second.optimizer is not None
    second.optimizer.load_state_dict(saved[1])
    second.steps = saved[2]
    train(second, both.batches[1:], note(second))
    assert not differing(whole, [*notes, state_of(second, None)])
    assert second.seed == SEED


def _state(engine: Engine) -> dict[str, Any]:
    assert engine.optimizer is not None
    return engine.optimizer.state_dict()


@pytest.mark.parametrize("name", ["toy", "mlp", "unet", "gpt2", "lstm", *LIKE_OTHERS])
def test_evaluation_touches_nothing(name: str) -> None:
    both = Both(BARE, case(name))
    engine = both.engine()
    step(engine, both.batches[0], update=False)
    torch.manual_seed(11)
    before, drawn = state_of(engine, None), torch.get_rng_state()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            engine.evaluate(
                *both.batches[1].args, target=both.batches[1].target or None, **both.batches[1].kwargs
            )
        assert not differing([before], [state_of(engine, None)])
        assert torch.equal(drawn, torch.get_rng_state())
        assert engine.model.training
        assert engine.steps == 1


@pytest.mark.parametrize(
    "name",
    [
        "toy",
        "mlp",
        "gpt2",
        "bert",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "vit")),
    ],
)
@pytest.mark.sample("toy", "mlp", "gpt2")
def test_outputs_of_an_evaluation_are_the_models_own(name: str) -> None:
    both = Both(BARE, case(name))
    engine, model, batch = both.engine(), fresh(case(name)).eval(), both.batches[0]
    found = engine.evaluate(*batch.args, **batch.kwargs).outputs
    assert found is not None
    for part, output in zip(batch.split(len(found)), found, strict=True):
        with torch.no_grad():
            expected = model(*part.args, **part.kwargs)
        pairs = [(expected, output)] if isinstance(output, Tensor) else _tensors(expected, output)
        assert pairs
        assert all(torch.equal(a, b) for a, b in pairs)


def _tensors(expected: Any, output: Any) -> list[tuple[Tensor, Tensor]]:
    assert type(expected) is type(output)
    assert list(expected) == list(output)
    return [(expected[k], output[k]) for k in expected if isinstance(expected[k], Tensor)]
