"""Defines the axis pp: ranks have different stages of the model, and send each other activations."""

from __future__ import annotations

from typing import Final

from outsize.axes.axis import Axis

PIPELINE: Final = Axis(
    name="pp",
    paper="GPipe: Huang et al., arXiv 1811.06965",
    title="pipeline parallelism",
    listed=0,
    cuts_stages=True,
    by_modules=True,
    keeps_bits=True,
    takes_slices=True,
    is_searched=True,
    option="stages",
    help="Number of pipeline stages (default: one per device).",
)
