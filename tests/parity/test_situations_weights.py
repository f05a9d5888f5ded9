"""What users do to weights, gradients and optimizers, each against the plain loop on at least six models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, final

import pytest
import torch
from situations import Note, Situation, Trainer, insist_on_parity, step, train
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from turns import in_turns
from zoo import case

from outsize.train.batch.batch import Batch

MODELS = ("toy", "mlp", "unet", "gpt2", "llama", "bert", "vit", "lstm")


# -- weights ---------------------------------------------------------------------------------------------


def frozen_half(model: nn.Module) -> nn.Module:
    """As in fine-tuning: everything but the last parameters is frozen."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    return model


def every_second_frozen(model: nn.Module) -> nn.Module:
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    return model


def unfreezing(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """Frozen at first, then all of it trains, then the first half is frozen again."""
    frozen_half(trainer.model)
    train(trainer, batches[:1], note)
    for parameter in trainer.model.parameters():
        parameter.requires_grad_(True)
    train(trainer, batches[1:2], note)
    frozen_half(trainer.model)
    train(trainer, batches[2:], note)


@final
class LoRA(nn.Module):
    """Hu et al. 2021, arXiv:2106.09685, as people write it: a frozen Linear and a low-rank path beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def with_lora(model: nn.Module) -> nn.Module:
    """Every Linear gets an adapter, everything else is frozen."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRA(child))
    return model


@final
class Spare(nn.Module):
    """The model, and a head that no step uses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.spare = inner, nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@final
class Sometimes(nn.Module):
    """Adds a term of its own when it is told to; the flag is the user's, between steps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale, self.on = inner, nn.Parameter(torch.ones(())), False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if not self.on:
            return out
        if isinstance(out, Tensor):
            return out * self.scale
        out.loss = out.loss * self.scale
        return out


def switching(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    for number, batch in enumerate(batches):
        model: Any = trainer.model
        model.on = number % 2 == 1
        train(trainer, [batch], note)


# -- gradients and optimizers ------------------------------------------------------------------------------


def accumulating(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """A mean over three steps."""
    for batch in batches:
        note(step(trainer, batch, update=False, loss_scale=1 / len(batches)).loss)
    trainer.update()


def clipping_by_value(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    for batch in batches:
        loss = step(trainer, batch, update=False).loss
        torch.nn.utils.clip_grad_value_([p for _, p in trainer.named_parameters()], 1e-3)
        note(loss)
        trainer.update()


def scheduled(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    assert trainer.optimizer is not None
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda n: 0.5**n)
    for batch in batches:
        train(trainer, [batch], note)
        schedule.step()


def averaged(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """An exponential moving average, in whose weights the model ends."""
    mean = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in batches:
        train(trainer, [batch], note)
        mean.update_parameters(trainer.model)
    with torch.no_grad():
        for p, q in zip(trainer.model.parameters(), mean.parameters(), strict=True):
            p.copy_(q)


def decay_groups(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """No decay for vectors, as everybody does."""
    known = list(parameters)
    groups = [
        {"params": [p for p in known if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in known if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@final
class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


SITUATIONS = (
    Situation("frozen first half", wrap=frozen_half),
    Situation("every second frozen", wrap=every_second_frozen),
    Situation("unfreezing", loop=unfreezing),
    Situation("lora", wrap=with_lora),
    Situation("a head that is never used", wrap=Spare),
    Situation("a weight used in some steps", wrap=Sometimes, loop=switching),
    Situation("accumulation over steps", loop=accumulating),
    Situation("clipping by norm", clip_norm=0.05),
    Situation("clipping by value", loop=clipping_by_value),
    Situation("weight decay groups", optimizer=decay_groups),
    Situation("sgd", optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    Situation("adafactor", optimizer=lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    Situation("fused adam", optimizer=lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)),
    Situation("own optimizer", optimizer=lambda p: SignDescent(p, lr=1e-3)),
    Situation("schedule of the learning rate", loop=scheduled),
    Situation("moving average", loop=averaged),
)


@pytest.mark.parametrize(("found", "name"), in_turns(SITUATIONS, MODELS, each=1))
def test_weights_gradients_and_optimizers(found: Situation, name: str) -> None:
    if (found.name, name) == ("lora", "unet"):
        found = replace(found, wrap=every_second_frozen)  # a model without Linear has nothing to adapt
    insist_on_parity(found, case(name))
