"""The roofline against sums made by hand."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.ir.cluster import make_cluster
from outsize.planner.roofline import COMPUTE_EFFICIENCY, LAUNCH_S, MEMORY_EFFICIENCY, roofline

DEVICE = make_cluster("x", "a100-80gb", 1, 1).devices[0]


def test_a_unit_costs_the_larger_of_compute_and_memory_time() -> None:
    graph = chain([1.0, 1.0])[0]
    heavy = graph.units[0].model_copy(update={"flops": 10**12, "moved_bytes": 0})
    fat = graph.units[1].model_copy(update={"flops": 0, "moved_bytes": 10**9})
    profile = roofline(graph.model_copy(update={"units": (heavy, fat)}), DEVICE)
    compute_s = 10**12 / (DEVICE.flops("float32") * COMPUTE_EFFICIENCY) + LAUNCH_S
    memory_s = 10**9 / (DEVICE.bytes_per_s * MEMORY_EFFICIENCY) + LAUNCH_S
    assert profile.units[0].forward_s == pytest.approx(compute_s)
    assert profile.units[1].forward_s == pytest.approx(memory_s)


def test_only_units_with_parameters_have_a_weight_gradient() -> None:
    graph = chain([1.0, 1.0])[0]
    bare = graph.units[0].model_copy(update={"parameters": ()})
    profile = roofline(graph.model_copy(update={"units": (bare, graph.units[1])}), DEVICE)
    assert profile.units[0].backward_weight_s == 0.0
    assert profile.units[0].backward_input_s == profile.units[0].forward_s
    assert profile.units[1].backward_s == pytest.approx(2 * profile.units[1].forward_s)


def test_every_figure_names_its_source() -> None:
    assert {unit.source for unit in roofline(chain([1.0] * 3)[0], DEVICE).units} == {"roofline"}
