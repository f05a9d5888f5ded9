"""One rank of two: `guards_worker.py FOLDER EVERY`. Values that Python reads change between steps; every
EVERY-th value of each kind.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from bound_functions import FORMS, Odd, Once, Using
from guard_models import KINDS, WIDTH, WRITES, Reading, ReadingInside, ReadingLoss, Switch, reset, squared
from guard_runs import batches, plain, plan_of, sgd
from program_models import OTHERS, Layers, changing
from recorded_once import always_recorded
from test_guards_moving import Annealed

from outsize.device import futex
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

FORWARD = ("number", "list", "namespace", "class", "function", "context variable")
WRITTEN = (
    *("counter", "warm-up", "log", "table", "global", "average", "generator", "seed", "seed under a fork"),
    *("itertools.count", "random of NumPy"),
)
BOUND = ("alias", "attribute", "partial", "several outputs", "context apart", "vmap, own rule", "reentrant")
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
    own = dict(engine.weights.named_parameters())
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


def of_bound(form: str, group: Any) -> list[int]:
    """The model's own forward calls an autograd function whose `apply` was bound before; another one is bound
    to the attribute at step two.
    """
    model, other = Using(FORMS[form]), Using(FORMS[form])

    def rebound(of: Using) -> Any:
        return lambda n: setattr(of, "function", Once.apply if n >= 2 else Odd.apply)

    return differing(other, squared, rebound(other), plain(model, squared, rebound(model)), group)


def of_annealing(group: Any) -> list[int]:
    """A value of the loss changes at each step."""
    loss = Annealed()
    expected = plain(Reading(), loss, lambda n: setattr(loss, "beta", n / 6), 6)
    other = Annealed()
    return differing(Reading(), other, lambda n: setattr(other, "beta", n / 6), expected, group)


@final
class Scaled(nn.Linear):
    """A layer that reads a number."""

    scale = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


def of_one_rank(owner: int, world: World, *, shares_memory: bool) -> list[int]:
    """A number of a layer changes at steps two to four, on the rank alone that runs the layer."""
    torch.manual_seed(0)
    plain_model = nn.Sequential(
        Scaled(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, WIDTH)
    )
    model = copy.deepcopy(plain_model)

    def changing(layer: Any, happens: bool) -> Any:
        return lambda n: setattr(layer, "scale", {2: 0.5, 3: 0.25, 4: 1.0}.get(n, 1.0)) if happens else None

    place = -owner  # the first layer or the last
    expected = plain(plain_model, squared, changing(plain_model[place], True), 6)
    with patch.object(futex, "AVAILABLE", futex.AVAILABLE and shares_memory):
        here = changing(model[place], world.rank == owner)
        return differing(model, squared, here, expected, world.group)


def of_hook_on_rank_0(where: str, world: World) -> list[int]:
    """A hook of a module looks at every other step on rank 0 alone, and changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, WIDTH))
    expected = plain(copy.deepcopy(model), squared, lambda n: None, 6)
    clock = Clock()

    def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if world.rank == 0 and clock.step % 2 == 0:
            clock.seen.append(float(output.detach().abs().max()))

    model.get_submodule(where).register_forward_hook(look)
    return differing(model, squared, lambda n: setattr(clock, "step", n), expected, world.group)


@final
class Clock:
    """Holds the number of the step, and what a hook has seen."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: list[float] = []


def of_programs(mode: str, group: Any) -> list[int]:
    """The forward is another program at steps two and three, whose weights are on the rank of the first."""
    model, other = Layers(dropout=0), Layers(dropout=0)
    expected = plain(model, squared, changing(model, "plain", mode), 4)
    return differing(other, squared, changing(other, "plain", mode), expected, group)


def of_moving_numbers(group: Any) -> list[int]:
    """A factor of the model's own forward changes at each step, and a decision on it falls otherwise once."""
    model = Reading(_moving)
    expected = plain(model, squared, lambda n: setattr(model.switch, "number", n / 7), 7)
    other = Reading(_moving)
    return differing(other, squared, lambda n: setattr(other.switch, "number", n / 7), expected, group)


def _moving(s: Switch, x: torch.Tensor) -> torch.Tensor:
    return x * (1 - s.number) if s.number < 0.6 else x + s.number


def main(folder: Path, every: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = join()
    with always_recorded():
        wrong = everything(world.group, every)
        for owner in (0, 1):
            wrong[f"rank {owner}"] = of_one_rank(owner, world, shares_memory=True)
            wrong[f"rank {owner}, gloo"] = of_one_rank(owner, world, shares_memory=False)
        wrong |= {f"hook {place}": of_hook_on_rank_0(place, world) for place in ("0", "3")}
    reset()
    (folder / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    leave(world)


def everything(group: Any, every: int) -> dict[str, list[int]]:
    """What differs, by case."""
    wrong = {f"forward, {kind}": of_forward(kind, group) for kind in FORWARD[::every]}
    wrong |= {f"loss, {kind}": of_loss(kind, group) for kind in LOSS[::every]}
    wrong |= {f"writes, {kind}": of_writes(kind, group) for kind in WRITTEN[::every]}
    wrong |= {f"bound, {form}": of_bound(form, group) for form in BOUND[::every]}
    wrong |= {f"programs, {mode}": of_programs(mode, group) for mode in [*OTHERS][::every]}
    return {**wrong, "annealing": of_annealing(group), "moving numbers": of_moving_numbers(group)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
