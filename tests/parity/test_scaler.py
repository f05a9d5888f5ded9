"""fp16 with torch's GradScaler: the scaled loop, overflows and backing off, split and plain."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any, final

import pytest
import torch
from parity_runs import SEED, Combination, batch_of, fresh, planned
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from zoo import Case, case

from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.check.compare import adamw, difference
from outsize.train.check.reference import eager
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.variants.variant import Variants

pytestmark = pytest.mark.usefixtures("shared_recordings")

MODELS = ("toy", "mlp", "unet", "gpt2", "llama", "vit", "bert")


def scaler() -> GradScaler:
    """Starts so high that fp16 gradients overflow, and grows back after two good steps."""
    return GradScaler("cpu", init_scale=2.0**22, growth_interval=2)


def half() -> Any:
    return torch.autocast("cpu", torch.float16)


@final
class Plain:
    """The user's loop."""

    def __init__(self, name: str) -> None:
        self.known, self.model, self.scaler = case(name), fresh(name, dropout=True), scaler()
        self.optimizer = adamw(self.model.parameters())
        plan = planned(Combination(name, 4, 1, "1f1b"), dropout=True)
        self.variants = Variants(self.model, plan, self.known.loss)
        self.steps = 0

    def step(self, batch: Batch, *, clip: bool) -> Tensor:
        """The loop of torch's documentation, over microbatches."""
        total = torch.zeros(())
        for mb, part in enumerate(batch.split(4)):
            with half():
                tape = self.variants.find(part, outputs=False).tape
                seed = seeder(SEED, self.steps, mb)
                with torch.random.fork_rng(devices=[]):
                    _, loss = eager(self.model, tape, part, seed, self.known.loss)
            assert loss is not None
            share = loss * (part.size / batch.size)
            self.scaler.scale(share).backward()
            total = total + share.detach()
        self.steps += 1
        if clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total


SMALL, LIKE_GPT2 = ("toy", "mlp", "gpt2"), ("llama", "bert")


def scaled_batch(found: Case) -> Batch:
    """Of images every fourth pixel of the U-Net's: the CPU has no fast convolution in fp16."""
    batch = batch_of(found)
    if found.name != "unet":
        return batch
    (images,), (labels,) = batch.args, batch.target
    return Batch((images[..., ::4, ::4].contiguous(),), {}, (labels[..., ::4, ::4].contiguous(),))


def cells() -> list[Any]:
    """Each model, by turns with and without clipping; small ones with both, those like GPT-2 with --all."""
    rows = [
        (name, clip, number % 2 == clip and name not in LIKE_GPT2)
        for number, name in enumerate(MODELS)
        for clip in (False, True)
    ]
    return [
        pytest.param(name, clip, marks=[] if taken or name in SMALL else [pytest.mark.full])
        for name, clip, taken in rows
    ]


@pytest.mark.parametrize(("name", "clip"), cells())
@pytest.mark.sample("toy", "mlp", "unet", "gpt2-True")
def test_a_scaled_loop(name: str, clip: bool) -> None:
    plain, known = Plain(name), case(name)
    plan = planned(Combination(name, 4, 3, "1f1b"), dropout=True)
    engine = make_engine(
        fresh(name, dropout=True),
        plan,
        None,
        EngineOptions(loss_fn=known.loss, optimizer=adamw, seed=SEED, scaler=(ours := scaler())),
    )
    batch, scales = scaled_batch(known), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            expected = plain.step(batch, clip=clip)
            with half():
                found = engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
            if clip:
                engine.unscale()
                torch.nn.utils.clip_grad_value_(engine.weights.module.parameters(), 0.01)
            engine.update()
            scales.append(ours.get_scale())
            assert difference(expected, found.loss) == 0
            assert scales[-1] == plain.scaler.get_scale()
            _insist_on_equal(plain.model, engine.model)
    moves = list(pairwise([2.0**22, *scales]))
    assert any(b < a for a, b in moves), "nothing overflowed"
    assert any(b > a for a, b in moves), "the scale never grew"


def _insist_on_equal(plain: nn.Module, split: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert difference(a, b) == 0, name


def test_the_loss_of_a_whole_loop_under_one_autocast_sees_new_weights() -> None:
    """torch keeps cast weights as long as the context lasts; a step inside it must not run on old ones."""
    known, batch = case("mlp"), batch_of(case("mlp"))
    plan = planned(Combination("mlp", 4, 2, "1f1b"))

    def losses(once: bool) -> list[Tensor]:
        engine = make_engine(
            fresh("mlp"), plan, None, EngineOptions(loss_fn=known.loss, optimizer=adamw, seed=SEED)
        )
        found = []
        with torch.autocast("cpu", torch.bfloat16, enabled=once):
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(engine.step(*batch.args, target=batch.target).loss)
        return found

    assert all(torch.equal(a, b) for a, b in zip(losses(True), losses(False), strict=True))
