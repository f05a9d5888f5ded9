"""A fuzzed case: a model, a loss, batches and a loop from one seed; the plain loop, and an engine's.

The plain loop is the judge: microbatches one after the other, in one process. It shares no code with outsize.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from fuzz_losses import Annealed, ReadingLoss, Target, loss_named, shares, some_loss
from fuzz_pieces import ENVIRONMENT, READS, Chosen, Grammar, Reads, Repeated
from guard_models import WIDTH, reset
from torch import Tensor, nn

from outsize.capture.graph.by_modules import capture_model
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

STEPS = 4
SCHEDULES = ("naive", "gpipe", "1f1b", "zero-bubble", "interleaved", "zero-bubble-v")
Numbers = dict[str, Tensor]
Between = Callable[[int, Any, Any], None]  # (the step that comes, model, loss function)


class Composed(nn.Module):
    """Pieces in a row, with skips over several of them; some are read at the root."""

    def __init__(self, draw: random.Random, *, batched: bool) -> None:
        super().__init__()
        grammar = Grammar(draw, batched=batched)
        self.pieces = nn.ModuleList([grammar.piece() for _ in range(draw.randint(3, 6))])
        self.skips = {
            place: draw.randrange(place) for place in range(1, len(self.pieces)) if draw.random() < 0.3
        }
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reads = draw.choice([None, None, Reads(draw.choice(list(READS)))])

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for place, piece in enumerate(self.pieces):
            x = piece(x)
            if place in self.skips:
                x = x + values[self.skips[place]]
            values.append(x)
        if self.reads is not None:
            x = self.reads.use(self.reads.switch, x)
        return self.head(x)


@final
@dataclass(frozen=True)
class Case:
    """All that a seed decides."""

    seed: int
    loss: str
    microbatches: int
    sizes: tuple[int, ...]  # samples of each step's batch
    stages: int
    schedule: str
    ranks: int
    adamw: bool
    clip_norm: float | None
    changes: tuple[tuple[int, int], ...]  # (step, number of the change)

    @classmethod
    def of(cls, seed: int, ranks: int | None = None) -> Case:
        draw = random.Random(f"case {seed}")
        count, per_part = draw.choice([1, 2, 2, 3, 4]), draw.choice([1, 1, 2, 3])
        size = count * per_part + (draw.randrange(count) if draw.random() < 0.3 else 0)
        sizes = [size] * STEPS
        if draw.random() < 0.2:
            sizes[-1] = max(count, size - 1)
        schedule = draw.choice(SCHEDULES)
        several = schedule in ("interleaved", "zero-bubble-v")
        ranks = ranks or draw.choice([1, 2, 2, 3])
        return cls(
            seed,
            some_loss(draw),
            count,
            tuple(sizes),
            stages=2 * ranks if several else ranks,
            schedule=schedule,
            ranks=ranks,
            adamw=draw.random() < 0.3,
            clip_norm=0.5 if draw.random() < 0.2 else None,
            changes=tuple((draw.randint(1, STEPS - 1), draw.randrange(99)) for _ in range(draw.randrange(3))),
        )

    def model(self) -> nn.Module:
        """A new model, equal each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            smallest = min(self.sizes) // self.microbatches
            return Composed(random.Random(f"model {self.seed}"), batched=smallest > 1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.adamw:
            return torch.optim.AdamW(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    def batches(self) -> list[tuple[Tensor, Target]]:
        draw = torch.Generator().manual_seed(self.seed)
        target = loss_named(self.loss).target
        return [(torch.randn(size, WIDTH, generator=draw), target(size, draw)) for size in self.sizes]

    def parts(self, samples: int) -> int:
        """A batch shorter than the first has as many microbatches as keep the size."""
        if samples >= self.sizes[0]:
            return self.microbatches
        return min(self.microbatches, -(-samples // -(-self.sizes[0] // self.microbatches)))

    def between(self, number: int, model: Any, loss_fn: Any) -> None:
        """What the user changes before a step."""
        if isinstance(loss_fn, Annealed):
            loss_fn.beta = number / STEPS
        places = changeable(model, loss_fn)
        for step, which in self.changes:
            if step == number and places:
                places[which % len(places)]()


def changeable(model: Any, loss_fn: Any) -> list[Callable[[], Any]]:
    """All that can be changed between two steps of this model and loss."""
    found: list[Callable[[], Any]] = []
    holders = [*model.modules(), loss_fn]
    uses = {id(use): change for use, change in READS.values()}
    for holder in holders:
        if isinstance(holder, Reads | ReadingLoss):
            change, switch = uses[id(holder.use)], holder.switch
            found.append(lambda change=change, switch=switch: change(switch))
        if isinstance(holder, Repeated):
            found.append(lambda holder=holder: setattr(holder, "times", holder.times - 1))
        if isinstance(holder, Chosen):
            found.append(lambda holder=holder: holder.settings.update(part="second"))
    return found


def restore() -> None:
    """Gives what belongs to the process its first value."""
    reset()
    os.environ.pop(ENVIRONMENT, None)


# -- the judge ---------------------------------------------------------------------------------------------


def parts_of(x: Tensor, target: Target, count: int) -> list[tuple[Tensor, Target]]:
    """Microbatches whose sizes differ by one at most, the larger first; none is empty."""
    xs = x.tensor_split(count)
    targets = zip(*(t.tensor_split(count) for t in target), strict=True)
    return list(zip(xs, targets, strict=True))


def plain(case: Case) -> Numbers:
    """Each step's loss, and what the loop leaves behind."""
    restore()
    model, loss = case.model(), loss_named(case.loss)
    loss_fn = loss.make()
    optimizer = case.optimizer(model.parameters())
    numbers: Numbers = {}
    for number, (x, target) in enumerate(case.batches()):
        case.between(number, model, loss_fn)
        parts = parts_of(x, target, case.parts(len(x)))
        total = torch.zeros(())
        for (part, wanted), share in zip(parts, shares(loss, [t for _, t in parts]), strict=True):
            output = model(part)
            value = loss_fn(output, *wanted)
            if share:
                (value * share).backward()
                total = total + value.detach() * share
            else:  # Its loss may be 0 / 0; in the whole batch its samples have gradients of zero.
                (output * 0).sum().backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        numbers[f"loss {number}"] = total
    return numbers | left_by(model)


def left_by(model: nn.Module) -> Numbers:
    """Parameters and buffers, and the numbers and lists that the forward writes."""
    written = [(n, m) for n, m in model.named_modules() if hasattr(m, "notes") or hasattr(m, "calls")]
    state = {f"{n}.notes": torch.tensor(m.notes) for n, m in written if hasattr(m, "notes")}
    state |= {f"{n}.calls": torch.tensor(m.calls) for n, m in written if hasattr(m, "calls")}
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())} | state


# -- the engine --------------------------------------------------------------------------------------------


def plan_of(case: Case) -> Plan:
    """Stages between units drawn at random."""
    restore()
    (x, target), loss_fn, model = case.batches()[0], loss_named(case.loss).make(), case.model()
    part, wanted = parts_of(x, target, case.microbatches)[0]
    graph = capture_model(model, (part,), {}, loss_fn, wanted, len(part)).graph
    draw, count = random.Random(f"cuts {case.seed}"), len(graph.units)
    stages, schedule, ranks = case.stages, case.schedule, case.ranks
    if count < stages or graph.form == "modules":
        stages, schedule, ranks = 1, "1f1b", 1
    bounds = (0, *sorted(draw.sample(range(1, count), stages - 1)), count)
    folded = [min(s, 2 * ranks - 1 - s) if schedule == "zero-bubble-v" else s % ranks for s in range(stages)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=f"{ranks}xcpu",
        axes=Axes(pp=ranks),
        batch_size=len(x),
        microbatches=case.microbatches,
        schedule=schedule,
        stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{rank}" for rank in folded)),
    )


def split(case: Case, plan: Plan, group: dist.ProcessGroup | None = None) -> tuple[Numbers, Engine]:
    """The same of an engine; over processes only what this rank has."""
    restore()
    model, loss_fn = case.model(), loss_named(case.loss).make()
    options = EngineOptions(loss_fn=loss_fn, optimizer=case.optimizer, clip_norm=case.clip_norm)
    engine = make_engine(model, plan, group, options)
    numbers: Numbers = {}
    for number, (x, target) in enumerate(case.batches()):
        case.between(number, model, loss_fn)
        numbers[f"loss {number}"] = engine.step(x, target=target).loss
    if group is not None:
        return numbers | {n: p.detach().clone() for n, p in engine.weights.named_parameters()}, engine
    return numbers | left_by(engine.model), engine


def differing(expected: Numbers, found: Numbers) -> list[str]:
    """Names of what is not bit-equal, or missing among `expected`."""
    return [n for n, t in found.items() if n not in expected or not equal(expected[n], t)]


def equal(a: Tensor, b: Tensor) -> bool:
    """NaN is equal to NaN: a diverging loop diverges alike."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
