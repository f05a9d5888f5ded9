"""Problem: what does one of `shards` devices that share a stage hold, for all runs of units at once?

    states   (ZeRO-1)  optimizer states, master copies and temporaries of the optimizer's step: 1 / shards.
                       Weights and gradients are whole during a step; the device's part of the weights, which
                       the optimizer steps and the gather reads, counts as a master copy
    all      (ZeRO-3)  weights and gradients too. A forward or backward gathers the weights of the block being
                       computed and of the next one (prefetched); the gradients of a block are whole until its
                       reduce-scatter is over, while the block before it makes its own. Blocks are those of
                       schedules/refine.py, cut off at the ends of the run
    tensor             every tensor inside a layer and, with sequence parallelism, between layers: 1 / shards.
                       A product gathers its input, in the forward and once more in the backward
    context            activations are divided by tokens: 1 / shards; weights, gradients and states are whole.
                       Attention holds the keys and values of all tokens until its backward, where their
                       gradients are as large; what is recomputed holds those of one unit, and attention by
                       pieces of heads those of a piece three times: as they are, their gradients, and those
                       in the order in which ranks add them up

Shares are rounded up, as on the first device. Buffers and the batch are whole on every device.

Sources: ZeRO, arXiv 1910.02054, sec. 5 (4 + 12 / N and 16 / N bytes per parameter under mixed Adam);
torch.distributed.fsdp.fully_shard with a group for each block and reshard_after_forward; tensor and sequence
parallelism, arXiv 2205.05198, sec. 4.2. Deviations: a unit's padding to whole rows and the copy out of the
flat buffer of a gather are not counted; nor are the other weights of a block that owns a tied weight; nor is
the first block that follows the last one of a stage between two forwards. Under tensor parallelism norms and
biases count as divided, too, where no profile of one rank exists (layout/tensor_parallel.py). Under ZeRO-3
the first backward of a step is bounded from above by a later one; under ZeRO-1 weights and gradients count as
whole in the optimizer's step, where only their parts are left. Under context parallelism the weights'
gradients of the largest unit, and their sums over pieces of rows, count as being made at the worst moment.
Complexity: O(n^2). Oracle: tests/unit/planner/memory/test_memory_sharded.py goes through every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import OptimizerBytes
from outsize.planner.memory.range_tables import Bytes, RangeTables, largest, owned_gradients
from outsize.planner.memory.recomputed_stage import MicrobatchBytes
from outsize.schedules.refine import pieces_of


def device_tables(
    ranges: RangeTables, layout: Layout, keys: KeyBytes, gathered: UnshardedBytes | None, ranked: bool
) -> RangeTables:
    """Returns the tables of one device of the layout.

    `keys`: what context parallelism has whole. `gathered` is set where weights are sharded. `ranked`: the
    tables are those of a tensor-parallel rank already (layout/tensor_parallel.py).
    """
    parts = context_parallel(ranges, layout.axes.token_parts, keys)
    parts = parts if ranked else tensor_parallel(parts, layout.axes.product_parts)
    return sharded(parts, layout.shards, gathered)


def sharded(ranges: RangeTables, shards: int, whole: UnshardedBytes | None) -> RangeTables:
    """Returns the tables of one of `shards` >= 1 replicas that shard states and, if `whole` is set, weights
    and gradients.
    """
    if shards == 1:
        return ranges
    shared = replace(
        ranges,
        optimizer=_share(ranges.optimizer, shards),
        master=_share(ranges.master, shards),
        update=_share(ranges.update, shards),
    )
    return _with_weight_shard(shared, shards) if whole is None else _fully_sharded(shared, shards, whole)


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnshardedBytes:
    """Holds what is whole for a moment under ZeRO-3: weight bytes that each unit uses, gradient bytes that it
    makes, and the number of its `block`; the tables are of runs between `ends`.
    """

    weights: Bytes
    gradients: Bytes
    block: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, graph: ModelGraph, optimizer: OptimizerBytes, ends: Sequence[int], shards: int = 1) -> Self:
        """Computes the bytes of a graph of which one device has one of `shards` tensor-parallel parts."""
        used = [{graph.parameter_of[name].name for name in unit.parameters} for unit in graph.units]
        size = {p.name: p.size_bytes for p in graph.parameters}
        weights = np.array([sum(size[name] for name in names) for names in used], np.int64)
        gradients = owned_gradients(graph, optimizer)
        return cls(_share(weights, shards), _share(gradients, shards), pieces_of(graph), ends)


@final
@dataclass(frozen=True, slots=True, eq=False)
class GatheredBytes:
    """Holds for all runs what a device with shards of weights has for a moment beyond what a microbatch needs
    where weights are whole; in a `backward` it lacks the other devices' gradients.
    """

    forward: Bytes
    backward: Bytes

    @classmethod
    def of(cls, sharded: RangeTables, whole: RangeTables) -> Self:
        """Compares the tables of a device with those of whole weights."""
        return cls(sharded.forward - whole.forward, sharded.backward - whole.backward)

    def beside(self, held: MicrobatchBytes, run: tuple[int, int]) -> MicrobatchBytes:
        """Returns the same moments of a run on a device with shards."""
        forward, backward = int(self.forward[run]), int(self.backward[run])
        return MicrobatchBytes(
            held.saved_bytes, held.forward + forward, held.backward + backward, held.first_backward + backward
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class WholeBytes:
    """Holds for all runs what a device with shards of weights has whole at its worst moment: weights of two
    blocks, and in a `backward` their gradients too. Neither falls when units are added.
    """

    forward: Bytes
    backward: Bytes

    @classmethod
    def of(cls, whole: UnshardedBytes) -> Self:
        """Computes both from what units have whole."""
        gathered = largest_adjacent_blocks(whole.weights, whole.block, whole.ends)
        return cls(gathered, gathered + largest_adjacent_blocks(whole.gradients, whole.block, whole.ends))

    def beside(self, row: RangeTables, first: int) -> RangeTables:
        """Returns a lower bound of the runs that begin with one unit, with what is whole there."""
        forward, backward = self.forward[first], self.backward[first]
        return replace(
            row,
            forward=row.forward + forward,
            backward=row.backward + backward,
            first_backward=row.first_backward + backward,
        )


def _with_weight_shard(ranges: RangeTables, shards: int) -> RangeTables:
    """Adds the shard of the weights that the optimizer updates; frozen ones have none."""
    part = _share(ranges.trained, shards)
    return replace(ranges, optimizer=ranges.optimizer + part, master=ranges.master + part)


def _fully_sharded(ranges: RangeTables, shards: int, whole: UnshardedBytes) -> RangeTables:
    """Shards weights and gradients, and adds what is whole for a moment; replicas of other stages' tied
    weights stay whole.
    """
    gradients, beside = _share(ranges.gradients, shards), WholeBytes.of(whole)
    backward = ranges.backward - ranges.gradients + gradients
    return replace(
        ranges,
        weights=_share(ranges.weights - ranges.buffers, shards) + ranges.buffers,
        gradients=gradients,
        forward=ranges.forward + beside.forward,
        backward=backward + beside.backward,
        first_backward=np.minimum(ranges.first_backward, backward) + beside.backward,
    )


def tensor_parallel(ranges: RangeTables, shards: int) -> RangeTables:
    """Returns the tables of one of `shards` >= 1 devices that share every layer; their seconds are the
    caller's.
    """
    if shards == 1:
        return ranges
    gathered = largest(single_units(ranges.received))
    divided = {name: _share(getattr(ranges, name), shards) for name in _DIVIDED}
    for name in ("forward", "backward", "first_backward"):
        divided[name] += gathered
    divided["weights"] += ranges.buffers - _share(ranges.buffers, shards)
    return replace(ranges, **divided)


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyBytes:
    """Holds what ranks that share tokens have whole: the bytes of keys and values that the attention of each
    unit has at once, and of those that it reads the `lasting` ones, which it keeps until its backward; and
    the `sums` of gradients of weights that its backward holds beside the gradients themselves.
    """

    per_unit: Bytes
    sums: Bytes
    lasting: Bytes

    def gathered(self, shards: int) -> tuple[Bytes, Bytes]:
        """Returns for all runs what a device holds of other devices' keys and values: all, and at most in a
        unit.
        """
        most, lasting = (size - size // shards for size in (self.per_unit, self.lasting))
        sums = np.append(0, np.cumsum(lasting))
        return np.triu(sums[None, :] - sums[:, None]), largest(most)


def context_parallel(ranges: RangeTables, shards: int, keys: KeyBytes) -> RangeTables:
    """Returns the tables of one of `shards` >= 1 devices that share tokens, and gather `keys`."""
    if shards == 1:
        return ranges
    every, most = keys.gathered(shards)
    shared = "saved", "saved_small", "saved_boundary", "saved_sent", "received", "sent", "between_halves"
    divided = {name: _share(getattr(ranges, name), shards) for name in (*shared, "on_host")}
    # Gradients of tied weights are whole: those that cross the end of a run are what the rest receives.
    tied = {"gradient_in": ranges.replicas[:, -1], "gradient_out": ranges.replicas}
    for name, size in tied.items():
        whole = np.minimum(getattr(ranges, name), size)
        divided[name] = _share(getattr(ranges, name) - whole, shards) + whole
    made = largest(single_units(ranges.gradients) + keys.sums)
    acting = _share(ranges.backward - ranges.gradients, shards) + made - made // shards
    backward = acting + ranges.gradients + every + most
    divided["saved"] += every
    return replace(
        ranges,
        **divided,
        forward=_share(ranges.forward, shards) + every + most,
        backward=backward,
        first_backward=np.minimum(ranges.first_backward + every + most, backward),
    )


_DIVIDED = (
    *("weights", "trained", "replicas", "gradients", "optimizer", "master", "update"),
    *(
        "saved",
        "saved_small",
        "saved_boundary",
        "saved_sent",
        "forward",
        "backward",
        "first_backward",
        "between_halves",
        "split_backward",
        "on_host",
    ),
    *("received", "sent", "gradient_in", "gradient_out"),
)


def _share(table: Bytes, shards: int) -> Bytes:
    """Returns the largest of `shards` shares."""
    return -(-table // shards)


def single_units(table: Bytes) -> Bytes:
    """Returns the entries of runs of a single unit, of shape (n,)."""
    return np.diagonal(table, offset=1)


def largest_adjacent_blocks(
    per_unit: Bytes, block: Sequence[int] | None = None, ends: Sequence[int] | None = None
) -> Bytes:
    """Returns, for all runs between `ends`, the largest sum of one block or of two consecutive nonempty ones.

    Only the part of a block that is in the run counts. By default each unit is a block, and a run may end
    anywhere. The largest sum ends at some unit of the run and begins with the block before that unit's, or
    with the run.
    """
    units = np.arange(len(per_unit) + 1)
    block_of = units[:-1] if block is None else np.asarray(block)
    first = units if ends is None else np.asarray(ends)
    starts = np.flatnonzero(np.diff(block_of, prepend=-1))
    nonempty = np.add.reduceat(per_unit, starts) > 0
    latest = np.maximum.accumulate(np.where(nonempty, starts, 0))
    start_before = np.append(0, latest[:-1])[block_of]
    sums = np.append(0, np.cumsum(per_unit))
    window_sums = sums[1:] - sums[np.maximum(first[:, None], start_before)]
    table = np.zeros((len(first), len(first)), np.int64)
    table[:, 1:] = np.maximum.accumulate(np.maximum(window_sums, 0), axis=1)[:, first[1:] - 1]
    return table
