"""`check`: the split run against the plain loop, on the user's own model and batch.

Both start from copies, so the user's model stays as it is. In one process all stages take turns; with
`processes` each stage is a real process (train/verify_worker.py), started like any run, and brings its
tensors back in files. When numbers differ the verdict names the first unit whose numbers do.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn

from outsize.capture.graph import Captured
from outsize.capture.ladder import LossFn, user_place
from outsize.errors import BadOption, ExampleRejected, OutsizeError, RankFailed
from outsize.ir.plan import Plan
from outsize.ir.verdict import WITHIN, WITHIN_DOUBLE, Verdict
from outsize.run.rng import seeder
from outsize.run.statistics import Statistics
from outsize.schedules.refine import by_blocks
from outsize.train.batch import Batch
from outsize.train.by_design import autocast_note, batchnorm_note
from outsize.train.calls import eager_calls, first_other_call, watched_modules
from outsize.train.divergence import first_forward_divergence, first_wrong_buffer, last_wrong_gradient
from outsize.train.engine import Engine
from outsize.train.insist import insist_on_loss, insist_on_values
from outsize.train.launch import run_script
from outsize.train.parallel import make_engine
from outsize.train.parity import (
    Differences,
    Snapshot,
    adamw,
    compare,
    engine_snapshot,
    merge,
    reference_snapshot,
    relative_difference,
)
from outsize.train.reference import TapeOf
from outsize.train.variant import Variants


@final
@dataclass(frozen=True)
class Question:
    """What is to be checked. `steps` AdamW steps are compared, the gradients of the last one."""

    model: nn.Module
    batch: Batch
    loss_fn: LossFn | None
    plan: Plan
    captured: Captured
    capture_s: float
    steps: int = 1
    seed: int = 0


def verify(question: Question, *, processes: bool) -> Verdict:
    """The verdict. Raises BadOption when the model or loss cannot be handed to processes, or is on meta."""
    plan = question.plan
    if plan.form == "tape":
        insist_on_loss(question.captured.tape)
    insist_on_values(question.model.named_parameters(), question.batch)
    reference = _reference(question)
    start = time.perf_counter()
    found = _over_processes(question) if processes else _in_one_process(question)
    run_s = time.perf_counter() - start
    differences = compare(reference, found)
    meshed = processes and plan.axes.group_size > 1
    relative = relative_difference(reference, found) if meshed else None
    within = WITHIN_DOUBLE if _is_double(reference) else WITHIN
    holds = differences.bit_equal or (relative is not None and relative <= within)
    return Verdict(
        model=plan.model,
        bit_equal=differences.bit_equal,
        loss_diff=differences.loss,
        grad_diff=differences.grads,
        buffer_diff=differences.buffers,
        parameter_diff=differences.parameters,
        first_divergence=None if holds else _locate(question, differences),
        stages=tuple(stage.units for stage in plan.stages),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        processes=plan.axes.world_size if processes else 0,
        capture_s=question.capture_s,
        run_s=run_s,
        notes=(*question.captured.tape.opaque, *_by_design(question, reference, meshed=meshed)),
        relative_diff=relative,
        within=within,
    )


def _is_double(found: Snapshot) -> bool:
    return all(t.dtype == torch.float64 for t in (found.loss, *found.grads.values()))


def _by_design(question: Question, reference: Snapshot, *, meshed: bool) -> Iterator[str]:
    """What is other by design than somebody might expect, and by how much."""
    plan = question.plan
    if meshed:
        parts = " each rank's parts are gathered first;" if max(plan.axes.tp, plan.axes.dp_shard) > 1 else ""
        yield (
            f"ranks add up in another order than one process ({plan.axes.beyond_pp}), so loss and gradients"
            f" count, relative to each tensor's largest element;{parts} buffers and parameters are shown"
        )
    if plan.microbatches * plan.axes.replicas > 1 and Statistics(question.model).training:
        whole = compare(_uncounted(_reference(question, microbatches=1)), _uncounted(reference))
        yield batchnorm_note(plan, question.batch.size, whole)
        if plan.axes.replicas > 1:
            yield "over processes running statistics are those of replica 0's microbatches, as under DDP"
    if plan.form == "tape":
        yield from autocast_note(question.captured, plan)


def _uncounted(found: Snapshot) -> Snapshot:
    """Without the number of batches, which says nothing about how far statistics are apart."""
    buffers = {n: b for n, b in found.buffers.items() if b.is_floating_point()}
    return replace(found, buffers=buffers)


def _tapes(question: Question) -> TapeOf:
    """The tape of a microbatch: its own where the model decides otherwise on its inputs, as in an engine."""
    if question.plan.form == "modules":
        return lambda part: question.captured.tape
    variants = Variants(question.model, question.plan, question.loss_fn)
    return lambda part: variants.find(part, outputs=False).tape


def _reference(question: Question, microbatches: int | None = None) -> Snapshot:
    """The plain loop. What it raises is the model's own error, and not ours to hide."""
    model = _copied(question.model)
    try:
        return reference_snapshot(
            model,
            _tapes(question),
            question.batch,
            microbatches or question.plan.microbatches_of(question.batch.size),
            question.loss_fn,
            steps=question.steps,
            seed=question.seed,
            bn="micro" if microbatches == 1 else question.plan.bn,
        )
    except OutsizeError:
        raise
    except Exception as error:
        raise ExampleRejected(
            f"the plain loop on the example batch fails: {type(error).__name__}: {error}",
            numbers=f"at {user_place(error)}",
            next_step="check dtypes and values of the example and of the target",
        ) from error


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise BadOption(
            f"the model cannot be copied, and a check must not change it: {type(error).__name__}: {error}",
            next_step="make its copy.deepcopy work; torch.nn.utils.parametrizations can be copied",
        ) from error


def _in_one_process(question: Question) -> Snapshot:
    return engine_snapshot(_engine(question), question.batch, steps=question.steps)


def _engine(question: Question) -> Engine:
    """In this process, where no rank has parts of a layer."""
    model, loss_fn, plan = _copied(question.model), question.loss_fn, question.plan
    plan = plan.model_copy(update={"axes": plan.axes.model_copy(update={"tp": 1})})
    return make_engine(model, plan, None, loss_fn=loss_fn, optimizer=adamw, seed=question.seed)


def _over_processes(question: Question) -> Snapshot:
    ranks = question.plan.axes.world_size
    with tempfile.TemporaryDirectory(prefix="outsize-check-") as folder:
        _save(question, Path(folder))
        code = run_script(["outsize.train.verify_worker", folder], ranks, module=True)
        if code:
            raise RankFailed(
                "a process of the check failed",
                numbers=f"exit code {code}",
                next_step="see its traceback above",
            )
        parts = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=False) for r in range(ranks)]
    return merge(parts)


def _save(question: Question, folder: Path) -> None:
    if "torchvision" in sys.modules:
        # The worker must import it our way before it unpickles (capture/providers.py says why).
        (folder / "torchvision").touch()
    plan = by_blocks(question.plan, question.captured.graph)
    payload = (question.model, question.batch, question.loss_fn, plan, question.steps, question.seed)
    # Some kernels (LayerNorm's weight gradient) add up in as many parts as there are threads.
    threads = torch.get_num_threads()
    try:
        torch.save((*payload, threads), folder / "question.pt")
    except Exception as error:
        raise BadOption(
            "the model, batch or loss function cannot be sent to other processes",
            numbers=f"{type(error).__name__}: {error}",
            next_step="define them at the top level of an importable module, or check in one process",
        ) from error


def _locate(question: Question, differences: Differences) -> str | None:
    """`unit (forward)`, `unit (buffers)`, `the loss (weights of microbatches)` or `unit (backward)`."""
    unit = _forward_divergence(question) if question.plan.form == "tape" else None
    if unit is not None:
        return f"{unit} (forward)"
    unit = first_wrong_buffer(question.captured, question.model, differences.wrong_buffers)
    if unit is not None:
        return f"{unit} (buffers)"
    if differences.loss:
        return "the loss (weights of microbatches)"
    unit = last_wrong_gradient(question.captured, differences.wrong_grads)
    return f"{unit} (backward)" if unit is not None else None


def _forward_divergence(question: Question) -> str | None:
    """In a replay of one microbatch unit by unit, or else in a step of an engine."""
    parts = question.batch.split(question.plan.microbatches_of(question.batch.size))
    model, seed = copy.deepcopy(question.model), seeder(question.seed, 0, 0)
    unit = first_forward_divergence(question.captured, model, parts[0], seed, question.loss_fn)
    if unit is not None:
        return unit
    seeds = [seeder(question.seed, 0, mb) for mb in range(len(parts))]
    expected = eager_calls(copy.deepcopy(question.model), _tapes(question), parts, seeds, question.loss_fn)
    engine = _engine(question)
    batch = question.batch
    engine.prepare(batch)  # recording is no step
    with watched_modules(engine.model) as found:
        engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
    return first_other_call(expected, found)
