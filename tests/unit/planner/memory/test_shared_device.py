"""Several stages on a device: its account against every action of its row; one acts, the others rest."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from planner_graphs import chain

from outsize.ir.cluster import GIB, make_cluster
from outsize.ir.plan import Axes
from outsize.ir.schedule import COMPUTE, Action, Kind
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import InFlightState, Phase, peak_table
from outsize.planner.memory.range_tables import RangeTables
from outsize.schedules.builders import build


class Stage:
    """What one stage holds, counted in its own way."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.graded = False

    def alive(self, phase: Phase, batch: int) -> InFlightState:
        c = self.counts
        return InFlightState(c["flying"], c["posted"], c["in"], c["out"], phase, self.graded, batch)

    def begin(self, kind: Kind) -> None:
        self.counts["posted"] += (kind is Kind.RECV_F) - (kind is Kind.F and self.counts["posted"] > 0)
        self.counts["in"] += kind is Kind.RECV_B
        self.counts["flying"] += kind is Kind.F

    def end(self, kind: Kind) -> None:
        if kind in COMPUTE:
            self.counts["out"] = int(kind is Kind.B)
        if kind is Kind.B:
            self.graded = True
            self.counts["flying"] -= 1
            self.counts["in"] = max(0, self.counts["in"] - 1)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (3, 2), (2, 4)])
def test_a_device_holds_what_its_stages_hold_together(ranks: int, chunks: int) -> None:
    stages, m = ranks * chunks, 2 * ranks
    model = chain([0.1 * (1 + n % 3) for n in range(2 * stages)], value_bytes=8000, saved_bytes=50_000)
    layout = Layout(Axes(pp=ranks), stages, "interleaved", m, m)
    cluster = make_cluster("toy", "cpu", 1, ranks, GIB)
    pipeline = Pricing({m: model}, cluster, "adamw").pipeline(layout, ("none",))
    assert pipeline is not None
    bounds = tuple(range(0, 2 * stages + 1, 2))
    priced = Candidate.of(pipeline, bounds, (0,) * stages)
    lowered = edges_between(model[0], bounds).lowered(build("interleaved", stages, m, ranks))
    for rank, row in enumerate(lowered.actions):
        most = worst(row, list(pairwise(bounds)), pipeline.case.ranges, m)
        assert priced.held_bytes(rank) == most


def worst(row: tuple[Action, ...], runs: list[tuple[int, int]], ranges: RangeTables, batch: int) -> int:
    """The most that the stages of a row hold at any of its actions."""
    held: defaultdict[int, Stage] = defaultdict(Stage)
    for action in row:
        _ = held[action.stage]
    phases = {Kind.F: Phase.FORWARD, Kind.B: Phase.BACKWARD}
    found = []
    for action in row:
        held[action.stage].begin(action.kind)
        total = 0
        for stage, state in held.items():
            phase = phases.get(action.kind, Phase.WAIT) if stage == action.stage else Phase.WAIT
            total += int(peak_table(ranges, (state.alive(phase, batch),))[runs[stage]])
        found.append(total)
        held[action.stage].end(action.kind)
    return max(found)
