"""One rank of two: `loss_weights_worker.py FOLDER`. Losses that are divided by counts.

The plain loop divides the sum over each microbatch by the whole batch's denominator, and knows of no weights.
All is in float64, so that the orders of additions stay below 1e-12.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.train.batch.loss_weights import UnknownShares
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

SAMPLES, LENGTH, CLASSES, MICROBATCHES = 8, 5, 7, 4
DRAW = torch.Generator().manual_seed(11)
WEIGHTS = torch.rand(CLASSES, generator=DRAW, dtype=torch.float64) + 0.5
IDS = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=DRAW)
KEPT = torch.rand(SAMPLES, LENGTH, generator=DRAW) > torch.linspace(0, 0.8, SAMPLES)[:, None]
LABELS = torch.where(KEPT, torch.randint(CLASSES, (SAMPLES, LENGTH), generator=DRAW), -100)
PADDED = LABELS.clone()
PADDED[2:4] = -100  # the second microbatch


def logits_and_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def summed(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(*logits_and_labels(logits, labels), reduction="sum", **how)


def counted(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@final
class Network(nn.Module):
    """Two layers, and the loss inside where there is one."""

    def __init__(self, criterion: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(CLASSES, 6), nn.Linear(6, 6)
        self.head, self.criterion = nn.Linear(6, CLASSES), criterion

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(torch.tanh(self.middle(self.embedding(ids))))
        if self.criterion is None or labels is None:
            return logits
        loss: Tensor = self.criterion(*logits_and_labels(logits, labels))
        return loss


class Case(NamedTuple):
    """The loss that the engine is given (None: the model's own), and the two parts of the plain one."""

    loss_fn: Callable[[Tensor, Tensor], Tensor] | None
    numerator: Callable[[Tensor, Tensor], Tensor]
    denominator: Callable[[Tensor], Tensor] = counted
    labels: Tensor = LABELS
    criterion: Callable[[], nn.Module] | None = None


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*logits_and_labels(logits, labels))


def mean_by_class(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*logits_and_labels(logits, labels), weight=WEIGHTS)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*logits_and_labels(logits, labels), label_smoothing=0.1)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).to(logits.dtype).flatten()
    losses = F.cross_entropy(*logits_and_labels(logits, labels.clamp(min=0)), reduction="none")
    return (losses * mask).sum() / mask.sum()


def sum_by_count(logits: Tensor, labels: Tensor) -> Tensor:
    return summed(logits, labels) / (labels != -100).sum()


def class_weights(labels: Tensor) -> Tensor:
    return WEIGHTS[labels[labels != -100]].sum()


def masked_and_all(logits: Tensor, labels: Tensor) -> Tensor:
    """Means over two counts: the tokens that count, and all."""
    return masked(logits, labels) + 0.1 * logits.square().mean()


def all_summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The numerator, which the count of the whole batch divides afterwards."""
    of_all = 0.1 * logits.square().sum() / (IDS.numel() * CLASSES)
    return summed(logits, labels) + of_all * counted(LABELS)


def padded_summed(logits: Tensor, labels: Tensor) -> Tensor:
    of_all = 0.1 * logits.square().sum() / (IDS.numel() * CLASSES)
    return summed(logits, labels) + of_all * counted(PADDED)


CASES = {
    "function": Case(mean, summed),
    "leaf of the model": Case(None, summed, criterion=nn.CrossEntropyLoss),
    "leaf with class weights": Case(
        None,
        lambda y, t: summed(y, t, weight=WEIGHTS),
        class_weights,
        criterion=lambda: nn.CrossEntropyLoss(weight=WEIGHTS.clone()),
    ),
    "class weights": Case(mean_by_class, lambda y, t: summed(y, t, weight=WEIGHTS), class_weights),
    "mask": Case(masked, summed),
    "sum by count": Case(sum_by_count, summed),
    "label smoothing": Case(smoothed, lambda y, t: summed(y, t, label_smoothing=0.1)),
    "padded microbatch": Case(mean, summed, labels=PADDED),
    "padded microbatch, mask": Case(masked, summed, labels=PADDED),
    "two counts": Case(masked_and_all, all_summed),
    "padded microbatch, two counts": Case(masked_and_all, padded_summed, labels=PADDED),
    "padded microbatch, leaf": Case(None, summed, labels=PADDED, criterion=nn.CrossEntropyLoss),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"stages": 2},
    "replicas": {"stages": 1, "axes": {"dp_replicate": 2}},
    "shards": {"stages": 1, "axes": {"dp_shard": 2}},
    "tokens over ranks": {"stages": 1, "axes": {"cp": 2}},
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def plain_step(model: nn.Module, case: Case) -> Tensor:
    """Trains on the undivided batch's loss, microbatch by microbatch; returns the loss."""
    optimizer, whole, total = sgd(model.parameters()), case.denominator(case.labels), torch.zeros(())
    for ids, labels in zip(IDS.chunk(MICROBATCHES), case.labels.chunk(MICROBATCHES), strict=True):
        loss = case.numerator(model(ids), labels) / whole
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def differing(case: Case, layout: dict[str, Any], world: World) -> list[str]:
    """What is not the plain loop's: the loss, or weights of rank 0's state."""
    torch.manual_seed(0)
    plain = Network().double()
    model = Network(case.criterion() if case.criterion is not None else None).double()
    model.load_state_dict(plain.state_dict(), strict=False)
    args: tuple[Any, ...] = (IDS,) if case.loss_fn is not None else (IDS, case.labels)
    target: dict[str, Any] = {} if case.loss_fn is None else {"target": case.labels}
    options: dict[str, Any] = {"loss_fn": case.loss_fn, "optimizer": sgd, "microbatches": MICROBATCHES}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownShares)
        engine = outsize.parallelize(model, args, **target, **layout, **options)
        loss, expected = engine.step(*args, **target).loss, plain_step(plain, case)
    state = engine.weights.full_state_dict()
    wrong = [] if torch.allclose(loss, expected.to(loss.dtype), rtol=1e-12, atol=0) else ["loss"]
    known = dict(plain.named_parameters())
    assert world.rank > 0 or known.keys() <= state.keys()
    return wrong + [
        n for n, p in known.items() if state and not torch.allclose(state[n], p, rtol=1e-11, atol=1e-13)
    ]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    wrong = {
        f"{name}, {place}": differing(copy.deepcopy(case), layout, world)
        for name, case in CASES.items()
        for place, layout in LAYOUTS.items()
    }
    (folder / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
