"""Builds SVG as a tree of elements, so that text is always escaped and the result is always well-formed.

Widths and x are percentages and heights are pixels: a figure fills its column at any width, and its text
keeps its size.
"""

from __future__ import annotations

from typing import final
from xml.etree import ElementTree

from outsize.errors import visible, visible_lines

Number = float | int | str


@final
class Svg:
    """A figure of `height` pixels and the full width, with a title and a description for screen readers."""

    def __init__(self, key: str, height: float, title: str, description: str) -> None:
        marks = {"class": "figure", "width": "100%", "height": f"{height:g}", "role": "img"}
        self.root = ElementTree.Element("svg", {**marks, "aria-labelledby": f"{key}-title {key}-desc"})
        ElementTree.SubElement(self.root, "title", {"id": f"{key}-title"}).text = visible(title)
        ElementTree.SubElement(self.root, "desc", {"id": f"{key}-desc"}).text = visible(description)

    def add(self, tag: str, text: str = "", *, tip: str = "", **attributes: Number) -> None:
        """Adds an element; `tip` is shown on hover. `class_` and `text_anchor` become `class`,
        `text-anchor`.
        """
        named = {k.rstrip("_").replace("_", "-"): _plain(v) for k, v in attributes.items()}
        element = ElementTree.SubElement(self.root, tag, named)
        element.text = visible(text) or None
        if tip:
            ElementTree.SubElement(element, "title").text = visible_lines(tip)

    def nest(self, view_box: str, **attributes: Number) -> Svg:
        """Returns a drawing area of its own scale inside; its content is stretched to the area."""
        inner = object.__new__(Svg)
        named = {k: _plain(v) for k, v in attributes.items()}
        stretch = {"viewBox": view_box, "preserveAspectRatio": "none"}
        inner.root = ElementTree.SubElement(self.root, "svg", {**stretch, **named})
        return inner

    def text(self) -> str:
        """Returns the markup, to be put into a page unchanged."""
        return ElementTree.tostring(self.root, encoding="unicode", short_empty_elements=False)


def percent(share: float) -> str:
    """Returns `12.3%` for 0.123, as an SVG length."""
    return f"{share * 100:.4g}%"


def _plain(value: Number) -> str:
    return visible(value) if isinstance(value, str) else f"{value:.6g}"
