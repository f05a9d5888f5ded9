"""Segments: runs of chosen units within one block."""

from __future__ import annotations

from outsize.ir.units.recompute_segments import blocks, segments

NAMES = ("wte", "h.0.ln", "h.0.mlp.0", "h.0.mlp.1", "h.0:add", "h.1.ln", "h.1.mlp.0", "ln_f", "conv1", "head")


def test_a_block_is_the_deepest_numbered_module_of_several_units() -> None:
    assert blocks(NAMES) == ["", "h.0", "h.0", "h.0", "h.0", "h.1", "h.1", "", "", ""]


def test_a_model_that_is_one_module_has_a_unit_without_a_name_and_no_block() -> None:
    assert blocks(["", "sum"]) == ["", ""]


def test_a_triple_within_a_block_is_a_block() -> None:
    names = ["f.1.conv.0.0", "f.1.conv.0.1", "f.1.conv.1", "f.1:add"]
    assert blocks(names) == ["f.1.conv.0", "f.1.conv.0", "f.1", "f.1"]


def test_segments_end_with_a_gap_and_with_a_block() -> None:
    assert segments(blocks(NAMES), {2, 3, 4, 5, 7, 8}) == ((2, 5), (5, 6), (7, 9))
    assert segments(blocks(NAMES), ()) == ()


def test_a_long_row_outside_of_blocks_is_cut_into_about_its_root() -> None:
    """26 units in five parts; the block behind them is whole."""
    names = [*(f"u{i}" for i in range(26)), "h.0.a", "h.0.b"]
    assert segments(blocks(names), range(28)) == (
        *((first, first + 6) for first in range(0, 24, 6)),
        (24, 26),
        (26, 28),
    )
    assert segments(blocks(names[:24]), range(24)) == ((0, 24),)
