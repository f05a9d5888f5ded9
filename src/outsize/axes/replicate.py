"""Defines the axis dp_replicate: ranks have whole weights, each its part of the batch, as DDP has them."""

from __future__ import annotations

from typing import Final

from outsize.axes.axis import Axis

REPLICATE: Final = Axis(
    name="dp_replicate",
    paper="PyTorch Distributed: Li et al., arXiv 2006.15704",
    title="data parallelism",
    listed=1,
    divides_batch=True,
    same_weights=True,
    same_experts=True,
    by_modules=True,
    takes_slices=True,
    is_searched=True,
    help="Number of replicas, each with its part of the batch.",
)
