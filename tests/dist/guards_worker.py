"""One rank of two: `guards_worker.py FOLDER`. Values that Python reads change between steps."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from guard_models import KINDS, WRITES, Reading, ReadingInside, ReadingLoss, reset, squared
from guard_runs import batches, plain, plan_of, sgd
from recorded_once import always_recorded
from test_guards_moving import Annealed

from outsize.train.engine.factory import make_engine
from outsize.train.engine.options import EngineOptions
from outsize.train.launch.launch import join, leave

FORWARD = ("number", "list", "namespace", "class", "function")
LOSS = ("dict", "numpy array", "global", "closure", "none")


def differing(model: Any, loss_fn: Any, between: Any, expected: list[torch.Tensor], group: Any) -> list[int]:
    """The steps whose loss, and this rank's parameters that are not the plain loop's."""
    steps = len(expected) - len(list(model.parameters()))
    engine = make_engine(model, plan_of(model, loss_fn), group, EngineOptions(loss_fn=loss_fn, optimizer=sgd))
    losses = []
    for number, (x, y) in enumerate(batches(steps)):
        between(number)
        losses.append(engine.step(x, target=y).loss)
    wrong = [n for n, loss in enumerate(losses) if not torch.equal(loss, expected[n])]
    names = [name for name, _ in model.named_parameters()]
    own = dict(engine.named_parameters())
    assert own
    wrong += [
        steps + n for n, k in enumerate(names) if k in own and not torch.equal(own[k], expected[steps + n])
    ]
    return wrong


def of_forward(kind: str, group: Any) -> list[int]:
    """A value of the model's own forward changes at step two."""
    use, change = KINDS[kind]
    model = Reading(use)
    expected = plain(model, squared, lambda n: change(model.switch) if n == 2 else None)
    reset()
    other = Reading(use)
    return differing(other, squared, lambda n: change(other.switch) if n == 2 else None, expected, group)


def of_loss(kind: str, group: Any) -> list[int]:
    """A value of the loss changes at step two."""
    use, change = KINDS[kind]
    loss = ReadingLoss(use)
    expected = plain(Reading(), loss, lambda n: change(loss.switch) if n == 2 else None)
    reset()
    other = ReadingLoss(use)
    return differing(Reading(), other, lambda n: change(other.switch) if n == 2 else None, expected, group)


def of_writes(kind: str, group: Any) -> list[int]:
    """A submodule writes into objects, or draws by a seed or a generator of its own."""
    expected = plain(ReadingInside(WRITES[kind]), squared, lambda _: None)
    reset()
    return differing(ReadingInside(WRITES[kind]), squared, lambda _: None, expected, group)


def of_annealing(group: Any) -> list[int]:
    """A value of the loss changes at each step."""
    loss = Annealed()
    expected = plain(Reading(), loss, lambda n: setattr(loss, "beta", n / 6), 6)
    other = Annealed()
    return differing(Reading(), other, lambda n: setattr(other, "beta", n / 6), expected, group)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = join()
    with always_recorded():
        wrong = everything(world.group)
    reset()
    (folder / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    leave(world)


def everything(group: Any) -> dict[str, list[int]]:
    """What differs, by case."""
    wrong = {f"forward, {kind}": of_forward(kind, group) for kind in FORWARD}
    wrong |= {f"loss, {kind}": of_loss(kind, group) for kind in LOSS}
    wrong |= {f"writes, {kind}": of_writes(kind, group) for kind in WRITES}
    return {**wrong, "annealing": of_annealing(group)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
