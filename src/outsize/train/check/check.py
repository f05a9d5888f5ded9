"""Compares the split run with the plain loop, on the user's own model and on two batches.

The second batch has other values: what of the first one became a constant of the program shows in its step.
Both start from copies, so the user's model stays unchanged. In one process all stages take turns; with
`processes` each stage is a real process (train/check/worker.py) that writes its tensors to files. When
numbers differ the verdict names the first unit whose numbers do.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn

from outsize.axes.registry import those
from outsize.capture.fakes.untouched import taken_back
from outsize.capture.graph.build import Captured
from outsize.capture.guards.trace.undone_writes import without_writes
from outsize.capture.recording.fallbacks import LossFn
from outsize.errors import BadOption, ExampleRejected, OutsizeError, ReplayMismatch
from outsize.ir.answers.verdict import WITHIN, WITHIN_DOUBLE, LossCounts, Verdict
from outsize.ir.plan import Plan
from outsize.program.objects import model_copy
from outsize.program.python_reads import LOSS
from outsize.program.source_line import raising_line
from outsize.program.weights.of_loss import loss_modules, with_loss
from outsize.run.stage.batchnorm import DeferredStatistics
from outsize.run.stage.rng import seeder
from outsize.run.transport.values import read_value
from outsize.schedules.refine import by_blocks
from outsize.train.batch.batch import Batch
from outsize.train.batch.checks import insist_on_loss, insist_on_values
from outsize.train.batch.loss_weights import UnknownShares
from outsize.train.check import worker
from outsize.train.check.compare import (
    Differences,
    PlainLoop,
    TrainingSnapshot,
    adamw,
    compare,
    counters_of,
    engine_snapshots,
    merge,
    reference_snapshots,
    relative_difference,
    worst,
)
from outsize.train.check.divergence import first_forward_divergence, first_wrong_buffer, last_wrong_gradient
from outsize.train.check.leaf_outputs import eager_calls, first_other_call, watched_modules
from outsize.train.check.loss_counts import CountedParts, mean_of_means, whole_snapshot
from outsize.train.check.notes import autocast_note, batchnorm_note, constant_note, undivided_note
from outsize.train.check.reference import TapeOf, undivided_loss
from outsize.train.check.worker import SENDABLE, Ambient, Payload, run_rank
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.variants.variant import Variants
from outsize.train.world.local_ranks import can_fork, run_in_forks, run_in_interpreters

# So many steps are compared where a model or loss keeps state from call to call.
STATEFUL_STEPS = 3
# The relative difference of gradients above which microbatches have another loss than the undivided batch.
# Sums in another order differ by 1e-6 to 1e-4 in float32.
UNDIVIDED = 1e-3


@final
@dataclass(frozen=True)
class Question:
    """A model, batch and plan to be checked. `steps` AdamW steps are compared, and the gradients of the last
    one, to which those of `second_batch` are added, or of one that is made of the batch. `planned` is the
    captured model as the plan runs it: with its loss in pieces, if it has them.
    """

    model: nn.Module
    batch: Batch
    loss_fn: LossFn | None
    plan: Plan
    captured: Captured
    planned: Captured
    capture_s: float
    steps: int = 1
    seed: int = 0
    second_batch: Batch | None = None


def enough_steps(captured: Captured) -> int:
    """Returns how many steps show what the calls of later steps do.

    A module or loss that counts its calls, draws from a generator of its own or reads values that move may
    compute something else later; so may anything in a model that runs by modules.
    """
    return STATEFUL_STEPS if _is_stateful(captured) else 1


def _is_stateful(captured: Captured) -> bool:
    tape = captured.tape
    return bool(tape.keepers) or LOSS in tape.live or captured.graph.form == "modules"


@contextmanager
def _from_now(question: Question) -> Iterator[None]:
    """Gives the loss function, and what copies of the model share, the state back that they have now, when
    the context ends: each run begins with it.
    """
    of_loss = list(loss_modules(with_loss(question.model, question.loss_fn)).values())
    written = without_writes(question.loss_fn) if _is_stateful(question.captured) else nullcontext()
    with taken_back(of_loss), written:
        yield


def verify(question: Question, *, processes: bool) -> Verdict:
    """Returns the verdict.

    Raises BadOption when the model or loss cannot be sent to processes, or is on meta.
    """
    plan = question.plan
    if plan.form == "tape":
        insist_on_loss(question.captured.tape)
    insist_on_values(question.model.named_parameters(), question.batch)
    second = question.second_batch or question.batch.with_other_values()
    batches = [question.batch] if second is None else [question.batch, second]
    tapes = _tapes(question)
    references = _references(question, batches, tapes)
    batches = batches[: len(references)]
    reference = references[0]
    start = time.perf_counter()
    split_runs = _over_processes(question, batches) if processes else _in_one_process(question, batches)
    run_s = time.perf_counter() - start
    counts = _counts(question, tapes)
    pairs = list(zip(references, split_runs, strict=True))
    by_batch = [compare(expected, found) for expected, found in pairs]
    differences = worst(by_batch)
    meshed = processes and plan.axes.group_size > 1
    rounds = meshed or max(plan.loss_pieces, plan.module_pieces, plan.slices) > 1
    relative = max(relative_difference(*pair) for pair in pairs) if rounds else None
    within = WITHIN_DOUBLE if _is_double(reference) else WITHIN
    holds = differences.bit_equal or (relative is not None and relative <= within)
    return Verdict(
        model=plan.model,
        bit_equal=differences.bit_equal,
        loss_diff=differences.loss,
        grad_diff=differences.grads,
        buffer_diff=differences.buffers,
        parameter_diff=differences.parameters,
        first_divergence=None if holds else _first_divergence(question, batches, by_batch),
        stages=tuple(stage.units for stage in plan.stages),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        processes=plan.axes.world_size if processes else 0,
        capture_s=question.capture_s,
        run_s=run_s,
        notes=(
            *question.captured.tape.opaque,
            *([constant_note()] if by_batch[0].bit_equal and not holds else []),
            *_by_design(question, reference, tapes, meshed=meshed),
        ),
        relative_diff=relative,
        within=within,
        counts=counts,
    )


def _is_double(snapshot: TrainingSnapshot) -> bool:
    return all(t.dtype == torch.float64 for t in (snapshot.loss, *snapshot.grads.values()))


def _by_design(
    question: Question, reference: TrainingSnapshot, tapes: TapeOf, *, meshed: bool
) -> Iterator[str]:
    """Yields notes on differences that are by design and that somebody might not expect, with their sizes."""
    plan = question.plan
    if meshed:
        has_parts = plan.axes.divides_weights or plan.axes.divides_states
        parts = " each rank's parts are gathered first;" if has_parts else ""
        yield (
            f"ranks add up in another order than one process ({plan.axes.beyond_pp}), so loss and gradients"
            f" count, relative to each tensor's largest element;{parts} buffers and parameters are shown"
        )
    if plan.microbatches * plan.axes.replicas > 1 and DeferredStatistics(question.model).training:
        undivided = _references(question, [question.batch], tapes, microbatches=1)[0]
        whole = compare(_uncounted(undivided), _uncounted(reference))
        yield batchnorm_note(plan, question.batch.size, whole)
        if plan.axes.replicas > 1:
            yield "over processes running statistics are those of replica 0's microbatches, as under DDP"
    elif plan.microbatches * plan.axes.replicas > 1 and plan.form == "tape":
        yield from _against_undivided(question, reference, tapes)
    if plan.form == "tape":
        yield from autocast_note(question.planned, plan)


def _against_undivided(question: Question, reference: TrainingSnapshot, tapes: TapeOf) -> Iterator[str]:
    """Notes where the microbatches together are another loss than the batch in one piece.

    Not for a model that draws random numbers, which differ, nor in low precision, where roundings do.
    """
    if not _is_exact(question):
        return
    if question.steps > 1:
        reference = _references(replace(question, steps=1), [question.batch], tapes)[0]
    whole = _whole(question)
    # By gradients alone, since a loss can be close to zero.
    distance = relative_difference(whole, replace(reference, loss=whole.loss))
    if distance > UNDIVIDED:
        doubt = _counted(question, tapes).doubt
        yield undivided_note(question.plan, float(whole.loss), float(reference.loss), distance, doubt)


def _is_exact(question: Question) -> bool:
    """Whether a run in other parts has the same numbers but for roundings: nothing is drawn, nor in low
    precision.
    """
    instructions = question.captured.tape.instructions
    known = (torch.float32, torch.float64)
    lowered = any(i.modes.autocast for i in instructions)
    trained = (p.dtype in known for p in question.model.parameters() if p.requires_grad)
    return not lowered and all(trained) and not any(i.random for i in instructions)


def _whole(question: Question) -> TrainingSnapshot:
    model = _copied(question.model)
    with _from_now(question):
        loss = undivided_loss(model, question.batch.copied(), question.loss_fn)
    return whole_snapshot(model, loss)


def _counted(question: Question, tapes: TapeOf) -> CountedParts:
    model, parts = _copied(question.model), _parts(question)
    with _from_now(question):
        return CountedParts(parts, counters_of(model, tapes, parts, question.loss_fn))


def _counts(question: Question, tapes: TapeOf) -> LossCounts | None:
    """Returns what the microbatches count, where some count more than others."""
    if question.plan.form == "modules" or question.captured.tape.loss is None:
        return None
    counted = _counted(question, tapes)
    if counted.loss_counts(None) is None or not _is_exact(question):
        return counted.loss_counts(None)
    model = _copied(question.model)
    with _from_now(question):
        return counted.loss_counts(mean_of_means(model, _whole(question), counted.parts, question.loss_fn))


def _parts(question: Question) -> list[Batch]:
    batch = question.batch
    return batch.copied().split(question.plan.microbatches_of(batch.size))


def _uncounted(snapshot: TrainingSnapshot) -> TrainingSnapshot:
    """Returns the snapshot without batch counters, which say nothing about how far statistics are apart."""
    buffers = {n: b for n, b in snapshot.buffers.items() if b.is_floating_point()}
    return replace(snapshot, buffers=buffers)


def _tapes(question: Question) -> TapeOf:
    """Returns a function that finds a microbatch's tape: its own where guards select another path, as in
    an engine.
    """
    if question.plan.form == "modules":
        return lambda part: question.captured.tape
    plan = question.plan.model_copy(update={"loss_pieces": 1, "module_pieces": 1, "slices": 1})
    variants = Variants(question.model, plan, question.loss_fn)
    return lambda part: variants.find(part, outputs=False).tape


def _references(
    question: Question, batches: Sequence[Batch], tapes: TapeOf, microbatches: int | None = None
) -> list[TrainingSnapshot]:
    """Returns the snapshots of the plain loop, one for each batch. An error there is the model's own and is
    shown as such; but a second batch that was made here, and that the model refuses, is left out.
    """
    model = _copied(question.model)
    try:
        parts = [
            batch.copied().split(microbatches or question.plan.microbatches_of(batch.size))
            for batch in batches
        ]
        loop = PlainLoop(
            len(parts[0]),
            question.loss_fn,
            steps=question.steps,
            seed=question.seed,
            bn="micro" if microbatches == 1 else question.plan.bn,
        )
        with _from_now(question):
            return reference_snapshots(model, tapes, parts, loop)
    except Exception as error:
        refuses = isinstance(error, ExampleRejected) or not isinstance(error, OutsizeError)
        if refuses and len(batches) > 1 and question.second_batch is None:
            return _references(question, batches[:1], tapes, microbatches)
        if isinstance(error, OutsizeError):
            raise
        raise ExampleRejected(
            f"the plain loop on the example batch fails: {type(error).__name__}: {error}",
            numbers=f"at {raising_line(error)}",
            next_step="check dtypes and values of the example and of the target",
        ) from error


def _copied(model: nn.Module) -> nn.Module:
    try:
        return model_copy(model)
    except Exception as error:
        raise BadOption(
            f"the model cannot be copied, and a check must not change it: {type(error).__name__}: {error}",
            next_step="make its copy.deepcopy work; torch.nn.utils.parametrizations can be copied",
        ) from error


def _in_one_process(question: Question, batches: Sequence[Batch]) -> list[TrainingSnapshot]:
    with warnings.catch_warnings(), _from_now(question):
        warnings.simplefilter("ignore", UnknownShares)  # the verdict notes it, with numbers
        return engine_snapshots(_engine(question), [b.copied() for b in batches], steps=question.steps)


def _engine(question: Question) -> Engine:
    """Returns an engine in this process, where no rank has parts of a layer."""
    model, loss_fn, plan = _copied(question.model), question.loss_fn, question.plan
    plan = plan.model_copy(update={"axes": plan.axes.with_one(those(lambda axis: axis.divides_products))})
    return make_engine(model, plan, None, EngineOptions(loss_fn, adamw, seed=question.seed))


def _over_processes(question: Question, batches: Sequence[Batch]) -> list[TrainingSnapshot]:
    """Returns the snapshots of a run with a process for each rank: forks of this one where they can compute.

    Elsewhere they are new interpreters, and the model is sent to them.
    """
    ranks = question.plan.axes.world_size
    plan = by_blocks(question.plan, question.planned.graph)
    # Some kernels (LayerNorm's weight gradient) add up in as many parts as there are threads.
    copies = [batch.copied() for batch in batches]
    rest = copies, question.loss_fn, plan, question.steps, question.seed, Ambient.here()
    with tempfile.TemporaryDirectory(prefix="outsize-check-") as folder:
        if can_fork():
            run_in_forks(ranks, lambda: run_rank((_copied(question.model), *rest), Path(folder)))
        else:
            _send(ranks, (question.model, *rest), Path(folder))
        parts = [read_value(Path(folder) / f"rank{rank}.values") for rank in range(ranks)]
    return [merge(of_ranks) for of_ranks in zip(*parts, strict=True)]


def _send(ranks: int, payload: Payload, folder: Path) -> None:
    try:
        torch.save(payload, folder / "question.pt")
    except Exception as error:
        raise BadOption(
            "the model, batch or loss function cannot be sent to other processes",
            numbers=f"{type(error).__name__}: {error}",
            next_step=SENDABLE,
        ) from error
    run_in_interpreters(ranks, worker.__name__, str(folder))


def _first_divergence(
    question: Question, batches: Sequence[Batch], by_batch: Sequence[Differences]
) -> str | None:
    """Returns what `_locate` says of the first batch that differs."""
    number = next(number for number, each in enumerate(by_batch) if not each.bit_equal)
    return _locate(replace(question, batch=batches[number]), by_batch[number])


def _locate(question: Question, differences: Differences) -> str | None:
    """Returns `unit (forward)`, `unit (buffers)`, `the loss (weights of microbatches)` or `unit
    (backward)`.
    """
    unit = _forward_divergence(question) if question.plan.form == "tape" else None
    if unit is not None:
        return f"{unit} (forward)"
    whole = with_loss(question.model, question.loss_fn)
    unit = first_wrong_buffer(question.captured, whole, differences.wrong_buffers)
    if unit is not None:
        return f"{unit} (buffers)"
    if differences.loss:
        return "the loss (weights of microbatches)"
    unit = last_wrong_gradient(question.captured, differences.wrong_grads)
    return f"{unit} (backward)" if unit is not None else None


def _forward_divergence(question: Question) -> str | None:
    """Returns the first unit that differs in a replay of one microbatch, or else in a step of an engine."""
    parts = question.batch.copied().split(question.plan.microbatches_of(question.batch.size))
    model, seed, unit = _copied(question.model), seeder(question.seed, 0, 0), None
    with _from_now(question), suppress(ReplayMismatch):  # A second batch may have another program.
        unit = first_forward_divergence(question.captured, model, parts[0], seed, question.loss_fn)
    if unit is not None:
        return unit
    seeds = [seeder(question.seed, 0, mb) for mb in range(len(parts))]
    with _from_now(question):
        expected = eager_calls(_copied(question.model), _tapes(question), parts, seeds, question.loss_fn)
    engine = _engine(question)
    batch = question.batch.copied()
    engine.prepare(batch)  # recorded outside of the watched step
    with watched_modules(engine.model_with_loss) as observed:
        engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
    return first_other_call(expected, observed)
