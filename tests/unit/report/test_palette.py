from __future__ import annotations

from itertools import chain, pairwise

import pytest

from outsize.report.palette import BACKWARD, CAUSES, DARK_INK, FORWARD, KINDS, LIGHT_INK, contrast, ink, shade


def test_contrast_of_black_and_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#123456", "#123456") == pytest.approx(1)


@pytest.mark.parametrize("fill", sorted(set(chain.from_iterable(KINDS.values()))))
def test_labels_can_be_read(fill: str) -> None:
    """WCAG AA for text."""
    assert ink(fill) in {DARK_INK, LIGHT_INK}
    assert contrast(fill, ink(fill)) >= 4.5


@pytest.mark.parametrize("shades", [FORWARD, BACKWARD])
def test_neighbouring_microbatches_differ(shades: tuple[str, ...]) -> None:
    assert all(contrast(a, b) >= 1.2 for a, b in pairwise((*shades, shades[0])))


def test_forward_and_backward_differ_for_every_microbatch() -> None:
    assert all(shade("F", m) != shade("B", m) for m in range(8))
    assert shade("F", 0) == shade("F", len(FORWARD))
    assert shade("UNSHARD", 0) not in {*FORWARD, *BACKWARD}
    assert len(set(CAUSES.values())) == len(CAUSES)
