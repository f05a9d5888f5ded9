"""Does a framework's trainer compute split what it computes plain? Two updates of each, number by number.

    plain    the trainer without its split, in one process    numbers, gradients, weights of each update
    split    the trainer as it is, on every rank              the same, each rank its own
    compared in the order in which they come: the first that differs has its name and its update

From inside of a script each run is a fork, so the caller's trainer, its data and its generators stay as they
are; the forks of ranks meet in a group of their own, and all ranks get the verdict of rank 0. Where a fork
cannot compute, `outsize check --trainer` runs the whole script twice (integrations/checked_trainers.py).
"""

from __future__ import annotations

import json
import math
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.errors import BadOption, OutsizeError, RankFailed, error_of
from outsize.ir.answers.verdict import WITHIN, Verdict
from outsize.ir.plan import Plan
from outsize.run.transport.control_messages import all_gather_json, broadcast_json
from outsize.run.transport.groups import host_group
from outsize.run.transport.values import read_value, write_value
from outsize.train.check.compare import TrainingSnapshot, difference, relative_difference
from outsize.train.check.worker import Ambient
from outsize.train.world.join import join, take_place
from outsize.train.world.local_ranks import can_fork, run_in_forks
from outsize.train.world.world import forget_groups

UPDATES: Final = 2


@final
@dataclass(frozen=True, slots=True)
class TrainerUpdate:
    """Holds what a trainer has logged of one update, its gradients, and weights and buffers after it."""

    logged: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class TrainerRun:
    """Some updates of a trainer on one rank; `plan` is None for a plain one. `divides` says whether a batch
    of the trainer is several microbatches. `trainer` is the name of its class, `seconds` are those it took.
    """

    updates: Sequence[TrainerUpdate]
    plan: Plan | None
    divides: bool = False
    trainer: str = ""
    seconds: float = 0.0

    def save(self, file: Path) -> None:
        """Writes it to a file, and nothing where the process ends before."""
        seen = [[each.logged, each.gradients, each.weights, each.buffers] for each in self.updates]
        plan = None if self.plan is None else self.plan.to_json()
        write_value(file, [seen, plan, self.divides, self.trainer, self.seconds])

    @classmethod
    def load(cls, file: Path) -> Self:
        """Returns what `save` has written."""
        seen, plan, divides, trainer, seconds = read_value(file)
        updates = [TrainerUpdate(*each) for each in seen]
        return cls(
            updates, None if plan is None else Plan.of_document(json.loads(plan)), divides, trainer, seconds
        )


class CheckedTrainer(Protocol):
    """A trainer that runs split, and can run as if it were not."""

    def observed(self, updates: int, *, split: bool) -> TrainerRun:
        """Trains for so many updates, and returns what it has seen; this process is not used again."""
        ...


@final
@dataclass(frozen=True)
class RunFiles:
    """The files of one check in a folder: that of the plain run, and one of each rank."""

    folder: Path

    @property
    def plain(self) -> Path:
        """Returns the plain run's."""
        return self.folder / "plain.values"

    def rank(self, number: int) -> Path:
        """Returns a rank's."""
        return self.folder / f"rank{number}.values"

    @property
    def told(self) -> Path:
        """Returns that of a verdict, where one run of a program has made it."""
        return self.folder / "verdict.json"

    def verdict(self, ranks: int) -> Verdict:
        """Returns the verdict on a run over so many ranks."""
        if self.told.exists():
            return Verdict.model_validate_json(self.told.read_text(encoding="utf-8"))
        return verdict_of(TrainerRun.load(self.plain), [TrainerRun.load(self.rank(n)) for n in range(ranks)])


@final
@dataclass(frozen=True, slots=True)
class _Difference:
    what: str
    size: float
    text: str


def check_trainer(trainer: Any, updates: int = UPDATES) -> Verdict:
    """Returns the verdict on a trainer, which is left as it is; over ranks the same on each of them.

    Raises BadOption for what is no trainer of outsize's integrations, and where no fork can compute.
    """
    if not callable(getattr(trainer, "observed", None)):
        raise BadOption(
            f"the trainer is a {type(trainer).__name__}, which does not run split",
            next_step="class Split(outsize.integrations.transformers.Trainer, "
            f"{type(trainer).__name__}): ..., and Split(..., outsize={{'stages': 2}})",
        )
    if not can_fork(of_ranks=True):
        raise BadOption(
            "a trainer is checked in forks of this process, which cannot compute here",
            numbers="an accelerator is visible, or this is no Linux",
            next_step='outsize check --trainer "train.py ARGS", which runs the script once plain, once split',
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        return _over_ranks(trainer, updates, host_group(dist.group.WORLD))
    with tempfile.TemporaryDirectory(prefix="outsize-check-") as folder:
        files = RunFiles(Path(folder))
        _fork(trainer, updates, files.plain, split=False)
        _fork(trainer, updates, files.rank(0), split=True)
        return files.verdict(1)


def _over_ranks(trainer: Any, updates: int, host: dist.ProcessGroup) -> Verdict:
    """Returns the verdict on every rank of a group; a collective. Raises on all what one of them raises."""
    rank, ranks = host.rank(), host.size()
    machines = set(all_gather_json(socket.gethostname(), host, "machines of a check"))
    if len(machines) > 1:
        raise BadOption(
            "a trainer is checked by ranks of one machine, which meet in a folder of it",
            numbers=f"{len(machines)} machines",
            next_step="outsize run --nproc-per-node 2 train.py on one of them, with a small model",
        )
    with tempfile.TemporaryDirectory(prefix="outsize-check-") as own:
        files = RunFiles(Path(broadcast_json(own, host)))

        def meet() -> None:
            take_place(rank, ranks, files.folder / "store")
            join()  # Whoever fails behind this is missed by the others.

        if rank == 0:
            _insist_on_all(host, lambda: _fork(trainer, updates, files.plain, split=False))
        else:
            _insist_on_all(host, lambda: None)
        _insist_on_all(host, lambda: _fork(trainer, updates, files.rank(rank), split=True, before=meet))
        told = files.verdict(ranks).model_dump(mode="json") if rank == 0 else None
        return Verdict.model_validate(broadcast_json(told, host))


def _insist_on_all(host: dist.ProcessGroup, work: Callable[[], None]) -> None:
    """Works on this rank; raises the error of the rank whose work has failed first, on every rank."""
    own: list[Any] = []
    try:
        work()
    except OutsizeError as error:
        own = [isinstance(error, RankFailed), time.time(), json.dumps(error.fields())]
    failed = [each for each in all_gather_json(own, host, "how a check went") if each]
    if failed:  # What outsize has said says more than that a rank has ended.
        raise error_of(json.loads(min(failed)[2]))


def _fork(
    trainer: CheckedTrainer,
    updates: int,
    file: Path,
    *,
    split: bool,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Trains in a fork, which writes what it has seen to a file; it calls `before` first."""
    ambient = Ambient.here()

    def work() -> None:
        forget_groups()
        before()
        with ambient.entered():
            trainer.observed(updates, split=split).save(file)

    run_in_forks(1, work, joins=False)


def verdict_of(plain: TrainerRun, ranks: Sequence[TrainerRun]) -> Verdict:
    """Returns the verdict on what the ranks of a split run have seen, beside a plain run."""
    first = ranks[0]
    plan = first.plan
    assert plan is not None
    found = list(_differences(plain, ranks))
    rounds, relative = first.divides or bool(plan.axes.group_size > 1), _relative(plain, ranks)
    sizes = {what: max((d.size for d in found if d.what == what), default=0.0) for what in _KINDS}
    verdict = Verdict(
        model=f"{first.trainer} of {plan.model}",
        bit_equal=not found,
        loss_diff=sizes["logged"],
        grad_diff=sizes["gradient"],
        buffer_diff=sizes["buffer"],
        parameter_diff=sizes["weight"],
        first_divergence=None,
        stages=tuple(stage.units for stage in plan.stages),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        processes=len(ranks) if len(ranks) > 1 else 0,
        capture_s=0.0,
        run_s=first.seconds,
        notes=tuple(_notes(first, plain, 0.0 if rounds else relative)),
        relative_diff=relative if rounds else None,
    )
    return verdict if verdict.holds else verdict.model_copy(update={"first_divergence": found[0].text})


_KINDS: Final = ("logged", "gradient", "weight", "buffer")


def _notes(split: TrainerRun, plain: TrainerRun, relative: float) -> Iterator[str]:
    updates, seconds = len(plain.updates), plain.seconds
    yield f"{updates} updates of the trainer were compared; the plain one took {seconds:.1f} s with its start"
    if split.plan is not None and split.plan.form == "modules":
        yield "the model runs by modules, in its own Python, without overlap"
    if split.divides:
        yield "a batch is several microbatches, whose sums have another order: gradients of update 1 count"
    if 0 < relative <= WITHIN:
        yield (
            f"gradients of update 1 differ by at most {relative:.1e} of each one's largest element, as where "
            "sums have another order: a tied weight in several calls before one backward, for example"
        )


def _differences(plain: TrainerRun, ranks: Sequence[TrainerRun]) -> Iterator[_Difference]:
    """Yields what differs, in the order in which it came."""
    for rank, split in enumerate(ranks):
        if len(plain.updates) != len(split.updates):
            text = f"{len(plain.updates)} updates, {len(split.updates)} {_where(rank)}"
            yield _Difference("logged", math.inf, text)
    for number, one in enumerate(plain.updates, 1):
        others = [split.updates[number - 1] for split in ranks if len(split.updates) >= number]
        yield from _of_numbers(f"of update {number}", one.logged, [each.logged for each in others])
        gradients, weights = [each.gradients for each in others], [each.weights for each in others]
        yield from _of_tensors("gradient", f"of update {number}", one.gradients, gradients)
        yield from _of_tensors("weight", f"after update {number}", one.weights, weights)
        # Stages that use no buffer have none, so what no rank has is not compared.
        buffers = [each.buffers for each in others]
        used = {name: one.buffers[name] for name in one.buffers if any(name in own for own in buffers)}
        yield from _of_tensors("buffer", f"after update {number}", used, buffers)


def _of_numbers(
    at: str, plain: Mapping[str, float], ranks: Sequence[Mapping[str, float]]
) -> Iterator[_Difference]:
    # The loss comes before its gradients; other numbers may be of the weights behind them.
    names = sorted({*plain, *(n for own in ranks for n in own)}, key=lambda name: (name != "loss", name))
    for name in names:
        for rank, own in enumerate(ranks):
            a, b = plain.get(name), own.get(name)
            if not _is_same(a, b):
                size = abs(a - b) if a is not None and b is not None else math.inf
                text = f"{name} {at}: {_text(a)} plain, {_text(b)} {_where(rank)}"
                yield _Difference("logged", size, text)
                break


def _where(rank: int) -> str:
    """Returns where a number is of: ranks behind the first are named only where it has the plain one's."""
    return f"split on rank {rank}" if rank else "split"


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _text(number: float | None) -> str:
    return "no number" if number is None else f"{number:.9g}"


def _of_tensors(
    what: str, at: str, plain: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]]
) -> Iterator[_Difference]:
    for name in dict.fromkeys([*plain, *(name for own in ranks for name in own)]):
        one, others = plain.get(name), [own[name] for own in ranks if name in own]
        if one is None or not others:
            there = "split alone" if one is None else "in the plain trainer alone"
            yield _Difference(what, math.inf, f"{what} {name} {at}: {there}")
        elif size := max(difference(one, other) for other in others):
            yield _Difference(what, size, f"{what} {name} {at}: {size:.1e} apart")


def _relative(plain: TrainerRun, ranks: Sequence[TrainerRun]) -> float:
    """Returns how far the gradients of the first update are apart, relative to each one's largest element."""
    nothing = torch.zeros(())
    split = {name: grad for run in ranks for name, grad in run.updates[0].gradients.items()}
    one, other = (TrainingSnapshot(nothing, grads) for grads in (plain.updates[0].gradients, split))
    return relative_difference(one, other)
