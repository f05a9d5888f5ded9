"""The page and the metrics of a run that goes on: what is known is shown, and texts of the run stay text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from run_states import LAUNCH, NOW, STATE, TIMELINE

from outsize.ir.answers.run_state import RunDevice, RunOnMachine
from outsize.ops.publish.prometheus import prometheus_text
from outsize.report.html.live import LiveFacts, LossPoint, live_page, live_part, loss_svg, memory_svg

HOSTILE = LAUNCH.model_copy(update={"command": "<script>alert(1)</script>"})
LOSSES = (LossPoint(1, 4.0), LossPoint(9, 3.0), LossPoint(40, 2.5))


def test_a_page_is_whole_and_its_part_is_its_inside() -> None:
    facts = LiveFacts(RunOnMachine(launch=HOSTILE, state=STATE), TIMELINE, LOSSES)
    page, part = live_page(facts, NOW), live_part(facts, NOW)
    assert part.strip() in page
    assert page.count("<script>") == 1
    assert "<script>" not in part
    assert "&lt;script&gt;alert" in part
    text = re.sub(r"<[^>]*>", " ", part)
    for shown in ("40", "of 100", "30 s", "500 ms", "planned 400 ms", "F0", "21.0 GiB, planned 20.0 GiB"):
        assert shown in text
    assert "rank 1: computed 2.0x as long as the others" in text
    assert "http" not in page.replace("http-equiv", "")  # nothing comes from elsewhere


def test_a_run_without_a_step_has_a_page() -> None:
    page = live_page(LiveFacts(RunOnMachine(launch=LAUNCH)), NOW)
    assert "No step has ended yet." in page
    assert "<svg" not in page


def test_the_loss_is_drawn_over_its_steps() -> None:
    root = ElementTree.fromstring(loss_svg(LOSSES))
    line, smooth = root.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert smooth.attrib["points"].split()[0] == line.attrib["points"].split()[0]
    assert [x for x, _ in points] == [0, 8, 39]
    assert points[0][1] < points[1][1] < points[2][1]  # downwards
    assert loss_svg((LossPoint(3, 1.0), LossPoint(3, 1.0)))


def test_memory_by_cause_and_measured() -> None:
    full = RunDevice(
        rank=0, name="cuda:0", memory_bytes=60, device_bytes=100, planned_by_cause=(10, 10, 20, 10, 0)
    )
    root = ElementTree.fromstring(memory_svg([full]))
    widths = [float(r.attrib["width"].rstrip("%")) for r in root.iter("rect")]
    assert [round(width * 1.02) for width in widths] == [10, 10, 20, 10, 0, 60]
    assert any(line.attrib["class"] == "limit" for line in root.iter("line"))
    empty = full.model_copy(update={"memory_bytes": 1, "planned_by_cause": (1, 0, 0, 0, 0)})
    assert "limit" not in memory_svg([empty])


def test_metrics_are_prometheus_text() -> None:
    run = RunOnMachine(launch=LAUNCH, state=STATE.model_copy(update={"model": 'a"b\\c\nd'}))
    lines = prometheus_text(run).splitlines()
    sample = re.compile(r'[a-z_]+\{([a-z]+="([^"\\\n]|\\[\\"n])*",?)+\} [-+.e0-9]+')
    assert all(sample.fullmatch(line) for line in lines if not line.startswith("#"))
    assert 'outsize_step{run="4711",model="a\\"b\\\\c\\nd"} 40' in lines
    memory = [line for line in lines if line.startswith("outsize_device_memory_bytes")]
    assert [line.rpartition(" ")[2] for line in memory] == [f"{n << 30:.10g}" for n in (21, 20, 80)]
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert prometheus_text(RunOnMachine(launch=LAUNCH)).count("\n") == 3
