"""Problem: what is the model of one of `tp` tensor-parallel ranks, as a graph of its own?

    weights, values, saved bytes     the divided ones 1 / tp (rounded up), all others whole
    work, workspace                  1 / tp in a unit whose work is divided
    sequence parallelism             the same; values between layers are divided too
                                    (program/sharding/tensor_parallel/sequence.py). What is gathered again for
                                    a backward is whole during it

The graph says what is divided (`ModelGraph.tensor`, derived from the program:
program/sharding/tensor_parallel/styles.py). The planner then computes a stage on this graph as on any other;
costs/parallel_times.py adds the messages between ranks. Sources: Megatron-LM, arXiv 1909.08053, sec. 3;
sequence parallelism, arXiv 2205.05198, sec. 4.2.2. Deviation: a unit's workspace is divided as its work is.
Symbols: t -> tp. Complexity: O(units + values). Oracle:
tests/unit/planner/layout/test_layout_tensor_parallel.py compares with the parts that a rank of a real model
has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.findings import ModelTensorPlan, SequenceParallel, TensorParallel
from outsize.ir.graph import ModelGraph, Parameter, Unit, Value
from outsize.ir.profile import Profile, UnitCost


def styled(graph: ModelGraph, sequence: bool) -> ModelGraph:
    """Returns the graph as tensor parallelism divides it; sequence parallelism divides more."""
    if not sequence:
        return graph
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["units"] = tuple(u.model_copy(update={"divided": u.in_sequence}) for u in graph.units)
    fields["values"] = tuple(v.model_copy(update={"divided": v.in_sequence}) for v in graph.values)
    return ModelGraph(**fields)


def of_rank(model: tuple[ModelGraph, Profile], tp: int, sequence: bool = False) -> tuple[ModelGraph, Profile]:
    """Returns the model of one rank, in bytes; its seconds stay those of one device. `sequence`: sequence
    parallelism.

    The model is unchanged where there is one rank, or where the graph does not say what is divided.
    """
    graph, profile = model
    if tp == 1 or graph.tensor is None:
        return model
    graph = styled(graph, sequence)
    costs = tuple(_cost(c, u, tp) for c, u in zip(profile.units, graph.units, strict=True))
    return _graph(graph, tp), profile.model_copy(update={"units": costs})


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedBytes:
    """Holds what units save for their backward, without inputs of the model, each of shape (n,): what tensor
    parallelism leaves whole, what it divides, and the copies of weights that ranks make for each microbatch.
    """

    whole: NDArray[np.int64]
    divided: NDArray[np.int64]
    casts: NDArray[np.int64]

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, sequence: bool) -> Self:
        """Collects the bytes of a graph that says what is divided."""
        shares = [unit.in_sequence if sequence else unit.divided for unit in graph.units]
        saved = np.array([cost.saved_bytes for cost in profile.units], np.int64)
        divided = np.minimum([share.saved_bytes for share in shares], saved)
        inputs = np.array([unit.saved_input_bytes for unit in graph.units], np.int64)
        casts = np.array([unit.cast_bytes for unit in graph.units], np.int64)
        return cls(saved - divided - inputs, divided, casts)

    def of_rank(self, tp: int) -> NDArray[np.int64]:
        """Returns what one of several ranks saves."""
        return self.whole - (-self.divided // tp) - (-self.casts // tp)


def divides(graph: ModelGraph, tp: int) -> bool:
    """Returns whether `tp` ranks can divide the model; True where the graph does not say. A model by modules
    cannot be divided.
    """
    whole = graph.form == "modules"
    return tp == 1 or (not whole and (graph.tensor is None or tp in graph.tensor.degrees))


def tensor_reasons(
    graph: ModelGraph, tp: int, sequence: bool
) -> Iterator[SequenceParallel | TensorParallel | ModelTensorPlan]:
    """Yields the findings about what tensor parallelism divides, for `Plan.why`; `graph` is of one
    microbatch.
    """
    if tp == 1 or graph.tensor is None:
        return
    if sequence:
        whole, graph = graph, styled(graph, sequence)
        divided, undivided = (sum(unit.saved_bytes for unit in _graph(g, tp).units) for g in (graph, whole))
        yield SequenceParallel(saved_bytes=divided, undivided_saved_bytes=undivided)
    assert graph.tensor is not None
    modules, fractions = graph.tensor.modules, [unit.divided for unit in graph.units]
    yield TensorParallel(
        tp=tp,
        divided_modules=sum(module.style != "whole" for module in modules),
        modules=len(modules),
        weights_share=_graph(graph, tp).parameter_bytes / graph.parameter_bytes,
        reduced_bytes=sum(unit.forward_sum + unit.backward_sum for unit in fractions),
        gathered_bytes=sum(unit.forward_gather + unit.backward_gather for unit in fractions),
    )
    if graph.tensor.hints:
        yield ModelTensorPlan(hints=graph.tensor.hints)


def _graph(graph: ModelGraph, tp: int) -> ModelGraph:
    names = {name for unit in graph.units for name in unit.divided.parameters}
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["units"] = tuple(_unit(unit, tp) for unit in graph.units)
    fields["values"] = tuple(_value(value, tp) if value.divided else value for value in graph.values)
    fields["parameters"] = tuple(_weight(p, tp) if p.name in names else p for p in graph.parameters)
    return ModelGraph(**fields)


def _unit(unit: Unit, tp: int) -> Unit:
    names = ("workspace_bytes", "backward_workspace_bytes", "flops", "moved_bytes")
    divided_sizes = {name: _left(unit, getattr(unit, name), tp) for name in names}
    saved = unit.saved_bytes - unit.divided.saved_bytes + share(unit.divided.saved_bytes, tp)
    saved += _casts(unit, tp)
    divided_sizes["backward_workspace_bytes"] += unit.divided.again_bytes
    return unit.model_copy(update={**divided_sizes, "saved_bytes": saved, "cast_bytes": 0})


def _casts(unit: Unit, tp: int) -> int:
    """Returns the copies of weights that autocast makes on one rank for each microbatch."""
    return share(unit.cast_bytes, tp)


def _cost(cost: UnitCost, unit: Unit, tp: int) -> UnitCost:
    divided = min(unit.divided.saved_bytes, cost.saved_bytes)
    saved = cost.saved_bytes - divided + share(divided, tp) + _casts(unit, tp)
    work = _left(unit, cost.workspace_bytes, tp)
    return cost.model_copy(update={"saved_bytes": saved, "workspace_bytes": work})


def _left(unit: Unit, size: int, tp: int) -> int:
    divided = int(size * unit.divided.work)
    return size - divided + share(divided, tp)


def _value(value: Value, tp: int) -> Value:
    divided_sizes = {name: share(getattr(value, name), tp) for name in ("size_bytes", "storage_bytes")}
    return value.model_copy(update=divided_sizes)


def _weight(weight: Parameter, tp: int) -> Parameter:
    part = {"shape": (share(weight.numel, tp),), "size_bytes": share(weight.size_bytes, tp)}
    return weight.model_copy(update={**part, "whole": weight.shape})


def share(size: int, tp: int) -> int:
    """Returns the largest of `tp` shares."""
    return -(-size // tp)
