"""Problem: what does one device of a stage hold when `ways` devices share it, for all runs of units at once?

    states   (ZeRO-1)  optimizer states, master copies and the temporaries of the optimizer's step: 1 / ways.
                       Weights and gradients are whole during a step; its part of the weights, which the
                       optimizer steps and gathers are made of, counts as a master copy
    all      (ZeRO-3)  weights and gradients too. A forward or backward gathers the weights of the block at
                       work and of the next one (prefetched); the gradients of a block are whole until its
                       reduce-scatter is over, while the block before it makes its own. Blocks are those of
                       schedules/refine.py; a run has what it has of them
    tensor             every tensor inside a layer and, with sequence parallelism, between layers: 1 / ways.
                       A product gathers its input, in the forward and once more in the backward
    context            activations by the token: 1 / ways; weights, gradients and states are whole. Attention
                       has two blocks of keys and values on their way, in the backward their gradients too

Shares are rounded up, as the first device has it. Buffers and the batch are whole on every device.

Sources: ZeRO, arXiv 1910.02054, sec. 5 (4 + 12 / N and 16 / N bytes per parameter under mixed Adam);
torch.distributed.fsdp.fully_shard, a group for each block, reshard_after_forward; tensor and sequence
parallelism, arXiv 2205.05198, sec. 4.2. Deviations: a unit's padding to whole rows and the copy out of the
flat buffer of a gather are not counted, nor what else is in the block that owns a tied weight, nor that the
last block of a stage is followed by its first one between two forwards; under tensor parallelism norms and
biases count as divided, too, where nobody has asked what is (divided.py). Sharded, the first backward of a
step is bounded from above by a later one; if only states are, weights and gradients count as whole in the
optimizer's step, where their parts are left. Under context parallelism the weights' gradients of the largest
unit count as being made at the worst moment. Complexity: O(n^2).
Oracle: tests/unit/planner/test_sharding.py goes through every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.planner.layout import Layout
from outsize.planner.optimizer import OptimizerBytes
from outsize.planner.ranges import Bytes, Ranges, largest, owned_gradients
from outsize.schedules.refine import pieces_of


def shared(
    ranges: Ranges, layout: Layout, turning_bytes: int, gathered: Whole | None, ranked: bool
) -> Ranges:
    """Of a device of the layout. `turning_bytes`: keys and values of a device, that go round under cp;
    `gathered` where weights are sharded.

    `ranked`: these are the tables of a tensor parallel rank already (divided.py).
    """
    parts = context_parallel(ranges, layout.axes.cp, turning_bytes)
    parts = parts if ranked else tensor_parallel(parts, layout.axes.tp)
    return sharded(parts, layout.axes.dp_shard, gathered)


def sharded(ranges: Ranges, ways: int, whole: Whole | None) -> Ranges:
    """Tables of one of `ways` >= 1 replicas that share all they hold for good; without `whole`, what lasts
    beyond a step.
    """
    if ways == 1:
        return ranges
    shared = replace(
        ranges,
        optimizer=_share(ranges.optimizer, ways),
        master=_share(ranges.master, ways),
        update=_share(ranges.update, ways),
    )
    return _stepped(shared, ways) if whole is None else _fully(shared, ways, whole)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """What is whole for a moment: bytes of weights that each unit uses, and of gradients that it makes; the
    number of its `block`. The tables are of runs between `ends`.
    """

    weights: Bytes
    gradients: Bytes
    block: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, graph: ModelGraph, optimizer: OptimizerBytes, ends: Sequence[int], ways: int = 1) -> Self:
        """One of `ways` parts of all weights."""
        used = [{graph.parameter_of[name].name for name in unit.parameters} for unit in graph.units]
        size = {p.name: p.size_bytes for p in graph.parameters}
        weights = np.array([sum(size[name] for name in names) for names in used], np.int64)
        gradients = owned_gradients(graph, optimizer)
        return cls(_share(weights, ways), _share(gradients, ways), pieces_of(graph), ends)


def _stepped(ranges: Ranges, ways: int) -> Ranges:
    """With a part of the weights beside them."""
    part = _share(ranges.weights - ranges.buffers, ways)
    return replace(ranges, optimizer=ranges.optimizer + part, master=ranges.master + part)


def _fully(ranges: Ranges, ways: int, whole: Whole) -> Ranges:
    """Weights and gradients too, with what is whole for a moment; copies of others' tied weights stay so."""
    gradients = _share(ranges.gradients, ways)
    scattering = neighbours(whole.gradients, whole.block, whole.ends)
    gathered = neighbours(whole.weights, whole.block, whole.ends)
    backward = ranges.backward - ranges.gradients + gradients
    more = gathered + scattering
    return replace(
        ranges,
        weights=_share(ranges.weights - ranges.buffers, ways) + ranges.buffers,
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


def neighbours(
    per_unit: Bytes, block: Sequence[int] | None = None, ends: Sequence[int] | None = None
) -> Bytes:
    """The largest block, or two that follow each other of those that have any, for all runs between `ends`.

    Of a block what is in the run. By default each unit is one, and a run may end at each. The largest ends at
    some unit of the run and begins with the block before that unit's, or with the run.
    """
    units = np.arange(len(per_unit) + 1)
    block_of = units[:-1] if block is None else np.asarray(block)
    first = units if ends is None else np.asarray(ends)
    starts = np.flatnonzero(np.diff(block_of, prepend=-1))
    some = np.add.reduceat(per_unit, starts) > 0
    latest = np.maximum.accumulate(np.where(some, starts, 0))
    before = np.append(0, latest[:-1])[block_of]
    sums = np.append(0, np.cumsum(per_unit))
    found = sums[1:] - sums[np.maximum(first[:, None], before)]
    table = np.zeros((len(first), len(first)), np.int64)
    table[:, 1:] = np.maximum.accumulate(np.maximum(found, 0), axis=1)[:, first[1:] - 1]
    return table
