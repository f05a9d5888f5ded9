"""Problem: how long does communication between devices of a cluster take?

What a collective sends in which hops is a record, ir/hardware/collectives.py:ALGORITHMS; the fastest
algorithm counts. Here these hops and bytes are put on the links of a cluster. Between m nodes with k ranks
each one ring (or tree) runs over both kinds of link and its bytes move at the slower of them. An all_reduce
may go by levels instead, where nodes scatter inside, communicate outside with S/k per rank, and gather
inside. A rank has its share of its node's NICs, q B / d for q NICs and d devices: in training all ranks of
a node communicate in their own groups at once. Where NCCL's protocols are known (`Link.medium`), the
fastest of them is taken: latency and bandwidth are those of the protocol. A message from one rank to
another one takes `Link.seconds`; `messages_s` is the same for tables.

Sources: those of the algorithms; NCCL's guide and tuning.cc (a flat ring enters each node once; protocols;
NVLS has a latency of 25 us). Deviations: trees are as deep within a node as between nodes; no sums in
switches between nodes (SHARP), no contention with other traffic; unequal nodes count as the weakest of
them. Complexity: O(ranks). Oracle: tests/unit/planner/costs/test_costs_collectives.py, sums by hand and a
ring simulated step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.collectives import ALGORITHMS, HOPS, INSIDE_NODES, Algorithm, Collective, Path
from outsize.ir.hardware.links import SWITCH_S, Link, Protocol


def collective_s(kind: Collective, size_bytes: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """Returns the seconds of one collective of `size_bytes` among `ranks`; one rank or no bytes cost nothing.

    Raises BadOption for a rank that the cluster does not have.
    """
    return collectives_among(ranks, cluster)(kind, size_bytes)


def collectives_among(ranks: Sequence[int], cluster: Cluster) -> Callable[[Collective, int], float]:
    """Returns the function kind, bytes -> `collective_s`, of many collectives among the same ranks."""
    group = _group(ranks, cluster) if len(ranks) > 1 else None

    def seconds(kind: Collective, size_bytes: int) -> float:
        if group is None or size_bytes == 0:
            return 0.0
        return min(group.seconds(kind, size_bytes), group.by_levels_s(kind, size_bytes))

    return seconds


def messages_s(link: Link, size_bytes: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns `Link.seconds` of each message of a table."""
    return np.where(size_bytes > 0, link.latency_s + size_bytes / link.bytes_per_s, 0.0)


@final
@dataclass(frozen=True, slots=True)
class _Wire:
    """Describes n ranks on one path: seconds to start, of all hops of a round, and bandwidth."""

    n: int
    start_s: float
    hops_s: float
    bytes_per_s: float

    def seconds(self, algorithm: Algorithm, size_bytes: float) -> float:
        """Returns the seconds of so many bytes."""
        sent_s = algorithm.sent(size_bytes / self.bytes_per_s, self.n)
        return self.start_s + (algorithm.rounds * self.hops_s + sent_s)


@final
@dataclass(frozen=True, slots=True)
class _Group:
    """Describes ranks by nodes: `per_node` in the fullest, `nic_bytes_per_s` for each rank's share of the
    NICs. Machines that switches of NVLink join are one node here.
    """

    size: int
    nodes: int
    per_node: int
    inner: Link
    outer: Link
    nic_bytes_per_s: float

    def seconds(self, kind: Collective, size_bytes: float) -> float:
        """Returns the seconds of the fastest algorithm in which all ranks do the same."""
        return min(_SECONDS[algorithm.path](self, algorithm, size_bytes) for algorithm in ALGORITHMS[kind])

    def by_levels_s(self, kind: Collective, size_bytes: float) -> float:
        """Returns the seconds of the steps inside the nodes and between them, one after the other; infinite
        where there are no two levels, or nobody does the collective so.
        """
        if kind not in INSIDE_NODES or self.nodes == 1 or self.per_node == 1:
            return inf
        inside = replace(self, size=self.per_node, nodes=1)
        between = replace(self, size=self.nodes, per_node=1)
        inside_s = sum(inside.seconds(step, size_bytes) for step in INSIDE_NODES[kind])
        return inside_s + between.seconds(kind, size_bytes / self.per_node)

    def wires(self, path: Path) -> Iterator[_Wire]:
        """Yields all ranks in one ring or tree, which enters and leaves each node once, over all NICs of the
        ranks, by each protocol that all of its links have.
        """
        if self.nodes == 1:
            for protocol in _protocols(self.inner):
                yield _alike(self.size, path, protocol, self.inner.bytes_per_s)
        elif self.per_node == 1:
            for protocol in _protocols(self.outer):
                yield _alike(self.nodes, path, protocol, self.nic_bytes_per_s)
        else:
            within, between = _protocols(self.inner, self.outer), _protocols(self.outer, self.inner)
            for inside, across in zip(within, between, strict=True):
                yield self._mixed(path, inside, across)

    def _mixed(self, path: Path, inside: Protocol, across: Protocol) -> _Wire:
        """Returns all ranks on one path of both kinds of link; within a node it has no branches."""
        hops_inside = HOPS[path](self.size) - HOPS[path](self.nodes) if path == "ring" else self.per_node - 1
        nics_bytes_per_s = self.nic_bytes_per_s * self.per_node
        return _Wire(
            n=self.size,
            start_s=across.start_s,
            hops_s=HOPS[path](self.nodes) * across.hop_s + hops_inside * inside.hop_s,
            bytes_per_s=min(inside.bytes_per_s(self.inner.bytes_per_s), across.bytes_per_s(nics_bytes_per_s)),
        )


def _alike(n: int, path: Path, protocol: Protocol, bytes_per_s: float) -> _Wire:
    """Returns n ranks on equal links, of which each has so many bytes a second."""
    return _Wire(n, protocol.start_s, HOPS[path](n) * protocol.hop_s, protocol.bytes_per_s(bytes_per_s))


def _along_s(group: _Group, algorithm: Algorithm, size_bytes: float) -> float:
    """Returns the seconds along a ring or tree, by the fastest protocol."""
    return min(wire.seconds(algorithm, size_bytes) for wire in group.wires(algorithm.path))


def _in_switches_s(group: _Group, algorithm: Algorithm, size_bytes: float) -> float:
    """Returns the seconds where the switches of one node add up; infinite where none do."""
    speed = group.inner.switch_bytes_per_s if group.nodes == 1 else None
    if speed is None:
        return inf
    start_s = min(protocol.start_s for protocol in _protocols(group.inner))
    return _Wire(group.size, start_s, SWITCH_S, speed).seconds(algorithm, size_bytes)


def _to_each_peer_s(group: _Group, algorithm: Algorithm, size_bytes: float) -> float:
    """Returns the seconds in which each rank sends to one peer after the other, within and between nodes at
    once.
    """
    inside, across = group.per_node - 1, group.size - group.per_node
    peers = ((group.inner, inside, group.inner.bytes_per_s), (group.outer, across, group.nic_bytes_per_s))
    return max(
        _Wire(
            n=group.size,
            start_s=link.plain.start_s,
            hops_s=count * link.step_s,
            bytes_per_s=bytes_per_s * (group.size - 1) / count,
        ).seconds(algorithm, size_bytes)
        for link, count, bytes_per_s in peers
        if count
    )


_SECONDS: Final[Mapping[Path, Callable[[_Group, Algorithm, float], float]]] = MappingProxyType(
    {"ring": _along_s, "tree": _along_s, "switches": _in_switches_s, "pairs": _to_each_peer_s}
)
"""Maps a path to the seconds of an algorithm that takes it, among the ranks of a group."""


def _protocols(link: Link, other: Link | None = None) -> list[Protocol]:
    """Returns the protocols of a link that the other one has, too, in one order for both; a link of which
    none is known has the other's number of its plain one.
    """
    own, others = link.protocols, (other or link).protocols
    if not own:
        return [link.plain] * max(1, len(others))
    return [protocol for name, protocol in own.items() if not others or name in others]


def _group(ranks: Sequence[int], cluster: Cluster) -> _Group:
    if not 0 <= min(ranks) <= max(ranks) < len(cluster.devices):
        raise BadOption(
            f"a collective of ranks {min(ranks)} to {max(ranks)} on cluster {cluster.name!r}",
            numbers=f"which has {len(cluster.devices)} devices",
            next_step="--cluster with more devices",
        )
    counts = Counter(map(cluster.domain_of, ranks) if cluster.parts else _domains(ranks, cluster))
    return _Group(
        size=len(ranks),
        nodes=len(counts),
        per_node=max(counts.values()),
        inner=_slowest_inner(ranks, cluster),
        outer=cluster.outer,
        nic_bytes_per_s=_nic_share(ranks, cluster),
    )


def _domains(ranks: Sequence[int], cluster: Cluster) -> list[int]:
    return [rank // cluster.domain for rank in ranks]


def _slowest_inner(ranks: Sequence[int], cluster: Cluster) -> Link:
    if not cluster.parts:
        return cluster.inner
    return min((cluster.part_of(rank).inner for rank in ranks), key=lambda link: link.bytes_per_s)


def _nic_share(ranks: Sequence[int], cluster: Cluster) -> float:
    """Returns the bytes per second of one rank's share of its node's NICs; no rank uses more than one."""
    if not cluster.parts:
        fractions = {cluster.nics_per_node / cluster.devices_per_node}
    else:
        parts = [cluster.part_of(rank) for rank in ranks]
        fractions = {part.nics_per_node / part.devices_per_node for part in parts}
    return cluster.outer.bytes_per_s * min(1.0, *fractions)
