"""Lines through message times: exact on a line, unmoved by outliers, never below zero."""

from __future__ import annotations

import random
from itertools import product

import pytest

from outsize.capture.measure.links import Kind, LinkMeasurements, LinkSample, fit_link
from outsize.errors import BadOption

SIZES = [4**k * 1024 for k in range(8)]


def line(latency_s: float, bytes_per_s: float) -> list[tuple[int, float]]:
    return [(size, latency_s + size / bytes_per_s) for size in SIZES]


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(6e-5, 1.5e9), (1e-6, 4e11), (0.0, 1e9)])
def test_a_line_is_found(latency_s: float, bytes_per_s: float) -> None:
    link = fit_link("wire", line(latency_s, bytes_per_s))
    assert link.latency_s == pytest.approx(latency_s, abs=1e-12)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)


def test_disturbed_sizes_do_not_bend_it() -> None:
    points = line(1e-4, 2e9)
    points[1] = (points[1][0], 9 * points[1][1])
    points[-1] = (points[-1][0], 3 * points[-1][1])
    link = fit_link("wire", points)
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(1e-4), pytest.approx(2e9))


def test_no_line_of_a_fine_grid_is_better() -> None:
    draw = random.Random(0)
    points = [(size, seconds * draw.uniform(0.7, 1.5)) for size, seconds in line(1e-4, 2e9)]

    def deviation(latency_s: float, bytes_per_s: float) -> float:
        return sum(abs(latency_s + size / bytes_per_s - s) / s for size, s in points)

    found = fit_link("wire", points)
    grid = product([k * 2e-6 for k in range(100)], [k * 2e7 for k in range(1, 200)])
    assert deviation(found.latency_s, found.bytes_per_s) <= min(deviation(*choice) for choice in grid) + 1e-9


def test_a_latency_is_not_negative() -> None:
    assert fit_link("wire", [(1000, 1e-6), (2000, 3e-6), (4000, 7e-6)]).latency_s >= 0


@pytest.mark.parametrize("points", [[], [(0, 1e-3)]])
def test_no_growth_no_bandwidth(points: list[tuple[int, float]]) -> None:
    with pytest.raises(BadOption, match="do not grow"):
        fit_link("wire", points)


def sampled(kind: Kind, latency_s: float, bytes_per_s: float) -> list[LinkSample]:
    points = line(latency_s, bytes_per_s)
    return [LinkSample(kind=kind, size_bytes=n, seconds=s, spread_s=0.0) for n, s in points]


def test_the_cluster_has_the_measured_link_on_both_levels() -> None:
    samples = (*sampled("p2p", 1e-4, 2e9), *sampled("all_reduce", 8e-4, 1e9))
    found = LinkMeasurements(ranks=3, device_type="cpu", samples=samples).cluster("here")
    assert found.inner.hop_s == pytest.approx(2e-4)  # 2 (n - 1) = 4 hops
    assert found.inner.source == "messages between 3 processes on cpu"
    assert [d.name for d in found.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert found.link(0, 2).seconds(2_000_000) == pytest.approx(1e-4 + 1e-3)
    assert found.inner == found.outer
