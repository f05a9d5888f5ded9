"""Situations of a real training loop: each is run twice, by the plain loop and by an engine, and compared.

A situation says what the user does to the model (`wrap`), to the loop (`loop`) and to the optimizer. `Plain`
is the loop that everybody writes, with the methods of an Engine, so that one `loop` drives both. Where a
model draws random numbers the plain loop seeds as engines do (law 6); nothing else of outsize is in it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, final

import torch
from parity_runs import batch_of, random_bounds, recorded
from torch import Tensor, nn
from torch.optim import Optimizer
from zoo import Case

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.recording.fallbacks import LossFn, find_loss, record
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.program.tape import Tape
from outsize.run.stage.rng import borrowed_generators, seeder
from outsize.train.batch.batch import Batch, as_target
from outsize.train.check.compare import adamw, difference
from outsize.train.check.reference import eager
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.variants.model_state import StructureVersions
from outsize.train.variants.results import EvalResult, StepResult
from outsize.train.variants.variant import Variants

SEED, STEPS, MICROBATCHES, SIZE = 7, 3, 4, 8

Weigh = Callable[[Sequence[Batch]], list[float]]
Wrap = Callable[[nn.Module], nn.Module]
Entry = dict[str, Tensor]
Note = Callable[[Tensor | None], None]


def equally(parts: Sequence[Batch]) -> list[float]:
    """Microbatches of one size."""
    return [1 / len(parts)] * len(parts)


@final
class Plain:
    """The training loop of one device: `for part: (loss * weight).backward()`, clip, step."""

    def __init__(self, model: nn.Module, found: Situation, plan: Plan, loss_fn: LossFn | None) -> None:
        self.model, self.clip_norm, self.steps = model, found.clip_norm, 0
        self._loss_fn, self._weigh, self._dropout = loss_fn, found.weigh, found.dropout
        self._variants, self._settings = Variants(model, plan, loss_fn), StructureVersions(model)
        self.optimizer: Optimizer | None = found.optimizer(model.parameters())

    def step(
        self, *args: Any, target: Any = None, update: bool = True, loss_scale: float = 1.0, **kwargs: Any
    ) -> StepResult:
        parts = Batch(args, kwargs, as_target(target)).split(MICROBATCHES)
        total: Tensor | None = None
        with self._seeding():
            for mb, (part, weight) in enumerate(zip(parts, self._weigh(parts), strict=True)):
                loss = self._forward(part, mb)[1]
                assert loss is not None
                with torch.autocast("cpu", enabled=False):
                    (loss * (weight * loss_scale)).backward()
                torch.clear_autocast_cache()  # as if the context were around each forward alone
                share = loss.detach() * weight
                total = share if total is None else total + share
        self.steps += 1
        assert total is not None
        return StepResult(total, self.update() if update else None)

    def update(self) -> Tensor | None:
        norm = None
        if self.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> EvalResult:
        before = {m: m.training for m in self.model.modules()}
        self.model.eval()
        parts = Batch(args, kwargs, as_target(target)).split(MICROBATCHES)
        found = [self._run(part) for part in parts]
        for module, training in before.items():
            module.training = training
        weighed = zip(found, self._weigh(parts), strict=True)
        shares = [loss * w for (_, loss), w in weighed if loss is not None]
        total = None
        for share in shares:
            total = share if total is None else total + share
        return EvalResult(total, tuple(output for output, _ in found))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def _seeding(self) -> AbstractContextManager[None]:
        return borrowed_generators() if self._dropout else nullcontext()

    def prepare(self, batch: Batch) -> None:
        for part in batch.split(MICROBATCHES):
            self._tape(part)

    def _tape(self, part: Batch) -> Tape:
        return self._variants.find(part, outputs=False, state=self._settings.number()).tape

    def _forward(self, part: Batch, mb: int) -> tuple[Any, Tensor | None]:
        if not self._dropout:
            return self._run(part)
        tape = self._tape(part)
        return eager(self.model, tape, part, seeder(SEED, self.steps, mb), self._loss_fn)

    def _run(self, part: Batch) -> tuple[Any, Tensor | None]:
        output = self.model(*part.args, **part.kwargs)
        return output, self._loss_fn(output, *part.target) if self._loss_fn else find_loss(output)


Trainer = Plain | Engine
Loop = Callable[[Trainer, Sequence[Batch], Note], None]


def step(trainer: Trainer, batch: Batch, **options: Any) -> StepResult:
    """One step on a batch."""
    return trainer.step(*batch.args, target=batch.target or None, **options, **batch.kwargs)


def train(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """The ordinary loop; the gradients are noted before the optimizer drops them."""
    for batch in batches:
        note(step(trainer, batch, update=False).loss)
        trainer.update()


def batches_of(found: Case) -> list[Batch]:
    """Another batch for each step."""
    return batch_of(found, SIZE * STEPS).split(STEPS)


def as_it_is(model: nn.Module) -> nn.Module:
    """Situations of the loop leave the model alone."""
    return model


@final
@dataclass(frozen=True)
class Situation:
    """What a user does that a bare loop does not do; `changes`: the numbers are not the bare loop's."""

    name: str
    wrap: Wrap = as_it_is
    loop: Loop = train
    batches: Callable[[Case], list[Batch]] = batches_of
    optimizer: Callable[[Iterable[Any]], Optimizer] = adamw
    clip_norm: float | None = None
    weigh: Weigh = equally
    dropout: bool = False
    changes: bool = True
    changes_state: bool = False  # the loop changes attributes of a model that has been prepared
    schedule: ScheduleName = "1f1b"
    stages: int = 3
    cuts: int | None = None  # seed of random cuts; None: evenly many units per stage


BARE = Situation("bare", changes=False)


def split(graph: ModelGraph, found: Situation) -> Plan:
    """Stages of evenly many units, or cuts at random."""
    count = len(graph.units)
    stages = min(found.stages, count)
    bounds = tuple(count * s // stages for s in range(stages + 1))
    if found.cuts is not None:
        bounds = random_bounds(count, stages, random.Random(found.cuts))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{stages}xcpu",
        axes=Axes(pp=stages),
        batch_size=SIZE,
        microbatches=MICROBATCHES,
        schedule=found.schedule,
        stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{s}" for s in range(stages))),
    )


@cache
def _built(known: Case, dropout: bool) -> nn.Module:
    """A transformer of four layers gets two, which is faster and still enough for four stages."""
    model: Any = known.build(dropout=dropout)
    if getattr(getattr(model, "config", None), "num_hidden_layers", 0) != 4:
        return model
    model.config.num_hidden_layers = 2
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList) and len(child) == 4:
                setattr(parent, name, child[:2])
    return model


def fresh(known: Case, dropout: bool = False) -> nn.Module:
    """The case's model with its first weights."""
    return copy.deepcopy(_built(known, dropout))


def wrapped(known: Case, wrap: Wrap, dropout: bool) -> nn.Module:
    """What the situation makes of it, equal each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return wrap(fresh(known, dropout))


@lru_cache(maxsize=16)
def captured(known: Case, wrap: Wrap, dropout: bool, batches: Callable[[Case], list[Batch]]) -> Captured:
    """Situations that change nothing of the model share it."""
    model, part = wrapped(known, wrap, dropout), batches(known)[0].split(MICROBATCHES)[0]
    return build_graph(record(model, part.args, part.kwargs, known.loss, part.target), model)


@final
class Both:
    """The two trainers of a situation on one model, and what each has noted."""

    def __init__(self, found: Situation, known: Case) -> None:
        self.found, self.known = found, known
        self.batches = found.batches(known)
        self.captured = captured(known, found.wrap, found.dropout, found.batches)
        self.plan = split(self.captured.graph, found)

    def _model(self) -> nn.Module:
        return wrapped(self.known, self.found.wrap, self.found.dropout)

    def _recorded(self) -> AbstractContextManager[None]:
        """A tape of an equal model, unless the situation may have put objects of one model into another's, or
        changes what Python reads of this one.
        """
        shared = self.found.wrap is as_it_is and not self.found.changes_state
        return recorded(self.captured.tape) if shared else nullcontext()

    def plain(self) -> Plain:
        trainer = Plain(self._model(), self.found, self.plan, self.known.loss)
        if self.found.dropout:
            with self._recorded():
                trainer.prepare(self.batches[0])
        return trainer

    def engine(self) -> Engine:
        options = {"clip_norm": self.found.clip_norm, "seed": SEED, "optimizer": self.found.optimizer}
        engine = make_engine(
            self._model(), self.plan, None, EngineOptions(loss_fn=self.known.loss, **options)
        )
        with self._recorded():
            engine.prepare(self.batches[0])
        return engine

    def run(self, trainer: Trainer) -> list[Entry]:
        """What the loop notes, and the state behind it."""
        entries: list[Entry] = []
        self.found.loop(trainer, self.batches, lambda loss: entries.append(state_of(trainer, loss)))
        return [*entries, state_of(trainer, None)]


def state_of(trainer: Trainer, loss: Tensor | None) -> Entry:
    """Loss, gradients, buffers and parameters, copied."""
    found = {"loss": loss} if loss is not None else {}
    named = list(trainer.named_parameters())
    found |= {f"grad {n}": p.grad for n, p in named if p.grad is not None}
    found |= {f"parameter {n}": p for n, p in named}
    found |= {f"buffer {n}": b for n, b in trainer.model.named_buffers()}
    return {name: t.detach().clone() for name, t in found.items()}


def differing(expected: Sequence[Entry], found: Sequence[Entry]) -> list[str]:
    """`2 grad net1.weight: 1e-3` for everything that is not `torch.equal`, the first of it first."""
    if len(expected) != len(found):
        return [f"{len(expected)} notes against {len(found)}"]
    rows = []
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        gaps = {n: difference(a.get(n), b.get(n)) for n in sorted(a.keys() | b.keys())}
        rows += [f"{number} {name}: {gap}" for name, gap in gaps.items() if gap]
    return rows


@cache
def bare(known: Case, dropout: bool) -> list[Entry]:
    """The bare loop's numbers, against which a situation shows that it does something."""
    both = Both(replace(BARE, dropout=dropout), known)
    return both.run(both.plain())


def insist_on_parity(found: Situation, known: Case) -> None:
    """Bit-equal, and not by doing nothing."""
    both = Both(found, known)
    plain = both.run(both.plain())
    if found.changes:
        assert differing(bare(known, found.dropout), plain), "the situation changes nothing"
    gaps = differing(plain, both.run(both.engine()))
    assert not gaps, gaps[:8]
