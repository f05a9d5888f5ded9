"""Problem: what does a stage made of the units first..end-1 need, for all runs of units at once?

Every table is indexed `[first, end]`, 0 <= first < end <= n; entries below the diagonal are meaningless. The
bytes of a run must not depend on the other cuts, or a dynamic program over runs would not be exact. With the
law of costs/stage_edges.py this is true of all that a stage *receives*, and of each flow counted once:

    received       flows made before `first`, used inside             one message each, from the owner
    gradient_out   those of them with a gradient                      one message each, to any earlier stage
    sent           flows made inside, used at `end` or later          one tensor, however many messages
    gradient_in    flows with a gradient, touched inside and used     one message each: the sum of all
                   at `end` or later                                  later users arrives threaded

    between_halves gradients kept until their weights' half           between the halves of a backward

What the microbatch being computed holds at its worst moment (forward, backward, first_backward) comes from
activations.py. One half of a split backward frees nothing and holds `split_backward` in addition.

What depends on the other cuts, and is therefore in no table: the number of messages in which a sender ships
one tensor, and the rank at the other end of an edge that skips stages.

Method: each flow adds its bytes at the few places of a table where it starts to count, then one
cumulative sum per table. Complexity: O(n^2 + users of all flows) time and memory.
Oracle: tests/unit/planner/memory/test_range_tables.py sums `edges_between` for every run of random graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import add
from typing import Any, Final, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from outsize.errors import ModelMismatch
from outsize.ir.graph import ModelGraph, Parameter
from outsize.ir.profile import Profile
from outsize.planner.costs.stage_edges import Flow, flows
from outsize.planner.memory.activations import ActivationTables, UnitBytes
from outsize.planner.memory.optimizer_states import OptimizerBytes, Style, style_of

Bytes = NDArray[np.int64]
# These tables are nonzero only where a backward is split in two halves.
_HALVES: Final = ("between_halves", "split_backward")
Seconds = NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class RangeTables:
    """Holds tables of shape (n + 1, n + 1): bytes per microbatch, or bytes that last (weights and states).

    `weights` includes buffers and `casts`, the copies of weights in autocast's dtype, which exist until the
    optimizer's step; so does `buffers`, since they stay whole where weights are sharded or on the host. Of
    `casts`, `cast_alone` are of weights that one unit uses: these come from the host in place of the weights.
    `trained` is what an optimizer updates of the weights.
    `optimizer` includes master copies, `saved` includes the small storages
    (`saved_small`). `on_host` is what is on the host while a microbatch waits for its backward; it is no part
    of `saved`. `inputs` is what a device holds of one microbatch for the whole step: the batch, and what
    inference returns or caches. `update` is the temporaries of the optimizer's step.
    """

    compute_s: Seconds
    weights: Bytes
    trained: Bytes
    buffers: Bytes
    casts: Bytes
    cast_alone: Bytes
    replicas: Bytes
    gradients: Bytes
    optimizer: Bytes
    master: Bytes
    update: Bytes
    inputs: Bytes
    saved: Bytes
    saved_small: Bytes
    on_host: Bytes
    saved_boundary: Bytes
    saved_sent: Bytes
    forward: Bytes
    backward: Bytes
    first_backward: Bytes
    between_halves: Bytes
    split_backward: Bytes
    received: Bytes
    sent: Bytes
    gradient_in: Bytes
    gradient_out: Bytes

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> Self:
        """Computes the tables of a graph with its profile; raises ModelMismatch if they do not belong
        together.
        """
        check_profile(graph, profile)
        n, all_flows, costs = len(graph.units), flows(graph), profile.units
        values = [f for f in all_flows if not f.step]
        backward = [f for f in all_flows if f.gradient]
        owned = _owned(graph, optimizer)
        units = UnitBytes(
            saved=_saved(graph, profile),
            workspace=np.array([c.workspace_bytes for c in costs], np.int64),
            gradients=owned.gradients,
            backward_workspace=np.array([u.backward_workspace_bytes for u in graph.units], np.int64),
            single_op=np.array([sum(w.launches for w in u.forward) <= 1 for u in graph.units]),
        )
        activations = ActivationTables.of(graph, units)
        return cls(
            compute_s=_spans(np.array([c.forward_s + c.backward_s for c in costs])),
            buffers=_spans(_buffers(graph)),
            casts=_spans(_casts(graph)),
            cast_alone=_spans(np.array(graph.cast_alone_bytes, np.int64)),
            replicas=_arriving(n, (f for f in all_flows if f.step)),
            inputs=graph.input_bytes + _spans(np.array([u.lasting_bytes for u in graph.units], np.int64)),
            saved=_spans(units.saved),
            saved_small=_spans(np.minimum([u.saved_small_bytes for u in graph.units], units.saved)),
            on_host=np.zeros((n + 1, n + 1), np.int64),
            saved_boundary=activations.saved_boundary,
            saved_sent=activations.saved_sent,
            forward=activations.forward,
            backward=activations.backward,
            first_backward=activations.first_backward,
            between_halves=_spans(np.array([u.waiting_bytes for u in graph.units], np.int64)),
            split_backward=largest(units.backward_workspace),
            received=_arriving(n, values),
            sent=_leaving(n, values),
            gradient_in=_returning(n, backward),
            gradient_out=_arriving(n, backward),
            **_weight_tables(graph, profile, optimizer),
        )

    def with_optimizer(self, graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> Self:
        """Returns the same tables under another optimizer that keeps weights and gradients alike."""
        return replace(self, **_state_tables(graph, profile, optimizer, _owned(graph, optimizer)))

    def recomputed(self) -> Self:
        """Returns the tables when units are recomputed: what they save exists for one microbatch at a time,
        during its backward.

        This includes the sent values, which exist from the forward on: exact while the last unit goes back,
        an upper bound earlier.
        """
        nothing = np.zeros_like(self.saved)
        return replace(
            self,
            saved=nothing,
            saved_boundary=nothing,
            saved_sent=nothing,
            backward=self.backward + self.saved_sent,
            first_backward=self.first_backward + self.saved_sent,
        ).backward_in_one_piece()

    def offloaded(self) -> Self:
        """Returns the tables when saved tensors go to the host; small storages and boundary values stay on
        the device.
        """
        small = np.minimum(self.saved_small, self.saved)
        away = np.maximum(self.saved - self.saved_boundary - small, 0)
        return replace(
            self, saved=small, saved_boundary=np.zeros_like(small), on_host=away
        ).backward_in_one_piece()

    def backward_in_one_piece(self) -> Self:
        """Returns the tables of stages whose backward is in one piece even where the schedule splits it."""
        backward = np.maximum(self.backward, self.first_backward)
        return replace(self, between_halves=np.zeros_like(self.saved), split_backward=backward)

    def without_crossing(self) -> Self:
        """Returns a lower bound that never falls when units are added: nothing that crosses the ends of a run
        counts.
        """
        nothing = np.zeros_like(self.saved)
        crossing = ("replicas", "received", "sent", "gradient_in", "gradient_out", "saved_boundary", "update")
        return replace(
            self,
            forward=self.saved,
            backward=self.saved + self.gradients,
            first_backward=self.saved,
            **dict.fromkeys((*crossing, *_HALVES), nothing),
        )

    @property
    def units(self) -> int:
        """Returns the number of units, n."""
        return len(self.saved) - 1

    def without_activations(self) -> Self:
        """Returns a lower bound for any choice of recomputed units: no microbatch saves or holds anything
        inside.
        """
        nothing = np.zeros_like(self.saved)
        zeros = dict.fromkeys(
            ("saved", "saved_boundary", "saved_sent", "forward", "first_backward", *_HALVES), nothing
        )
        return replace(self, **zeros, backward=self.gradients)

    def of_run(self, first: int, end: int) -> Self:
        """Returns the same tables with one run left, each of shape ()."""
        return self.at((first, end, ...))

    def at(self, index: tuple[Any, ...]) -> Self:
        """Returns the tables of some runs, indexed by (first units, ends)."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


def rows_without_crossing(
    graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes, *, saves: bool
) -> Callable[[int], RangeTables]:
    """Returns a function first unit -> that row of `RangeTables.without_crossing()`, in O(n); `saves` is off
    where everything is recomputed.
    """
    per_unit = bytes_of_units(graph, profile, optimizer)
    per_unit["saved"] *= saves
    del per_unit["update"]
    prefixes = {name: np.append(0, np.cumsum(sizes)) for name, sizes in per_unit.items()}
    nothing = dict.fromkeys((f.name for f in fields(RangeTables)), np.zeros(len(graph.units) + 1, np.int64))
    nothing["inputs"] = np.full(len(graph.units) + 1, graph.input_bytes)

    def row(first: int) -> RangeTables:
        sums = {name: prefix - prefix[first] for name, prefix in prefixes.items()}
        acting = {"forward": sums["saved"], "first_backward": sums["saved"]}
        return RangeTables(**{**nothing, **sums, **acting, "backward": sums["saved"] + sums["gradients"]})

    return row


def bytes_of_units(graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> dict[str, Bytes]:
    """Returns bytes of single units, each array of shape (n,), without what crosses between units.

    Under an optimizer that updates all tensors at once, the temporaries of each unit add up.
    """
    owned, buffers = _owned(graph, optimizer), _buffers(graph)
    return {
        "weights": owned.weights + buffers,
        "trained": owned.trained,
        "buffers": buffers,
        "casts": _casts(graph),
        "cast_alone": np.array(graph.cast_alone_bytes, np.int64),
        "gradients": owned.gradients,
        "optimizer": owned.states + owned.masters,
        "master": owned.masters,
        "saved": _saved(graph, profile),
        "update": _foreach_temporaries(graph, optimizer)
        if style_of(profile.device) == "foreach"
        else 0 * buffers,
    }


def check_profile(graph: ModelGraph, profile: Profile) -> None:
    """Raises ModelMismatch unless the profile has one cost for each unit of this graph, in order."""
    if [u.name for u in graph.units] == [c.name for c in profile.units]:
        return
    raise ModelMismatch(
        f"the profile is not one of {graph.model}",
        numbers=f"{len(profile.units)} units, fingerprint {profile.fingerprint}, against "
        f"{len(graph.units)} units, fingerprint {graph.fingerprint}",
        next_step="outsize plan MODEL without --profile, or measure this model again",
    )


@final
@dataclass(frozen=True, slots=True)
class _Owned:
    """Holds bytes per unit of the weights that it owns, of those that are trained, of their gradients, states
    and master copies.
    """

    weights: Bytes
    trained: Bytes
    gradients: Bytes
    states: Bytes
    masters: Bytes


def owned_gradients(graph: ModelGraph, optimizer: OptimizerBytes) -> Bytes:
    """Returns the gradient bytes of the weights that each unit owns, of shape (n,)."""
    return _owned(graph, optimizer).gradients


def _owned(graph: ModelGraph, optimizer: OptimizerBytes) -> _Owned:
    weights, trained, gradients, states, masters = (np.zeros(len(graph.units), np.int64) for _ in range(5))
    for owner, parameter in _owners(graph):
        held = optimizer.held(parameter)
        weights[owner] += held.weight
        trained[owner] += held.weight if parameter.trainable else 0
        gradients[owner] += held.gradient
        states[owner] += held.state
        masters[owner] += held.master
    return _Owned(weights, trained, gradients, states, masters)


def _owners(graph: ModelGraph) -> Iterator[tuple[int, Parameter]]:
    """Yields the parameters that are used, each with the unit that owns it, in the optimizer's order."""
    owners = graph.owner_of
    return ((owners[p.name], p) for p in graph.parameters if p.name in owners)


def _weight_tables(graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> dict[str, Bytes]:
    """Returns the tables of weights, gradients and optimizer states."""
    owned = _owned(graph, optimizer)
    return {
        "weights": _spans(owned.weights + _buffers(graph)),
        "trained": _spans(owned.trained),
        "gradients": _spans(owned.gradients),
        "master": _spans(owned.masters),
        **_state_tables(graph, profile, optimizer, owned),
    }


def _state_tables(
    graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes, owned: _Owned
) -> dict[str, Bytes]:
    """Returns the tables that depend on the kind of optimizer."""
    return {
        "optimizer": _spans(owned.states + owned.masters),
        "update": _update(graph, optimizer, style_of(profile.device)),
    }


def _buffers(graph: ModelGraph) -> Bytes:
    """Returns the bytes per unit that stay whole beside its parameters."""
    return np.array([u.buffer_bytes + u.cast_bytes for u in graph.units], np.int64)


def _casts(graph: ModelGraph) -> Bytes:
    return np.array([u.cast_bytes for u in graph.units], np.int64)


def _saved(graph: ModelGraph, profile: Profile) -> Bytes:
    """Returns saved bytes per unit without the batch, which exists for the whole step in any case."""
    inputs = np.array([u.saved_input_bytes for u in graph.units], np.int64)
    return np.array([c.saved_bytes for c in profile.units], np.int64) - inputs


def _update(graph: ModelGraph, optimizer: OptimizerBytes, style: Style) -> Bytes:
    """Returns the temporaries of an optimizer step: of all tensors together, or of the worst
    adjacent pair.
    """
    if style == "foreach":
        alone = _per_unit(graph, optimizer.tensor_bytes, max)
        together = _spans(_foreach_temporaries(graph, optimizer))
        return np.maximum(together, largest(alone)) if alone.any() else together
    temporaries = np.zeros(len(graph.units), np.int64)
    trained = [(owner, p) for owner, p in _owners(graph) if p.trainable]
    for (_, before), (owner, parameter) in pairwise([*trained[:1], *trained]):
        pair_bytes = optimizer.step_bytes([before, parameter], style)
        temporaries[owner] = max(temporaries[owner], pair_bytes)
    return largest(temporaries)


def _foreach_temporaries(graph: ModelGraph, optimizer: OptimizerBytes) -> Bytes:
    """Returns per unit the temporaries of all its tensors at once."""
    return _per_unit(graph, optimizer.list_bytes, add)


def owners_update(graph: ModelGraph, optimizer: OptimizerBytes, shards: int) -> Bytes:
    """Returns the temporaries of a step in which owners have whole tensors and the others step their parts,
    of one of `shards` devices.
    """
    together = _spans(-(-_foreach_temporaries(graph, optimizer) // shards))
    return np.maximum(together, largest(_per_unit(graph, optimizer.owner_bytes, max)))


def _per_unit(graph: ModelGraph, of: Callable[[Parameter], int], join: Callable[[int, int], int]) -> Bytes:
    """Returns the bytes of the tensors that each unit owns, joined by a sum or a maximum."""
    joined = np.zeros(len(graph.units), np.int64)
    for owner, parameter in _owners(graph):
        joined[owner] = join(int(joined[owner]), of(parameter))
    return joined


def _spans(per_unit: NDArray[Number]) -> NDArray[Number]:
    """Returns the sum over the units first..end-1 for all runs."""
    prefix = np.zeros(len(per_unit) + 1, per_unit.dtype)
    prefix[1:] = np.cumsum(per_unit)
    return np.subtract(prefix, prefix[:, None])


def largest(per_unit: Bytes) -> Bytes:
    """Returns the maximum over the units first..end-1 for all runs; zero for empty ones."""
    size = len(per_unit) + 1
    table = np.zeros((size, size), np.int64)
    table[:-1, 1:] = np.triu(np.broadcast_to(per_unit, (size - 1, size - 1)))
    return np.maximum.accumulate(table, axis=1)


def _arriving(n: int, crossing: Iterable[Flow]) -> Bytes:
    """Sums the flows made before `first` and used inside: a flow starts to count when its next use
    is inside.
    """
    table = np.zeros((n + 1, n + 1), np.int64)
    for flow in crossing:
        for before, use in pairwise((flow.producer, *flow.consumers)):
            table[before + 1 : use + 1, use + 1] += flow.size_bytes
    return np.cumsum(table, axis=1, out=table)


def _leaving(n: int, crossing: Iterable[Flow]) -> Bytes:
    """Sums the flows made inside and used at `end` or later."""
    table = np.zeros((n + 1, n + 1), np.int64)
    for flow in crossing:
        table[flow.producer, flow.producer + 1 : flow.consumers[-1] + 1] += flow.size_bytes
    return _from_below(table)


def _returning(n: int, backward: Iterable[Flow]) -> Bytes:
    """Sums the flows touched inside and used at `end` or later: each counts when its last touch before `end`
    is inside.
    """
    table = np.zeros((n + 1, n + 1), np.int64)
    for flow in backward:
        for touch, after in pairwise((flow.producer, *flow.consumers)):
            table[touch, touch + 1 : after + 1] += flow.size_bytes
    return _from_below(table)


def _from_below(table: Bytes) -> Bytes:
    """Returns for every `first` the sum of the rows first, first + 1, ..."""
    return np.cumsum(table[::-1], axis=0)[::-1]
