"""What a notebook shows of a record is safe markup; a record without a table stays text."""

from __future__ import annotations

from base64 import b64decode
from xml.etree import ElementTree

from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.answers.verdict import Verdict
from outsize.ir.plan import Axes
from outsize.ir.timeline import Span, Timeline


def verdict(model: str) -> Verdict:
    return Verdict(
        model=model,
        bit_equal=True,
        loss_diff=0.0,
        grad_diff=0.0,
        buffer_diff=0.0,
        parameter_diff=0.0,
        first_divergence=None,
        stages=(("a",), ("b",)),
        schedule="1f1b",
        microbatches=2,
        processes=0,
        capture_s=0.1,
        run_s=0.1,
    )


def test_a_name_is_no_markup() -> None:
    shown = verdict("<script>alert(1)</script>\x1b[2J")._repr_html_()
    assert shown is not None
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert "\x1b" not in shown
    ElementTree.fromstring(f"<div>{shown}</div>")


def test_a_timeline_is_a_picture() -> None:
    spans = tuple(
        Span(rank=rank, lane="compute", action=f"{rank}F0", start_s=rank * 0.1, end_s=0.1 + rank * 0.1)
        for rank in range(2)
    )
    shown = Timeline(source="measured", ranks=2, spans=spans)._repr_html_()
    assert shown is not None
    root = ElementTree.fromstring(shown)
    (image,) = root.iter("img")
    picture = ElementTree.fromstring(b64decode(image.attrib["src"].partition("base64,")[2]))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "2 ranks, 200 ms" in image.attrib["alt"]


def test_how_devices_spent_a_step_is_text() -> None:
    used = Utilisation(step_s=1.0, bound_s=0.9, devices=("cpu",), busy=(0.8,), transfer=0.1, note="<b>")
    shown = used._repr_html_()
    assert shown is not None
    assert "cpu 80 %" in shown
    assert "&lt;b&gt;" in shown


def test_a_record_without_a_table_stays_text() -> None:
    assert Axes(pp=2)._repr_html_() is None
