"""Problem: what does a stage made of the units first..end-1 cost, for all runs of units at once?

Every table is indexed `[first, end]`, 0 <= first < end <= n; below the diagonal it means nothing.
What a run costs must not depend on the other cuts, or a dynamic program over runs would not be exact.
For the law of edges.py this holds of all that a stage *receives*, and of each flow counted once:

    received       flows made before `first`, used inside             one message each, from the owner
    gradient_out   those of them with a gradient                      one message each, whoever is before
    sent           flows made inside, used at `end` or later          one tensor, however many messages
    gradient_in    flows with a gradient, touched inside and used     one message each: the sum of all
                   at `end` or later                                  later users arrives threaded

    waiting        gradients that wait for their weights' turn        between the halves of a backward

What the microbatch that acts holds at its worst moment (forward, backward, first_backward) is walk.py's. One
half of a backward frees nothing and holds `halved` beside.

What depends on the other cuts, and is therefore no part of a table, is the number of messages in which a
sender ships one tensor, and the rank at the other end of an edge that skips stages.

Method: each flow adds its bytes at the few places of a table where it starts to count, then one
cumulative sum per table. Complexity: O(n^2 + users of all flows) time and memory.
Oracle: tests/unit/planner/test_ranges.py sums `edges_between` for every run of random graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Final, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from outsize.errors import ModelMismatch
from outsize.ir.graph import ModelGraph, Parameter
from outsize.ir.profile import Profile
from outsize.planner.edges import Flow, flows
from outsize.planner.optimizer import OptimizerBytes, Style, style_of
from outsize.planner.walk import UnitBytes, Walk

Bytes = NDArray[np.int64]
# What only a backward in two halves holds.
_HALVES: Final = ("waiting", "halved")
Seconds = NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Tables of shape (n + 1, n + 1): bytes per microbatch, or bytes for good (weights and states).

    Among the weights are buffers, among the optimizer's bytes master copies, among what is saved `small`
    storages. `away`: what is on the host while it waits for its backward; it is not among what is saved.
    """

    compute_s: Seconds
    weights: Bytes
    buffers: Bytes
    replicas: Bytes
    gradients: Bytes
    optimizer: Bytes
    master: Bytes
    update: Bytes
    inputs: Bytes
    saved: Bytes
    small: Bytes
    away: Bytes
    twice: Bytes
    again: Bytes
    forward: Bytes
    backward: Bytes
    first_backward: Bytes
    waiting: Bytes
    halved: Bytes
    received: Bytes
    sent: Bytes
    gradient_in: Bytes
    gradient_out: Bytes

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> Self:
        """Tables of a graph with its profile; ModelMismatch when they do not belong together."""
        check_profile(graph, profile)
        n, everything, costs = len(graph.units), flows(graph), profile.units
        values = [f for f in everything if not f.step]
        backward = [f for f in everything if f.gradient]
        owned = _owned(graph, optimizer)
        units = UnitBytes(
            saved=_saved(graph, profile),
            workspace=np.array([c.workspace_bytes for c in costs], np.int64),
            gradients=owned.gradients,
            rising=np.array([u.backward_workspace_bytes for u in graph.units], np.int64),
            alone=np.array([sum(w.launches for w in u.forward) <= 1 for u in graph.units]),
        )
        walk = Walk.of(graph, units)
        return cls(
            compute_s=_spans(np.array([c.forward_s + c.backward_s for c in costs])),
            buffers=_spans(_buffers(graph)),
            replicas=_arriving(n, (f for f in everything if f.step)),
            inputs=np.full((n + 1, n + 1), graph.input_bytes, np.int64),
            saved=_spans(units.saved),
            small=_spans(np.minimum([u.saved_small_bytes for u in graph.units], units.saved)),
            away=np.zeros((n + 1, n + 1), np.int64),
            twice=walk.twice,
            again=walk.again,
            forward=walk.forward,
            backward=walk.backward,
            first_backward=walk.first_backward,
            waiting=_spans(np.array([u.waiting_bytes for u in graph.units], np.int64)),
            halved=largest(units.rising),
            received=_arriving(n, values),
            sent=_leaving(n, values),
            gradient_in=_returning(n, backward),
            gradient_out=_arriving(n, backward),
            **_kept_tables(graph, profile, optimizer),
        )

    def under(self, graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> Self:
        """The same tables under another optimizer that keeps weights and gradients as the first does."""
        return replace(self, **_state_tables(graph, profile, optimizer, _owned(graph, optimizer)))

    def recomputed(self) -> Self:
        """What units save is there for one microbatch at a time, while its backward computes it anew.

        That includes the values sent, which are there from its forward: exact while the last unit goes back,
        an upper bound before.
        """
        nothing = np.zeros_like(self.saved)
        return replace(
            self,
            saved=nothing,
            twice=nothing,
            again=nothing,
            backward=self.backward + self.again,
            first_backward=self.first_backward + self.again,
        ).undivided()

    def offloaded(self) -> Self:
        """What is saved goes to the host; small storages stay, and what is received or sent."""
        small = np.minimum(self.small, self.saved)
        away = np.maximum(self.saved - self.twice - small, 0)
        return replace(self, saved=small, twice=np.zeros_like(small), away=away).undivided()

    def undivided(self) -> Self:
        """Of stages whose backward is in one piece also where it is asked for in two."""
        whole = np.maximum(self.backward, self.first_backward)
        return replace(self, waiting=np.zeros_like(self.saved), halved=whole)

    def bare(self) -> Self:
        """Never more than these, and never less for more units: without what crosses the ends of a run."""
        nothing = np.zeros_like(self.saved)
        crossing = ("replicas", "received", "sent", "gradient_in", "gradient_out", "twice", "update")
        return replace(
            self,
            forward=self.saved,
            backward=self.saved + self.gradients,
            first_backward=self.saved,
            **dict.fromkeys((*crossing, *_HALVES), nothing),
        )

    @property
    def units(self) -> int:
        """Number of units, n."""
        return len(self.saved) - 1

    def hollow(self) -> Self:
        """What there is at least whatever is recomputed: no microbatch keeps or holds anything inside."""
        nothing = np.zeros_like(self.saved)
        gone = dict.fromkeys(("saved", "twice", "again", "forward", "first_backward", *_HALVES), nothing)
        return replace(self, **gone, backward=self.gradients)

    def only(self, first: int, end: int) -> Self:
        """The same tables with this one run left, each of shape ()."""
        return self.at((first, end, ...))

    def at(self, places: tuple[Any, ...]) -> Self:
        """Of some runs: first units, and ends."""
        return replace(self, **{f.name: getattr(self, f.name)[places] for f in fields(self)})


def bare_rows(
    graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes, *, saves: bool
) -> Callable[[int], Ranges]:
    """First unit -> that row of `Ranges.bare()`, in O(n); `saves` is off where all is recomputed."""
    parts = bare_units(graph, profile, optimizer)
    parts["saved"] *= saves
    del parts["update"]
    prefixes = {name: np.append(0, np.cumsum(part)) for name, part in parts.items()}
    nothing = dict.fromkeys((f.name for f in fields(Ranges)), np.zeros(len(graph.units) + 1, np.int64))
    nothing["inputs"] = np.full(len(graph.units) + 1, graph.input_bytes)

    def row(first: int) -> Ranges:
        held = {name: prefix - prefix[first] for name, prefix in prefixes.items()}
        acting = {"forward": held["saved"], "first_backward": held["saved"]}
        return Ranges(**{**nothing, **held, **acting, "backward": held["saved"] + held["gradients"]})

    return row


def bare_units(graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> dict[str, Bytes]:
    """What single units hold, each of shape (n,), without what comes and goes.

    Temporaries of an optimizer that does not go tensor by tensor: those of a unit come on top of the others'.
    """
    owned, buffers = _owned(graph, optimizer), _buffers(graph)
    return {
        "weights": owned.weights + buffers,
        "buffers": buffers,
        "gradients": owned.gradients,
        "optimizer": owned.states + owned.masters,
        "master": owned.masters,
        "saved": _saved(graph, profile),
        "update": _together(graph, optimizer) if style_of(profile.device) == "foreach" else 0 * buffers,
    }


def check_profile(graph: ModelGraph, profile: Profile) -> None:
    """Raise ModelMismatch unless the profile has one cost for each unit of this graph, in order."""
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
    """Per unit: bytes of the weights that it owns, of gradients, states, master copies."""

    weights: Bytes
    gradients: Bytes
    states: Bytes
    masters: Bytes


def owned_gradients(graph: ModelGraph, optimizer: OptimizerBytes) -> Bytes:
    """Of shape (n,): gradients of the weights that each unit owns."""
    return _owned(graph, optimizer).gradients


def _owned(graph: ModelGraph, optimizer: OptimizerBytes) -> _Owned:
    weights, gradients, states, masters = (np.zeros(len(graph.units), np.int64) for _ in range(4))
    for owner, parameter in _owners(graph):
        held = optimizer.held(parameter)
        weights[owner] += held.weight
        gradients[owner] += held.gradient
        states[owner] += held.state
        masters[owner] += held.master
    return _Owned(weights, gradients, states, masters)


def _owners(graph: ModelGraph) -> Iterator[tuple[int, Parameter]]:
    """Parameters that are used, each with the unit that owns it, in the optimizer's order."""
    owners = graph.owner_of
    return ((owners[p.name], p) for p in graph.parameters if p.name in owners)


def _kept_tables(graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes) -> dict[str, Bytes]:
    """What is there for good, and gradients."""
    owned = _owned(graph, optimizer)
    return {
        "weights": _spans(owned.weights + _buffers(graph)),
        "gradients": _spans(owned.gradients),
        "master": _spans(owned.masters),
        **_state_tables(graph, profile, optimizer, owned),
    }


def _state_tables(
    graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes, owned: _Owned
) -> dict[str, Bytes]:
    """What the kind of optimizer decides."""
    return {
        "optimizer": _spans(owned.states + owned.masters),
        "update": _update(graph, optimizer, style_of(profile.device)),
    }


def _buffers(graph: ModelGraph) -> Bytes:
    return np.array([u.buffer_bytes for u in graph.units], np.int64)


def _saved(graph: ModelGraph, profile: Profile) -> Bytes:
    """Without the batch, which is there for the whole step whatever is saved of it."""
    inputs = np.array([u.saved_input_bytes for u in graph.units], np.int64)
    return np.array([c.saved_bytes for c in profile.units], np.int64) - inputs


def _update(graph: ModelGraph, optimizer: OptimizerBytes, style: Style) -> Bytes:
    """Temporaries of an optimizer step: of all tensors together, or of the worst pair of neighbours."""
    if style == "foreach":
        return _spans(_together(graph, optimizer))
    temporaries = np.zeros(len(graph.units), np.int64)
    trained = [(owner, p) for owner, p in _owners(graph) if p.trainable]
    for (_, before), (owner, parameter) in pairwise([*trained[:1], *trained]):
        pair = optimizer.step_bytes([before, parameter], style)
        temporaries[owner] = max(temporaries[owner], pair)
    return largest(temporaries)


def _together(graph: ModelGraph, optimizer: OptimizerBytes) -> Bytes:
    """Of all tensors of each unit."""
    temporaries = np.zeros(len(graph.units), np.int64)
    for owner, parameter in ((owner, p) for owner, p in _owners(graph) if p.trainable):
        temporaries[owner] += optimizer.step_bytes([parameter], "foreach")
    return temporaries


def _spans(per_unit: NDArray[Number]) -> NDArray[Number]:
    """Sum over the units first..end-1 for all runs."""
    prefix = np.zeros(len(per_unit) + 1, per_unit.dtype)
    prefix[1:] = np.cumsum(per_unit)
    return np.subtract(prefix, prefix[:, None])


def largest(per_unit: Bytes) -> Bytes:
    """Maximum over the units first..end-1 for all runs; zero for empty ones."""
    size = len(per_unit) + 1
    table = np.zeros((size, size), np.int64)
    table[:-1, 1:] = np.triu(np.broadcast_to(per_unit, (size - 1, size - 1)))
    return np.maximum.accumulate(table, axis=1)


def _arriving(n: int, crossing: Iterable[Flow]) -> Bytes:
    """Made before `first`, used inside: a flow starts to count when its next use is inside."""
    table = np.zeros((n + 1, n + 1), np.int64)
    for flow in crossing:
        for before, use in pairwise((flow.producer, *flow.consumers)):
            table[before + 1 : use + 1, use + 1] += flow.size_bytes
    return np.cumsum(table, axis=1, out=table)


def _leaving(n: int, crossing: Iterable[Flow]) -> Bytes:
    """Made inside, used at `end` or later."""
    table = np.zeros((n + 1, n + 1), np.int64)
    for flow in crossing:
        table[flow.producer, flow.producer + 1 : flow.consumers[-1] + 1] += flow.size_bytes
    return _from_below(table)


def _returning(n: int, backward: Iterable[Flow]) -> Bytes:
    """Touched inside, used at `end` or later: counts when the last touch before `end` is inside."""
    table = np.zeros((n + 1, n + 1), np.int64)
    for flow in backward:
        for touch, after in pairwise((flow.producer, *flow.consumers)):
            table[touch, touch + 1 : after + 1] += flow.size_bytes
    return _from_below(table)


def _from_below(table: Bytes) -> Bytes:
    """Sum of the rows first, first + 1, ... for every first."""
    return np.cumsum(table[::-1], axis=0)[::-1]
