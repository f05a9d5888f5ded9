"""Defines the axis ep: ranks have their part of the batch and some of the experts of each layer."""

from __future__ import annotations

from typing import Final

from outsize.axes.axis import Axis

EXPERT: Final = Axis(
    name="ep",
    paper="GShard: Lepikhin et al., arXiv 2006.16668, sec. 3.2",
    title="expert parallelism",
    listed=5,
    divides_batch=True,
    divides_weights="experts",
    joins_states=True,
    same_weights=True,
    within_stages=True,
    is_searched=True,
    reads_whole="which calls all experts",
    help="Number of devices that share the experts; each has its own samples.",
)
