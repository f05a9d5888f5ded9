from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples

from outsize.errors import BadOption
from outsize.report import plots
from outsize.report.palette import shade

DRAW: dict[str, Callable[[Path], None]] = {
    "both": lambda path: plots.timeline_png(samples.predicted(), samples.measured(), path),
    "one": lambda path: plots.timeline_png(samples.predicted(), None, path),
    "memory": lambda path: plots.memory_png(samples.plan(), path),
    "bars": lambda path: plots.laps_bars_png({"one": (2.0, 2.2), "outsize": (1.0, 1.1)}, path),
    "curve": lambda path: plots.laps_curve_png({1: (2.0,), 8: (1.5,)}, {"one": (2.1,)}, "split size", path),
    "loss": lambda path: plots.loss_png(samples.LOSSES, path),
}


def colour_of(value: Any) -> str:
    return importlib.import_module("matplotlib.colors").to_hex(value)


def size_of(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("name", DRAW)
def test_a_png_of_1600_pixels(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    DRAW[name](tmp_path / "x.png")
    width, height = size_of(tmp_path / "x.png")
    assert width == 1600
    assert height > 300


@pytest.mark.parametrize("splits", [False, True])
def test_the_legend_has_every_colour_of_the_bars(splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    timeline, drawn = samples.predicted(), list[Any]()
    halves = ("I", "W") if splits else ("B",)
    spans = tuple(
        span.model_copy(update={"action": span.action.replace("B", kind)})
        for span in timeline.spans
        for kind in halves
    )
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    plots.timeline_png(timeline.model_copy(update={"spans": spans}), None, "x.png")
    (axis,) = drawn[0].axes
    legend = axis.get_legend()
    named = {colour_of(patch.get_facecolor()) for patch in legend.get_patches()}
    assert named == {colour_of(shade(kind, 1)) for kind in ("F", *("IW" if splits else "B"))}
    assert len(legend.get_texts()) == len(named)


def test_the_plain_figure_is_not_pyplots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    DRAW["loss"](tmp_path / "x.png")
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("name", DRAW)
def test_without_matplotlib_the_message_has_the_line_to_type(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadOption, match=r"Next: pip install 'outsize\[plot\]'"):
        DRAW[name](tmp_path / "x.png")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="no step to draw"):
        plots.timeline_png(None, None, tmp_path / "x.png")
    with pytest.raises(BadOption, match="no figures to draw"):
        plots.memory_png(samples.plan().model_copy(update={"expected": None}), tmp_path / "x.png")
