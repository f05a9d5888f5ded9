"""What all devices together have room for: no layout may fit where sums exceed it."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.ir.cluster import parse_cluster
from outsize.planner.bounds.memory import MemoryBounds, exceeds_all_devices
from outsize.planner.costs.cache import Cache
from outsize.planner.layout.layout import all_layouts
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.memory.optimizer_states import optimizer_bytes

MIB = 1 << 20
UNITS, DEVICES = 8, 4


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("device", ["h100-80gb", "cpu"])
def test_where_sums_exceed_all_devices_no_layout_may_fit(optimizer: str, device: str) -> None:
    """Of the sizes some exceed the devices and some do not, and the largest that does not fits sharded."""
    cluster = parse_cluster(f"{DEVICES}xh100-80gb")
    room = sum(d.memory_bytes for d in with_usable_memory(cluster).devices)
    states, answers = optimizer_bytes(optimizer), list[tuple[bool, bool]]()
    for part in range(1, 13):
        graph, profile = chain([0.01] * UNITS, weight_bytes=part * room // UNITS // 24, batch_size=1)
        model = graph, profile.model_copy(update={"device": device})
        bounds = MemoryBounds({1: model}, states, Cache(), together=True)
        layouts = list(all_layouts(cluster, [1, 2, 4], ["1f1b"], UNITS))
        rooms = {d: [room // DEVICES] * d for d in (1, 2, 4)}
        may_fit = (
            bounds.may_fit(layout, ("none", "full", "selective"), rooms[layout.axes.pp])
            for layout in layouts
            if layout.captured == 1
        )
        answers.append((exceeds_all_devices(*model, states, cluster), any(may_fit)))
    assert all(exceeds != may_fit for exceeds, may_fit in answers)
    assert {exceeds for exceeds, _ in answers} == ({False, True} if optimizer == "adamw" else {False})
