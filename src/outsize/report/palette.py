"""Defines the colours of plots and pages: safe for colour-blind eyes, one meaning each.

Causes of memory: Okabe and Ito, "Color Universal Design" (2008). Forward is blue and backward orange, which
all common kinds of colour blindness tell apart; microbatches differ in lightness.
"""

from __future__ import annotations

CAUSES = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "activations": "#e69f00",
    "boundary": "#cc79a7",
}
# Stages of a network; neighbours always differ.
STAGES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
# Lightness repeats after this many microbatches; neighbours always differ.
SHADES = 4
FORWARD = ("#2166ac", "#4a90c9", "#7db5de", "#a9d0ec")
BACKWARD = ("#b35806", "#d97f1e", "#f0a350", "#f7c78b")
WEIGHT = ("#1b6e53", "#3a9676", "#6cb89d", "#9dd4c0")
OTHER = ("#7a7a85", "#8f8f9a", "#a4a4ae", "#b9b9c2")
KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}
DARK_INK, LIGHT_INK = "#14161a", "#ffffff"


def shade(kind: str, microbatch: int) -> str:
    """Returns the colour of a compute action."""
    return KINDS.get(kind, OTHER)[microbatch % SHADES]


def ink(fill: str) -> str:
    """Returns the text colour on `fill`: dark or light, whichever has more contrast (WCAG 2.1, relative
    luminance).
    """
    return DARK_INK if contrast(fill, DARK_INK) >= contrast(fill, LIGHT_INK) else LIGHT_INK


def contrast(one: str, other: str) -> float:
    """Returns the WCAG contrast ratio, 1 to 21, of two `#rrggbb`."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
