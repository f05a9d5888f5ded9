"""Defines the axis dp_shard: ranks have their part of the batch and of all states, as ZeRO and FSDP do."""

from __future__ import annotations

from typing import Final

from outsize.axes.axis import Axis

SHARD: Final = Axis(
    name="dp_shard",
    paper="ZeRO: Rajbhandari et al., arXiv 1910.02054; FSDP: Zhao et al., arXiv 2304.11277",
    title="sharded data parallelism",
    listed=2,
    divides_batch=True,
    divides_states=True,
    same_weights=True,
    same_experts=True,
    is_searched=True,
    help="Number of replicas that share weights and states (FSDP).",
)
