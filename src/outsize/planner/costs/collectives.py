"""Problem: how long does a collective of some ranks take on the links between them?

On equal links of latency a and bandwidth B, n ranks, S bytes (Thakur, Rabenseifner, Gropp 2005, sec. 4):

    all_reduce    ring  2(n-1) a + 2 (n-1)/n S/B        tree   2 ceil(lg n) a + 2 S/B
                  in switches that add, within a node: 25 us + S/C
    broadcast     tree  ceil(lg n) (a + S/B)            chain  (n-2+k) (a + S/(k B)) in the best k >= 1 pieces
    all_gather, reduce_scatter, all_to_all    ring  (n-1) a + (n-1)/n S/B

S is the whole tensor: what all_reduce takes, all_gather returns, reduce_scatter takes, what each rank holds
for all_to_all. Between m nodes with k ranks each one ring (or tree) runs over both kinds of link and its
bytes move at the slower of them. An all_reduce (and a broadcast) may go by levels instead, where nodes
scatter inside, communicate outside with S/k per rank, and gather inside; neither NCCL nor gloo gathers or
scatters so. A rank has its share of its node's NICs, q B / d for q NICs and d devices: in training all ranks
of a node communicate in their own groups at once. Where NCCL's protocols are known (`Link.medium`), the
fastest of them is taken: a and B are those of the protocol.

Sources: Thakur et al., IJHPCA 19(1), 2005; Patarasuk, Yuan, JPDC 69(2), 2009 (no all_reduce moves fewer bytes
than the ring); Sanders, Speck, Traeff, Parallel Computing 35, 2009 (two trees at once: 2 S/B); NCCL's guide
and tuning.cc (a flat ring enters each node once; protocols; NVLS has a latency of 25 us). Deviations: trees
are as deep within a node as between nodes; no sums in switches between nodes (SHARP), no contention with
other traffic; unequal nodes count as the weakest of them. Symbols: S -> size_bytes, a -> step_s, B ->
bytes_per_s, C -> switch_bytes_per_s. Complexity: O(ranks). Oracle:
tests/unit/planner/costs/test_costs_collectives.py, sums by hand and a ring simulated step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final, Literal, final

from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.links import SWITCH_S, Link, Protocol

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
BY_LEVELS: Final[frozenset[Collective]] = frozenset({"all_reduce", "broadcast"})


def collective_s(kind: Collective, size_bytes: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """Returns the seconds of one collective of `size_bytes` among `ranks`; one rank or no bytes cost nothing.

    Raises BadOption for a rank that the cluster does not have.
    """
    if len(ranks) < 2 or size_bytes == 0:
        return 0.0
    group = _group(ranks, cluster)
    if kind == "all_to_all":
        return group.all_to_all_s(size_bytes)
    flat_s = _fastest_s(group.flat, kind, size_bytes)
    by_levels = kind in BY_LEVELS and group.nodes > 1 and group.per_node > 1
    return min(flat_s, _hierarchical_s(kind, size_bytes, group)) if by_levels else flat_s


@final
@dataclass(frozen=True, slots=True)
class _Wire:
    """Describes n ranks on one kind of link: seconds to start, seconds of all hops round a ring and down a
    tree, and bandwidth.
    """

    n: int
    start_s: float
    ring_s: float
    tree_s: float
    bytes_per_s: float
    switch_bytes_per_s: float | None = None

    @classmethod
    def of(cls, protocol: Protocol, link: Link, n: int, bytes_per_s: float) -> _Wire:
        """Builds a group whose hops all use the same link, of which each rank has so many bytes a second."""
        ring_s, tree_s = (n - 1) * protocol.hop_s, _depth(n) * protocol.hop_s
        reached = protocol.bytes_per_s(bytes_per_s)
        return cls(n, protocol.start_s, ring_s, tree_s, reached, link.switch_bytes_per_s)

    def seconds(self, kind: Collective, size_bytes: float) -> float:
        """Returns the seconds of the faster algorithm."""
        tree_bytes_s = size_bytes / self.bytes_per_s
        ring_bytes_s = tree_bytes_s * (self.n - 1) / self.n
        if kind == "all_reduce":
            sent_s = 2 * min(self.ring_s + ring_bytes_s, self.tree_s + tree_bytes_s)
            if self.switch_bytes_per_s is not None:
                sent_s = min(sent_s, SWITCH_S + size_bytes / self.switch_bytes_per_s)
            return self.start_s + sent_s
        if kind == "broadcast":
            return self.start_s + min(
                self.tree_s + _depth(self.n) * tree_bytes_s, self._chain_s(tree_bytes_s)
            )
        return self.start_s + self.ring_s + ring_bytes_s

    def _chain_s(self, transfer_s: float) -> float:
        hop_s = self.ring_s / (self.n - 1)
        if hop_s == 0:
            return transfer_s  # The limit of infinitely many pieces.
        pieces = max(1.0, sqrt((self.n - 2) * transfer_s / hop_s))
        return (self.n - 2 + pieces) * (hop_s + transfer_s / pieces)


@final
@dataclass(frozen=True, slots=True)
class _Group:
    """Describes ranks by nodes: `per_node` in the fullest, `nic_bytes_per_s` for each rank's share of the
    NICs.
    """

    size: int
    nodes: int
    per_node: int
    inner: Link
    outer: Link
    nic_bytes_per_s: float

    @property
    def within(self) -> list[_Wire]:
        """Returns the ranks of one node, by each protocol."""
        speed = self.inner.bytes_per_s
        return [_Wire.of(p, self.inner, self.per_node, speed) for p in _protocols(self.inner)]

    @property
    def between(self) -> list[_Wire]:
        """Returns one rank of each node, by each protocol."""
        return [_Wire.of(p, self.outer, self.nodes, self.nic_bytes_per_s) for p in _protocols(self.outer)]

    @property
    def flat(self) -> list[_Wire]:
        """Returns all ranks in one ring, which enters and leaves each node once, over all NICs of
        the ranks, by each protocol that both kinds of link have.
        """
        if self.nodes == 1:
            return self.within
        if self.per_node == 1:
            return self.between
        inside, across = _protocols(self.inner, self.outer), _protocols(self.outer, self.inner)
        return [self._ring(*both) for both in zip(inside, across, strict=True)]

    def _ring(self, inside: Protocol, across: Protocol) -> _Wire:
        nics_bytes_per_s = self.nic_bytes_per_s * self.per_node
        return _Wire(
            n=self.size,
            start_s=across.start_s,
            ring_s=(self.nodes - 1) * across.hop_s + (self.size - self.nodes) * inside.hop_s,
            tree_s=_depth(self.nodes) * across.hop_s + (self.per_node - 1) * inside.hop_s,
            bytes_per_s=min(inside.bytes_per_s(self.inner.bytes_per_s), across.bytes_per_s(nics_bytes_per_s)),
        )

    def all_to_all_s(self, size_bytes: int) -> float:
        """Returns the seconds when each rank sends 1 / n to every other one, within and between nodes at
        once.
        """
        inside, across = self.per_node - 1, self.size - self.per_node
        part_bytes = size_bytes / self.size
        return max(
            _exchange_s(self.inner, inside, part_bytes / self.inner.bytes_per_s),
            _exchange_s(self.outer, across, part_bytes / self.nic_bytes_per_s),
        )


def _exchange_s(link: Link, peers: int, each_s: float) -> float:
    """Returns the seconds of exchanges with one peer after the other."""
    start_s = max(0.0, link.latency_s - link.step_s)
    return start_s + peers * (link.step_s + each_s) if peers else 0.0


def _hierarchical_s(kind: Collective, size_bytes: int, group: _Group) -> float:
    """Returns the seconds of the steps inside the nodes and between them, one after the other."""
    if kind == "all_reduce":
        inside: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
        inside_s = sum(_fastest_s(group.within, step, size_bytes) for step in inside)
        return inside_s + _fastest_s(group.between, kind, size_bytes / group.per_node)
    return sum(_fastest_s(wires, kind, size_bytes) for wires in (group.within, group.between))


def _fastest_s(wires: Sequence[_Wire], kind: Collective, size_bytes: float) -> float:
    return min(wire.seconds(kind, size_bytes) for wire in wires)


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
    counts = Counter(map(cluster.node_of, ranks) if cluster.parts else _nodes(ranks, cluster))
    return _Group(
        size=len(ranks),
        nodes=len(counts),
        per_node=max(counts.values()),
        inner=_slowest_inner(ranks, cluster),
        outer=cluster.outer,
        nic_bytes_per_s=_nic_share(ranks, cluster),
    )


def _nodes(ranks: Sequence[int], cluster: Cluster) -> list[int]:
    return [rank // cluster.devices_per_node for rank in ranks]


def _slowest_inner(ranks: Sequence[int], cluster: Cluster) -> Link:
    if not cluster.parts:
        return cluster.inner
    return min((cluster.part_of(rank).inner for rank in ranks), key=lambda link: link.bytes_per_s)


def _nic_share(ranks: Sequence[int], cluster: Cluster) -> float:
    """Returns the bytes per second of one rank's share of its node's NICs; no rank uses more than one."""
    if not cluster.parts:
        shares = {cluster.nics_per_node / cluster.devices_per_node}
    else:
        parts = [cluster.part_of(rank) for rank in ranks]
        shares = {part.nics_per_node / part.devices_per_node for part in parts}
    return cluster.outer.bytes_per_s * min(1.0, *shares)


def _depth(n: int) -> int:
    """Returns the depth of a balanced tree of n ranks, ceil(lg n)."""
    return (n - 1).bit_length()
