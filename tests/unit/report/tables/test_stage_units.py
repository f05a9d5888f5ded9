from __future__ import annotations

import pytest

from outsize.report.tables.stage_units import short_units


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ((), ""),
        (("lm_head",), "lm_head"),
        (("conv1", "bn1", "layer1"), "conv1, bn1, layer1"),
        (("a.b.c", "a.b.d"), "a.b.{c, d}"),
        (("t.wte", "t.h.0-3", "t.h.4.ln_1", "root"), "t.{wte, h.0-3, h.4.ln_1}, root"),
        (("a.x", "b.x", "a.y"), "a.x, b.x, a.y"),
        (("a", "a:op"), "a, a:op"),
        (("a.b:op", "a.b"), "a.{b:op, b}"),
    ],
)
def test_neighbours_share_their_module(patterns: tuple[str, ...], text: str) -> None:
    assert short_units(patterns) == text


def test_the_middle_of_many_is_left_out() -> None:
    assert short_units([f"u{i}" for i in range(9)], most=4) == "u0, u1, … 6 more, u8"
    assert short_units([f"u{i}" for i in range(4)], most=4) == "u0, u1, u2, u3"


def test_what_is_left_out_stays_in_its_module() -> None:
    assert short_units([f"m.u{i}" for i in range(9)], most=4) == "m.{u0, u1, … 6 more, u8}"
