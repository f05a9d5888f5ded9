"""Problem: what does one device of a stage hold when `ways` devices share it, for all runs of units at once?

    states   (ZeRO-1)  optimizer states, master copies and the temporaries of the optimizer's step: 1 / ways.
                       Weights and gradients are whole during a step; its part of the weights, which the
                       optimizer steps and gathers are made of, counts as a master copy
    all      (ZeRO-3)  weights and gradients too. A forward or backward gathers the weights of the unit at
                       work and of the next one (prefetched); the gradient of a unit is whole until its
                       reduce-scatter is over, while the unit before it makes its own
    tensor             every tensor inside a layer and, with sequence parallelism, between layers: 1 / ways.
                       A product gathers its input, in the forward and once more in the backward
    context            activations by the token: 1 / ways; weights, gradients and states are whole. Attention
                       has two blocks of keys and values on their way, in the backward their gradients too

Shares are rounded up, as the first device has it. Buffers and the batch are whole on every device.

Sources: ZeRO, arXiv 1910.02054, sec. 5 (4 + 12 / N and 16 / N bytes per parameter under mixed Adam);
torch.distributed.fsdp.fully_shard, a group for each unit, reshard_after_forward; tensor and sequence
parallelism, arXiv 2205.05198, sec. 4.2. Deviations: a unit's padding to whole rows and the copy out of the
flat buffer of a gather are not counted; under tensor parallelism norms and biases count as divided, too,
where nobody has asked what is (divided.py). Sharded, the first backward of a step is bounded from above by a
later one; if only states are, weights and gradients count as whole in the optimizer's step, where their parts
are left. Under context parallelism the weights' gradients of the largest unit count as being made at the
worst moment. Complexity: O(n^2). Oracle: tests/unit/planner/test_sharding.py goes through every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import numpy as np

from outsize.planner.layout import Layout
from outsize.planner.ranges import Bytes, Ranges, largest

Level = Literal["states", "all"]


def shared(
    ranges: Ranges, layout: Layout, turning_bytes: int, gathered: Whole | None, ranked: bool
) -> Ranges:
    """Of a device of the layout. `turning_bytes`: keys and values of a device, that go round under cp.

    `ranked`: these are the tables of a tensor parallel rank already (divided.py).
    """
    level = "all" if layout.weights == "sharded" else "states"
    parts = context_parallel(ranges, layout.axes.cp, turning_bytes)
    parts = parts if ranked else tensor_parallel(parts, layout.axes.tp)
    return sharded(parts, layout.axes.dp_shard, level, gathered)


def sharded(ranges: Ranges, ways: int, level: Level, whole: Whole | None = None) -> Ranges:
    """Tables of one of `ways` >= 1 replicas that share what lasts beyond a step, or all they hold for good.

    `whole` where the tables are of pieces: what a gather makes whole is a unit's, not a piece's.
    """
    if ways == 1:
        return ranges
    shared = replace(
        ranges,
        optimizer=_share(ranges.optimizer, ways),
        master=_share(ranges.master, ways),
        update=_share(ranges.update, ways),
    )
    return _stepped(shared, ways) if level == "states" else _fully(shared, ways, whole)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Bytes of the weights that each unit uses and of the gradients that it makes; `ends` of the pieces."""

    weights: Bytes
    gradients: Bytes
    ends: tuple[int, ...]


def _stepped(ranges: Ranges, ways: int) -> Ranges:
    """With a part of the weights beside them."""
    part = _share(ranges.weights - ranges.buffers, ways)
    return replace(ranges, optimizer=ranges.optimizer + part, master=ranges.master + part)


def _fully(ranges: Ranges, ways: int, whole: Whole | None) -> Ranges:
    """Weights and gradients too, with what is whole for a moment."""
    gradients = _share(ranges.gradients, ways)
    if whole is None:
        weights = each(ranges.weights - ranges.buffers + ranges.replicas)
        whole = Whole(weights, each(ranges.gradients), tuple(range(len(weights) + 1)))
    scattering = largest(np.maximum.reduceat(whole.gradients, whole.ends[:-1]))
    gathered = neighbours(whole.weights, whole.ends)
    backward = ranges.backward - ranges.gradients + gradients
    more = gathered + scattering
    return replace(
        ranges,
        weights=_share(ranges.weights - ranges.buffers, ways) + ranges.buffers,
        replicas=_share(ranges.replicas, ways),
        gradients=gradients,
        forward=ranges.forward + gathered,
        backward=backward + more,
        first_backward=np.minimum(ranges.first_backward, backward) + more,
    )


def tensor_parallel(ranges: Ranges, ways: int) -> Ranges:
    """Tables of one of `ways` >= 1 devices that share every layer; bytes alone, seconds are the caller's."""
    if ways == 1:
        return ranges
    gathered = largest(each(ranges.received))
    divided = {name: _share(getattr(ranges, name), ways) for name in _DIVIDED}
    for name in ("forward", "backward", "first_backward"):
        divided[name] += gathered
    divided["weights"] += ranges.buffers - _share(ranges.buffers, ways)
    return replace(ranges, **divided)


def context_parallel(ranges: Ranges, ways: int, block_bytes: int) -> Ranges:
    """Tables of one of `ways` >= 1 devices that share tokens; `block_bytes` of keys and values on each."""
    if ways == 1:
        return ranges
    shared = "saved", "small", "twice", "again", "received", "sent", "waiting"
    divided = {name: _share(getattr(ranges, name), ways) for name in shared}
    # Gradients of tied weights are whole: those that cross the end of a run are what the rest receives.
    tied = {"gradient_in": ranges.replicas[:, -1], "gradient_out": ranges.replicas}
    for name, size in tied.items():
        whole = np.minimum(getattr(ranges, name), size)
        divided[name] = _share(getattr(ranges, name) - whole, ways) + whole
    made = largest(each(ranges.gradients))
    acting = _share(ranges.backward - ranges.gradients, ways) + made - made // ways
    backward = acting + ranges.gradients + 4 * block_bytes
    return replace(
        ranges,
        **divided,
        forward=_share(ranges.forward, ways) + 2 * block_bytes,
        backward=backward,
        first_backward=np.minimum(ranges.first_backward + 4 * block_bytes, backward),
    )


_DIVIDED = (
    *("weights", "replicas", "gradients", "optimizer", "master", "update"),
    *("saved", "small", "twice", "again", "forward", "backward", "first_backward", "waiting", "halved"),
    *("received", "sent", "gradient_in", "gradient_out"),
)


def _share(table: Bytes, ways: int) -> Bytes:
    """The largest of `ways` shares."""
    return -(-table // ways)


def each(table: Bytes) -> Bytes:
    """Of the runs of a single unit, of shape (n,)."""
    return np.diagonal(table, offset=1)


def neighbours(per_unit: Bytes, ends: Sequence[int] | None = None) -> Bytes:
    """The largest unit, or two that follow each other among those that have any, for all runs of pieces."""
    ends = range(len(per_unit) + 1) if ends is None else ends
    n = len(ends) - 1
    table = np.zeros((n + 1, n + 1), np.int64)
    piece = np.searchsorted(ends, np.arange(len(per_unit)), side="right") - 1
    np.maximum.at(table, (piece, piece + 1), per_unit)
    some = np.flatnonzero(per_unit)
    pairs = per_unit[some[:-1]] + per_unit[some[1:]]
    np.maximum.at(table, (piece[some[:-1]], piece[some[1:]] + 1), pairs)
    np.maximum.accumulate(table[::-1], axis=0, out=table[::-1])
    return np.maximum.accumulate(table, axis=1, out=table)
