"""Defines the axis cp: ranks have their tokens of every sequence, and gather keys and values."""

from __future__ import annotations

from typing import Final

from outsize.axes.axis import Axis

CONTEXT: Final = Axis(
    name="cp",
    paper="Llama 3: Dubey et al., arXiv 2407.21783, sec. 3.3.2",
    title="context parallelism",
    listed=4,
    divides_tokens=True,
    joins_states=True,
    same_weights=True,
    same_experts=True,
    within_stages=True,
    is_searched=True,
    reads_whole="which reads whole sequences",
    help="Number of devices that share each sequence, by its tokens.",
)
