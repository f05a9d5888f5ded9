"""How sure a plan's seconds are: the row of its kind, and words that say it."""

from __future__ import annotations

from typing import Any

import pytest
import samples
from planner_graphs import graph_of, parameter, unit

from outsize.ir.cluster import parse_cluster
from outsize.ir.findings import Foresight
from outsize.ir.graph import ModelGraph, Parameter, Work
from outsize.ir.plan import Axes, Plan
from outsize.planner.advice.foresight import foresight, kind_of
from outsize.report.wording import sentence

PRODUCT = Work(family="matmul", dtype="bfloat16", flops=1, moved_bytes=1)
PIXELS = Work(family="convolution", dtype="bfloat16", flops=1, moved_bytes=1)


def model(*parameters: Parameter, work: Work = PRODUCT) -> ModelGraph:
    """A unit with this work and these weights."""
    own = unit(0).model_copy(update={"forward": (work,)})
    return graph_of([own], (), parameters)


DENSE = model(parameter("w", size_bytes=400))
MODELS = {
    "dense": DENSE,
    "experts": model(parameter("w", size_bytes=400).model_copy(update={"experts": 8})),
    "adapters": model(parameter("w", size_bytes=4000, trainable=False), parameter("a", size_bytes=40)),
    "images": model(parameter("w", size_bytes=400), work=PIXELS),
}


def plan(devices: int = 8, **changes: Any) -> Plan:
    """A plan of so many devices in bfloat16, whose figures are estimates."""
    axes = Axes(dp_replicate=devices)
    return samples.plan().model_copy(update={"axes": axes, "precision": "bf16", **changes})


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_has_a_kind_by_what_it_is_made_of(kind: str) -> None:
    assert kind_of(MODELS[kind]) == kind


def test_the_row_of_the_kind_is_told() -> None:
    node, nodes = parse_cluster("8xh100-80gb"), parse_cluster("2x8xh100-80gb")
    dense, eight = foresight(plan(), DENSE, node), foresight(plan(precision="fp8"), DENSE, node)
    assert dense is not None
    assert eight is not None
    assert (dense.nodes, dense.precision, eight.precision) == ("node", "bf16", "fp8")
    assert dense.mean_error is not None
    assert eight.mean_error is not None
    assert dense.source
    mixed = foresight(plan(precision="bf16-mixed"), DENSE, node)
    assert mixed == dense
    wide, one = foresight(plan(16), DENSE, nodes), foresight(plan(1), DENSE, node)
    assert wide is not None
    assert one is not None
    assert (wide.nodes, one.nodes) == ("nodes", "device")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("devices", [8, 16])
def test_each_kind_has_a_figure_of_held_out_rows(kind: str, precision: str, devices: int) -> None:
    cluster = parse_cluster(f"{devices // 8}x8xb200-180gb")
    told = foresight(plan(devices, precision=precision), MODELS[kind], cluster)
    assert told is not None
    assert told.mean_error is not None
    assert told.rows
    assert "half" in told.source


def test_what_is_measured_or_of_a_cpu_has_no_such_words() -> None:
    expected = samples.expected().model_copy(update={"source": "measured"})
    assert foresight(plan(expected=expected), DENSE, parse_cluster("8xh100-80gb")) is None
    assert foresight(plan(expected=None), DENSE, parse_cluster("8xh100-80gb")) is None
    assert foresight(plan(), DENSE, parse_cluster("8xcpu")) is None


def test_a_device_that_nobody_measured_is_told() -> None:
    known, unknown = (foresight(plan(), DENSE, parse_cluster(name)) for name in ("8xh100-80gb", "8x80GB"))
    assert known is not None
    assert unknown is not None
    assert (known.compared, unknown.compared) == (True, False)
    assert "their data sheet speaks" in sentence(unknown)


def test_words() -> None:
    told = Foresight(
        kind="experts", nodes="nodes", precision="fp8", mean_error=0.17, worst_error=0.4, rows=12
    )
    assert sentence(told) == (
        "plans for mixtures of experts in fp8 on several nodes missed measured steps by"
        " 17 % in the mean, 40 % at worst (12 steps)"
    )
    assert sentence(told.model_copy(update={"mean_error": None, "worst_error": None})) == (
        "no plan for mixtures of experts in fp8 on several nodes was compared with a measured step"
    )
