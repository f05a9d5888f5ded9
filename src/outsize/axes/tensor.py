"""Defines the axis tp: ranks have parts of the products of each layer, and of their weights."""

from __future__ import annotations

from typing import Final

from outsize.axes.axis import Axis

TENSOR: Final = Axis(
    name="tp",
    paper="Megatron-LM: Shoeybi et al., arXiv 1909.08053, sec. 3",
    title="tensor parallelism",
    listed=3,
    divides_weights="products",
    within_stages=True,
    # A plan may be read so; what runs it says which of its layers have the sizes of one device.
    by_modules=True,
    takes_slices=True,
    is_searched=True,
    reads_whole="which has the sizes of one device in it",
    help="Number of devices that share the work of each layer.",
)
