"""Formats of frozen weights: their bytes by hand, and what follows from their records."""

from __future__ import annotations

import pytest

from outsize.policies.storage_formats import (
    FP8,
    HQQ4,
    INT8,
    NF4,
    storage_format,
    storage_formats,
)

ROWS, COLUMNS = 768, 1024
ELEMENTS = ROWS * COLUMNS


def test_double_quantization_by_hand() -> None:
    """12,288 scales of a byte, 48 numbers for blocks of 256 of them, a mean, tables of 256 and of 16."""
    assert NF4.code_bytes(ELEMENTS) == 393_216
    assert NF4.beside_bytes(ELEMENTS, ROWS) == 12_288 + 4 * (48 + 1 + 256 + 16)


def test_without_it_scales_are_whole_numbers() -> None:
    plain = NF4.of_blocks(None, nests=False)
    assert plain.beside_bytes(ELEMENTS, ROWS) == 4 * 12_288 + 4 * 16
    assert plain.all_launches == 1 < NF4.all_launches
    assert NF4.of_blocks(128, nests=None).scales(ELEMENTS, ROWS) == 6_144


def test_scales_of_rows_and_of_groups() -> None:
    assert INT8.beside_bytes(ELEMENTS, ROWS) == FP8.beside_bytes(ELEMENTS, ROWS) == 4 * ROWS
    assert HQQ4.beside_bytes(ELEMENTS, ROWS) == 4 * 12_288


def test_blocks_that_end_within_a_weight_count_whole() -> None:
    assert NF4.scales(65, 1) == 2
    assert NF4.code_bytes(3) == 2


@pytest.mark.parametrize("stored", storage_formats(), ids=lambda each: each.name)
def test_what_holds_of_any_record(stored: object) -> None:
    """A weight takes less than in 16 bits, what is read is at least what is stored, and names are found."""
    found = next(each for each in storage_formats() if each is stored)
    stored_bytes = found.code_bytes(ELEMENTS) + found.beside_bytes(ELEMENTS, ROWS)
    assert found.bits / 8 * ELEMENTS <= stored_bytes < 2 * ELEMENTS
    assert found.read_bytes(ELEMENTS, ROWS) >= stored_bytes
    assert found.held >= 1
    assert storage_format(found.name) is found
    assert found.swap
    assert found.help


def test_parts_hold_whole_blocks() -> None:
    assert [NF4.least_part(0, columns) for columns in (64, 96, 100)] == [1, 2, 16]
    assert NF4.least_part(1, 4096) == 64


def test_an_unknown_name_is_none() -> None:
    assert storage_format("nf5") is None
