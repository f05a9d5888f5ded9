"""Problem: what is the model of a mean slice of its sequences, as a graph of its own?

    bytes          1 / n of what a microbatch saves, sends and needs; sums of gradients of weights stay whole
    work           1 / n of the operations and bytes, in as many launches; products read their weights whole
    attention      slice k reads the keys and values of k + 1 slices: of half of the sequence in the mean, in
                   the backward as well, where it makes gradients as long
    kept rows      a slice copies its keys and values to where those of the microbatch are; gradients of all
                   that it has read are added up in float32 (run/collectives/sequence_slices.py)

So small slices cost more than their share, and the seconds say by how much (costs/device_scaling.py).

Keys and values of a microbatch stay in the stage, with the sums of their gradients. Where layers keep their
activations the keys are among them; otherwise those of `most_open` microbatches are there.

Source: SlimPipe, arXiv 2504.14519, which also moves work between stages so that slices cost the same; here
they do not. Complexity: O(units). Oracle: tests/unit/planner/layout/test_slice_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outsize.ir.graph import MATMULS, ModelGraph, ShardedFraction, Unit, Value, Work

NARROW: Final = ("bfloat16", "float16")
_WORK: Final = ("flops", "moved_bytes", "instructions", "fused_flops", "fused_bytes", "library_bytes")
_SENT: Final = (
    *("saved_bytes", "forward_sum", "forward_gather", "backward_sum", "backward_gather"),
    *("again_bytes", "begun_sum", "begun_gather"),
)
_OF_UNITS: Final = ("flops", "moved_bytes", "saved_bytes", "workspace_bytes", "saved_input_bytes")


def graph_of_slice(graph: ModelGraph, slices: int) -> ModelGraph:
    """Returns the graph of a mean slice."""
    size_of = {name: p.size_bytes for p in graph.parameters for name in p.names}
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields |= {name: fields[name] // slices for name in ("output_bytes", "input_bytes")}
    fields["values"] = tuple(_value(value, slices) for value in graph.values)
    fields["units"] = tuple(
        _unit(unit, slices, sum(size_of[name] for name in unit.parameters)) for unit in graph.units
    )
    return ModelGraph(**fields)


def kept_bytes(units: Sequence[Unit], tp: int) -> list[int]:
    """Returns the bytes of keys and values of a microbatch that a device keeps for each unit."""
    return [unit.row_gather_bytes // tp for unit in units]


def gradient_share(units: Sequence[Unit]) -> int:
    """Returns how many times as long as the keys and values the sums of their gradients are."""
    works = (work for unit in units for work in unit.forward if work.family == "attention")
    return 2 if any(work.dtype in NARROW for work in works) else 1


def most_open(in_flight: int, microbatches: int, slices: int) -> int:
    """Returns of how many microbatches a stage has some slices while so many slices are in flight: the first
    of them may be the last one of its microbatch.
    """
    return min(microbatches, (slices + in_flight - 2) // slices + 1)


def _unit(unit: Unit, slices: int, weight_bytes: int) -> Unit:
    sums = unit.weight_sum_bytes
    fields: dict[str, Any] = {name: getattr(unit, name) // slices for name in _OF_UNITS}
    fields["backward_workspace_bytes"] = (unit.backward_workspace_bytes - sums) // slices + sums
    fields |= {name: _fraction(getattr(unit, name), slices) for name in ("divided", "in_sequence")}
    # A mean slice reads (n + 1) / 2 slices of the keys and values; 1 / n of all is in the works.
    read = unit.row_gather_bytes * (slices - 1) // (2 * slices)
    for name, more in (("forward", read), ("backward_input", 2 * read), ("backward_weight", 0)):
        works = tuple(_works(getattr(unit, name), slices, weight_bytes, more))
        fields[name] = (*works, *_keeping(unit, name, slices))
    return unit.model_copy(update=fields)


def _works(works: Sequence[Work], slices: int, weight_bytes: int, read: int) -> list[Work]:
    made = list[Work]()
    for work in works:
        whole = min(weight_bytes, work.moved_bytes) if work.family in MATMULS else 0
        more = read if work.family == "attention" else 0
        weight_bytes, read = weight_bytes - whole, read - more
        fields = {name: getattr(work, name) // slices for name in _WORK}
        fields["moved_bytes"] = (work.moved_bytes - whole) // slices + whole + more
        made.append(work.model_copy(update=fields))
    return made


def _keeping(unit: Unit, name: str, slices: int) -> list[Work]:
    """Returns the copies of keys and values that slices make of their own rows in the forward, and the sums
    of gradients of all that they have read in the backward: half of the sequence in the mean.
    """
    gathered, attention = unit.row_gather_bytes, [w for w in unit.forward if w.family == "attention"]
    if not gathered or not attention or name == "backward_weight":
        return []
    dtype = attention[0].dtype
    # A gradient is read, and its sum is read and written.
    moved = (1 + 2 * gradient_share([unit])) * gathered // 2 if name != "forward" else 2 * gathered // slices
    return [Work(family="elementwise", dtype=dtype, flops=0, moved_bytes=moved, launches=2)]


def _fraction(fraction: ShardedFraction, slices: int) -> ShardedFraction:
    return fraction.model_copy(update={name: getattr(fraction, name) // slices for name in _SENT})


def _value(value: Value, slices: int) -> Value:
    fields = {name: getattr(value, name) // slices for name in ("size_bytes", "storage_bytes")}
    return value.model_copy(update=fields)
