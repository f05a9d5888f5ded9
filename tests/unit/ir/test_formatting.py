from __future__ import annotations

import pytest

from outsize.ir.formatting import (
    byte_unit,
    bytes_text,
    count_text,
    flops_text,
    percent_text,
    rate_text,
    seconds_text,
    whole_number,
)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (12 * 1024**2, "12.0 MiB"),
        (31.4 * 1024**3, "31.4 GiB"),
        (2 * 1024**4, "2.0 TiB"),
        (-3 * 1024, "-3.0 KiB"),
    ],
)
def test_bytes(size_bytes: float, text: str) -> None:
    assert bytes_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.414, "2.41 s"),
        (0.1031, "103 ms"),
        (0.0124, "12.4 ms"),
        (12.4e-6, "12.4 us"),
        (0.0, "0.00 us"),
        (95, "95.0 s"),
    ],
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_unit_for_several_sizes() -> None:
    assert byte_unit(5 * 1024**3) == ("GiB", 1024**3)


def test_percent() -> None:
    assert percent_text(0.234) == "23 %"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (812, "812"),
        (1000, "1.00 K"),
        (5_096_320, "5.10 M"),
        (7_241_732_096, "7.24 B"),
        (2e12, "2.00 T"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(("flops", "text"), [(12, "12 FLOP"), (84e6, "84.0 MFLOP"), (1.2e12, "1.20 TFLOP")])
def test_flops_have_si_prefixes(flops: float, text: str) -> None:
    assert flops_text(flops) == text


def test_a_rate() -> None:
    assert [rate_text(r) for r in (2.824, 48, 12900)] == ["2.82", "48.0", "12900"]


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1 ", "1\n", "1_0", "1.0", "\u00b2", "\u0663", "9" * 5000]
)
def test_what_is_no_whole_number(text: str) -> None:
    assert whole_number(text) is None


def test_whole_numbers() -> None:
    assert [whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
