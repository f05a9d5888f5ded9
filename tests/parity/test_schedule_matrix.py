"""Every schedule with every way to recompute, plain and compiled: bit-equal to the plain loop.

The reference is the same for all, the loop over the uncompiled model: Dynamo alone and the graphs of
aot_eager run the same kernels on the same numbers.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any, Literal, cast, final

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.ir.schedule import placed
from outsize.ir.units.names import compress_units
from outsize.schedules.builders import written
from outsize.schedules.compose import compose
from outsize.schedules.families import families
from outsize.schedules.job import Job, StageCost
from outsize.train.batch.batch import Batch, as_target
from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    adamw,
    compare,
    engine_snapshot,
    reference_snapshot,
)
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

COUNT, RANKS, STEPS, SEED = 4, 2, 2, 3
TRAINED = {family.name: family for family in families() if family.trains}
SCHEDULES = tuple(TRAINED)
LOSS = nn.CrossEntropyLoss()
CUSTOM = """
0F0,0F1,2F0,0F2,2F1,2I0,0B0,2W0,2B1,0I1,2F2,2B2,0F3,2F3,2I3,0W1,0B2,0B3,2W3
1F0,1F1,3F0,3B0,3F1,1I0,3B1,1W0,1B1,1F2,3F2,3I2,1B2,1F3,3F3,3W2,3B3,1B3
"""


@final
class Net(nn.Module):
    """A skip over everything, dropout, running statistics, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in "abc")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, 3] -> [n, 11]."""
        first = x = self.words(tokens).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x) + first)


def built() -> nn.Module:
    torch.manual_seed(0)
    return Net()


BATCH = Batch((torch.arange(36).reshape(12, 3) % 11,), {}, as_target(torch.arange(12) % 11))


@cache
def captured() -> Captured:
    part, model = BATCH.split(COUNT)[0], built()
    return build_graph(record(model, part.args, part.kwargs, LOSS, part.target), model)


@cache
def reference() -> TrainingSnapshot:
    return reference_snapshot(built(), captured().tape, BATCH, PlainLoop(COUNT, LOSS, steps=STEPS, seed=SEED))


def actions(name: str, stages: int, ranks: int) -> tuple[str, ...]:
    """Rows of the two schedules that have no other source."""
    if name == "custom":
        return tuple(CUSTOM.split())
    draw, chain = random.Random(name), range(stages)
    costs = tuple(StageCost(draw.random(), 1 + draw.random(), draw.random()) for _ in chain)
    down, up = ({(s, s + d): 0.1 for s in chain if s + d in chain} for d in (1, -1))
    job = Job(placed("interleaved", stages, ranks), COUNT, costs, down, up, (1,) * stages, (9,) * ranks)
    found = next(c for c in compose(job) if any(a.kind == "I" for row in c.schedule.actions for a in row))
    return written(found.schedule)


def plan_of(
    name: ScheduleName, recompute: Literal["none", "selective", "full"] = "none", ranks: int = RANKS
) -> Plan:
    """A stage on each rank, or two; selective: every other unit again."""
    graph, family = captured().graph, TRAINED[name]
    stages = 2 * ranks if family.interleaves or family.row is None else ranks
    names, units = [u.name for u in graph.units], len(graph.units)
    bounds = tuple(units * s // stages for s in range(stages + 1))
    places = tuple(f"cpu:{rank}" for rank in placed(name, stages, ranks))
    cut = stages_from_bounds(graph, bounds, places)
    if recompute == "selective":
        some = [compress_units(names, range(first, bounds[s + 1], 2)) for s, first in enumerate(bounds[:-1])]
        cut = tuple(
            s.model_copy(update={"recompute": "selective", "recomputed": own})
            for s, own in zip(cut, some, strict=True)
        )
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{ranks}xcpu",
        axes=Axes(pp=ranks),
        batch_size=BATCH.size,
        microbatches=COUNT,
        schedule=name,
        actions=actions(name, stages, ranks) if family.row is None else (),
        recompute="full" if recompute == "full" else "none",
        stages=cut,
    )


def run(plan: Plan, compiled: str | None) -> tuple[TrainingSnapshot, set[str]]:
    """What the steps leave behind, and the kinds of actions that computed."""
    torch.compiler.reset()
    counters.clear()
    engine: Any = make_engine(
        built(), plan, None, EngineOptions(loss_fn=LOSS, optimizer=adamw, seed=SEED, compiled=compiled)
    )
    found = engine_snapshot(engine, BATCH, steps=STEPS)
    assert (compiled is None) is (counters["frames"]["ok"] == 0)
    return found, {s.action[1] for s in engine.timeline().spans if s.lane == "compute"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_schedule(name: str, recompute: Any) -> None:
    found, kinds = run(plan_of(cast("ScheduleName", name), recompute), None)
    differences = compare(reference(), found)
    assert differences.bit_equal, differences
    # So do the two schedules whose rows are in the plan (`actions`).
    assert ("I" in kinds) is (TRAINED[name].splits_backward or TRAINED[name].row is None)


# Each schedule and each way to recompute compiled, not each pair: a stage does not know its schedule. Most of
# the schedules run with --all alone.
COMPILED = [
    *((name, "none", "aot_eager") for name in SCHEDULES),
    *product(("1f1b", "zero-bubble"), ("selective", "full"), ("aot_eager",)),
    *(("zero-bubble-v", how, "eager") for how in ("none", "selective", "full")),
]
USUAL = {
    ("1f1b", "full", "aot_eager"),
    ("zero-bubble", "selective", "aot_eager"),
    ("custom", "none", "aot_eager"),
    ("interleaved", "none", "aot_eager"),
    ("zero-bubble-v", "none", "eager"),
}


@pytest.mark.parametrize(
    ("name", "recompute", "backend"),
    [pytest.param(*cell, marks=[] if cell in USUAL else [pytest.mark.full]) for cell in COMPILED],
)
def test_every_schedule_of_compiled_stages(name: str, recompute: Any, backend: str) -> None:
    found, _ = run(plan_of(cast("ScheduleName", name), recompute), backend)
    differences = compare(reference(), found)
    assert differences.bit_equal, differences


def test_a_backend_that_torch_lacks_is_refused() -> None:
    with pytest.raises(BadOption, match="no backend 'inducter'"):
        run(plan_of("1f1b"), "inducter")
    with pytest.raises(BadOption, match="runs by modules"):
        run(plan_of("1f1b").model_copy(update={"form": "modules"}), "eager")
