"""The network with its cuts, and what-if curves: every unit once, the bytes of cuts, what does not fit."""

from __future__ import annotations

from xml.etree import ElementTree

from outsize.ir.answers.curve import ThroughputCurve
from outsize.ir.graph import ModelGraph, Unit, Value
from outsize.ir.profile import Profile, UnitCost
from outsize.report.html.curves import curve_svg
from outsize.report.html.network import network_svg

KIB = 1024


def graph() -> ModelGraph:
    """Four units in a row with a skip from the first to the last."""
    units = tuple(
        Unit(
            index=i,
            name=name,
            kind="Linear",
            parameters=(),
            buffer_bytes=0,
            flops=1,
            moved_bytes=1,
            saved_bytes=0,
        )
        for i, name in enumerate(("stem", "layer.0", "layer.1", "head"))
    )
    values = [(0, (1,), 4 * KIB), (1, (2,), 2 * KIB), (2, (3,), KIB), (0, (3,), 8 * KIB)]
    return ModelGraph(
        model="toy",
        fingerprint="f0",
        batch_size=1,
        units=units,
        values=tuple(
            Value(
                id=i,
                shape=(size // 4,),
                dtype="float32",
                size_bytes=size,
                requires_grad=True,
                producer=made,
                consumers=used,
            )
            for i, (made, used, size) in enumerate(values)
        ),
        parameters=(),
    )


def profile() -> Profile:
    costs = tuple(
        UnitCost(
            name=unit.name,
            forward_s=0.1 * (i + 1),
            backward_input_s=0.1,
            backward_weight_s=0.0,
            saved_bytes=0,
            workspace_bytes=0,
            flops=1,
            source="roofline",
        )
        for i, unit in enumerate(graph().units)
    )
    return Profile(fingerprint="f0", device="cpu", microbatch_size=1, units=costs)


def tips(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [t.text or "" for shape in root for t in shape if t.tag == "title"]


def test_every_unit_and_every_boundary_is_drawn_once() -> None:
    svg = network_svg("network", graph(), profile(), (0, 2, 4))
    said = tips(svg)
    assert sum("a microbatch, stage 0" in tip for tip in said) == 2
    assert sum("a microbatch, stage 1" in tip for tip in said) == 2
    assert [tip for tip in said if "would cross" in tip][1] == "before layer.1: 10.0 KiB would cross"
    assert svg.count("crossing chosen") == 1
    assert svg.count('class="limit"') == 1


def test_a_curve_names_each_value_and_marks_the_chosen() -> None:
    curve = ThroughputCurve(choice="devices", values=(1, 2, 4), samples_per_s=(None, 10.0, 16.0), chosen=4)
    svg = curve_svg("devices", curve)
    text = "".join(ElementTree.fromstring(svg).itertext())
    assert "1: nothing fits; 2: 10.0; 4: 16.0" in text
    assert "does not fit" in text
    assert "16.0 chosen" in text
    assert svg.count("<circle") == 2


def test_a_curve_where_nothing_fits() -> None:
    curve = ThroughputCurve(choice="microbatches", values=(1, 2), samples_per_s=(None, None), chosen=1)
    assert curve_svg("none", curve).count("does not fit") == 2
