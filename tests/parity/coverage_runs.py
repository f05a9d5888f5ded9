"""One model of the zoo through everything that docs/coverage.md tells.

Captured as a user would, in train mode with its own dropout; cut into three stages at the planner's cuts and
at three random ones; run with four microbatches under 1F1B; compared bit by bit with the plain loop. Without
`each_records` only the engine with the planner's cuts records the model; the others get the capture's tape.

    python tests/parity/coverage_runs.py vgg11 gpt_neox     prints the lines of these models
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, final

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from forked import on_ranks
from parity_runs import SEED, random_bounds, recorded
from torch import distributed as dist
from torch import nn
from zoo import Case, case

from outsize.capture.graph.build import Captured
from outsize.capture.graph.by_modules import capture_model
from outsize.capture.measure.local_cluster import find_cluster
from outsize.errors import OutsizeError
from outsize.ir.answers.request import PlanRequest
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.search import search
from outsize.program.tape import Tape
from outsize.train.batch.batch import Batch, as_target
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    adamw,
    compare,
    engine_snapshot,
    merge,
    reference_snapshot,
)
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.variants.variant import Variants

MICROBATCHES, STAGES, RANDOM_CUTS = 4, 3, 3
Verdict = Literal["equal", "by modules", "refused", "different"]


@final
@dataclass(frozen=True)
class Line:
    """One line of the table; `notes` say what runs coarser, was refused or differs."""

    model: str
    kind: str
    verdict: Verdict
    units: int = 0
    capture_s: float = 0.0
    cuts: int = 0  # distinct cuts that were run
    equal: int = 0  # of them bit-equal
    notes: tuple[str, ...] = field(default_factory=tuple)


def cover(found: Case, *, each_records: bool = True) -> Line:
    """Runs the model; a refusal is an OutsizeError, whose text becomes the note. Other errors are raised."""
    model = found.build(dropout=True)
    kind = type(model).__name__
    try:
        return _covered(found, model, kind, each_records)
    except OutsizeError as refusal:
        return Line(found.name, kind, "refused", notes=(str(refusal),))
    except AssertionError as said:  # the tracebacks of ranks
        refusal = re.search(r"\w+ \[E\d{3}\]: .*", str(said))
        if refusal is None:
            raise
        return Line(found.name, kind, "refused", notes=(refusal[0],))


def _covered(found: Case, model: nn.Module, kind: str, each_records: bool) -> Line:
    batch = whole_batch(found)
    part = batch.split(MICROBATCHES)[0]
    start = time.perf_counter()
    captured = capture_model(model, part.args, part.kwargs, found.loss, part.target, part.size)
    capture_s = time.perf_counter() - start
    records = each_records or captured.graph.form == "modules"
    known = nullcontext if records else partial(recorded, captured.tape)
    with known():
        expected = plain(found, captured, batch)
    plans = list(dict.fromkeys([planned(captured, batch), *at_random(found.name, captured, batch)]))
    differences = [compare(expected, split(found, plans[0], batch))]
    for plan in plans[1:]:
        with known():
            differences.append(compare(expected, split(found, plan, batch)))
    equal = sum(d.bit_equal for d in differences)
    notes = tuple(str(d) for d in differences if not d.bit_equal) or captured.graph.notes
    return Line(
        found.name,
        kind,
        _verdict(captured, equal == len(plans)),
        units=len(captured.graph.units),
        capture_s=capture_s,
        cuts=len(plans),
        equal=equal,
        notes=notes,
    )


def _verdict(captured: Captured, equal: bool) -> Verdict:
    if not equal:
        return "different"
    return "equal" if captured.graph.form == "tape" else "by modules"


def whole_batch(found: Case) -> Batch:
    """Four of the smallest microbatches that the model takes."""
    size = MICROBATCHES * found.smallest_microbatch
    args, kwargs = found.batch(size)
    batch = Batch(args, kwargs, as_target(found.target(size)))
    if all(t.shape[:1] == (size,) for t in batch.tensors()):
        return batch
    return BatchDims(rejection(found.build(dropout=True), found.loss)).of(batch)


def plain(found: Case, captured: Captured, batch: Batch) -> TrainingSnapshot:
    """The reference, one step."""
    model = found.build(dropout=True)
    whole = planned(captured, batch, stages=1)
    variants = Variants(found.build(dropout=True), whole, found.loss)

    def tape_of(part: Batch) -> Tape:
        by_modules = captured.graph.form == "modules"
        return captured.tape if by_modules else variants.find(part, outputs=False).tape

    return reference_snapshot(model, tape_of, batch, PlainLoop(MICROBATCHES, found.loss, steps=1, seed=SEED))


def split(found: Case, plan: Plan, batch: Batch) -> TrainingSnapshot:
    """The same step on an engine; by modules one process would split nothing, so it is one per stage."""

    def run(group: dist.ProcessGroup | None) -> TrainingSnapshot:
        model = found.build(dropout=True)
        engine = make_engine(
            model, plan, group, EngineOptions(loss_fn=found.loss, optimizer=adamw, seed=SEED)
        )
        return engine_snapshot(engine, batch, steps=1)

    if plan.form == "tape":
        return run(None)
    with tempfile.TemporaryDirectory() as folder:
        return merge(on_ranks(Path(folder), len(plan.stages), run))


def planned(captured: Captured, batch: Batch, stages: int = STAGES) -> Plan:
    """The planner's cuts; as many stages as there are units where these are fewer."""
    graph = captured.graph
    stages = min(stages, len(graph.units))
    cluster = find_cluster(f"{stages}xcpu")
    request = PlanRequest(batch_size=batch.size, microbatches=MICROBATCHES, stages=stages, schedule="1f1b")
    return search(request, {MICROBATCHES: (graph, roofline(graph, cluster.devices[0]))}, cluster)


def at_random(name: str, captured: Captured, batch: Batch) -> list[Plan]:
    """Legal cuts drawn from a generator seeded by the model's name."""
    graph, draw = captured.graph, random.Random(name)
    stages = min(STAGES, len(graph.units))
    return [
        Plan(
            model=graph.model,
            fingerprint=graph.fingerprint,
            form=graph.form,
            cluster=f"{stages}xcpu",
            axes=Axes(pp=stages),
            batch_size=batch.size,
            microbatches=MICROBATCHES,
            schedule="1f1b",
            stages=stages_from_bounds(
                graph,
                random_bounds(len(graph.units), stages, draw),
                tuple(f"cpu:{s}" for s in range(stages)),
            ),
        )
        for _ in range(RANDOM_CUTS)
    ]


def main(names: list[str], write: Callable[[str], object]) -> None:
    """The lines of these models, for the person who adds one."""
    for name in names:
        try:
            line = cover(case(name))
        except Exception as error:
            write(f"{name}: {type(error).__name__}: {error}\n")
            raise
        shown = f"{line.units} units, {line.capture_s:.2f} s, {line.equal}/{line.cuts} cuts"
        write(f"{name} ({line.kind}): {line.verdict}, {shown}\n")
        for note in line.notes:
            write(f"    {note}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:], sys.stdout.write)
