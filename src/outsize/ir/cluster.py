"""Describes a cluster: devices in rank order and the links between them; parsed from a short name.

    CLUSTER = PART{+PART}[:SHARE%][@[NICSx]NETWORK]      PART = [NODESx]COUNTxDEVICE

`2xcpu`, `8xh100-80gb`, `2x8xh100-80gb` (two nodes of eight), `4xv100-32gb+4xa100-40gb` (unequal nodes),
`2x8xh100-80gb@ib400` (one such NIC per device), `2x8xa100@4xib200` (four per node), `2x12GB` (two devices of
12 GB of unknown speed, for which the figures of an RTX 3090 are used), `2x80GB:50%` (half of each device's
memory). Without a network each part has the
one it is usually sold with, and the slowest of them connects the nodes. cluster_file.py reads a cluster from
a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final, Self, final

from pydantic import Field, model_validator

from outsize.errors import BadOption, UnknownDevice
from outsize.errors.words import value_here
from outsize.ir.base import Count, Record, Speed
from outsize.ir.formatting import whole_number
from outsize.ir.hardware.devices import GIB, STAND_IN, TABLE, Device, DeviceKind, kind_named
from outsize.ir.hardware.links import NETWORKS, Link
from outsize.ir.hardware.memory_share import split_share

__all__ = ["GIB", "KINDS", "Cluster", "Device", "Link", "Part", "make_cluster", "parse_cluster"]

KINDS: Final = tuple(TABLE)
KNOWN: Final = tuple(dict.fromkeys(name.split("-")[0] for name in KINDS))
"""The words that names of devices begin with, which are names themselves."""
MAX_DEVICES: Final = 1 << 15


@final
class Part(Record):
    """Describes equal nodes: the devices in all, the devices of each node, and those that the inner link
    joins, which are several nodes in a rack of NVLink switches; None: those of a node.
    """

    devices: Count
    devices_per_node: Count
    inner: Link
    nics_per_node: Count = 1
    devices_per_domain: Count | None = None

    @property
    def domain(self) -> int:
        """Returns the number of devices that the inner link joins."""
        return self.devices_per_domain or self.devices_per_node

    @property
    def nodes(self) -> int:
        """Returns the number of nodes; the last may be smaller."""
        return -(-self.devices // self.devices_per_node)


@final
class Cluster(Record):
    """Describes devices in rank order; `devices_per_node` neighbours are in one machine, and `domain`
    neighbours share the inner link: those of a machine, or `devices_per_domain` where switches of NVLink join
    machines.

    `outer` is one NIC, of which each node has `nics_per_node`. Where nodes differ, `parts` describes them in
    rank order, and `devices_per_node`, `inner`, `nics_per_node` and `devices_per_domain` are those of the
    first part. What a
    node's memory, its disk, and its processors with their memory reach is what a user says of them, or None.
    """

    name: str
    devices: tuple[Device, ...] = Field(min_length=1, max_length=MAX_DEVICES)
    devices_per_node: Count
    inner: Link
    outer: Link
    nics_per_node: Count = 1
    devices_per_domain: Count | None = None
    parts: tuple[Part, ...] = Field(default=(), max_length=MAX_DEVICES)
    host_memory_bytes: int | None = Field(default=None, gt=0, le=2**62)
    disk_bytes_per_s: Speed | None = None
    host_flops_per_s: Speed | None = None
    host_bytes_per_s: Speed | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.parts and sum(part.devices for part in self.parts) != len(self.devices):
            raise ValueError(f"the parts have other devices in all than devices lists ({len(self.devices)})")
        if len({device.name for device in self.devices}) < len(self.devices):
            raise ValueError("two devices have one name")
        return self

    def link(self, rank_a: int, rank_b: int) -> Link:
        """Returns the link between two ranks."""
        if not self.parts:
            return self.inner if rank_a // self.domain == rank_b // self.domain else self.outer
        same = self.domain_of(rank_a) == self.domain_of(rank_b)
        return self.part_of(rank_a).inner if same else self.outer

    @property
    def domain(self) -> int:
        """Returns the number of devices that the inner link joins."""
        return self.devices_per_domain or self.devices_per_node

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return sum(part.nodes for part in self._parts())

    @property
    def unequal(self) -> bool:
        """Returns whether devices are of several kinds or memories."""
        return len({(device.kind, device.memory_bytes) for device in self.devices}) > 1

    @property
    def price_per_hour(self) -> float | None:
        """Returns the price of all devices; None where one of them has none."""
        prices = [device.price_per_hour for device in self.devices]
        return None if None in prices else sum(price for price in prices if price is not None)

    def node_of(self, rank: int) -> int:
        """Returns the number of the node of a rank."""
        nodes, first, part = self._place(rank)
        return nodes + (rank - first) // part.devices_per_node

    def domain_of(self, rank: int) -> tuple[int, int]:
        """Returns which devices the inner link joins to a rank: the nodes before its part, and the number
        within the part.
        """
        nodes, first, part = self._place(rank)
        return nodes, (rank - first) // part.domain

    def part_of(self, rank: int) -> Part:
        """Returns the part of the cluster that a rank's node belongs to."""
        return self._place(rank)[2]

    def _place(self, rank: int) -> tuple[int, int, Part]:
        """Returns the nodes and the ranks before the part of a rank, and the part.

        The result is not cached, because copies of a record may differ.
        """
        nodes = first = 0
        for part in self._parts()[:-1]:
            if rank < first + part.devices:
                return nodes, first, part
            nodes, first = nodes + part.nodes, first + part.devices
        return nodes, first, self._parts()[-1]

    def _parts(self) -> tuple[Part, ...]:
        return self.parts or (self.whole,)

    def shared(self, share: float, name: str) -> Self:
        """Returns the cluster, under this name, with a share of each device's memory."""
        devices = tuple(
            d.model_copy(update={"memory_bytes": max(1, int(share * d.memory_bytes))}) for d in self.devices
        )
        return self.model_copy(update={"name": name, "devices": devices})

    @property
    def whole(self) -> Part:
        """Returns one part with all devices, as if all nodes were equal."""
        return Part(
            devices=len(self.devices),
            devices_per_node=self.devices_per_node,
            inner=self.inner,
            nics_per_node=self.nics_per_node,
            devices_per_domain=self.devices_per_domain,
        )


# -- by name ---------------------------------------------------------------------------------------------

_PART = re.compile(r"^(?:([0-9]{1,18})x)?([0-9]{1,18})x([a-z0-9.\-]+)$")
_SIZE = re.compile(r"^(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)gb$")
# What people put between a count and a kind: `h100x8`, `8 h100`, `8*h100`, `h100:8`.
_WORDS = re.compile(r"[^a-z0-9.\-]+|(?<=\d)x(?=[a-z\d]|$)")
_NETWORK = re.compile(r"^(?:([0-9]{1,6})x)?([a-z]+[0-9]*)$")


@final
class _Spec(Record):
    """Holds one part of a cluster's name."""

    kind: DeviceKind
    nodes: int
    count: int
    memory_bytes: int | None = None


def parse_cluster(text: str) -> Cluster:
    """Parses names such as `2xcpu`, `8xh100-80gb`, `2x8xa100-80gb@ib200`, `4xv100-32gb+4xa100-40gb`,
    `2x12GB`.

    Raises UnknownDevice when a device is not in the table, BadOption when a count, a memory or a share is
    zero or the network is unknown.
    """
    plain, fraction = split_share(text)
    cluster = _parsed(plain)
    return cluster if fraction is None else cluster.shared(fraction, text)


def _parsed(text: str) -> Cluster:
    devices, at, network = text.strip().lower().partition("@")
    specs = [_spec(part, text) for part in devices.split("+")]
    count = sum(spec.nodes * spec.count for spec in specs)
    if count > MAX_DEVICES:
        raise BadOption(
            f"cluster {text!r} has too many devices",
            numbers=f"{count}; at most {MAX_DEVICES}",
            next_step="--cluster 2xcpu",
        )
    return _cluster(text, specs, _network(network, text) if at else None)


def make_cluster(name: str, kind: str, nodes: int, count: int, memory_bytes: int | None = None) -> Cluster:
    """Makes a cluster of `nodes` x `count` equal devices of a known kind; memory overrides the table's."""
    spec = _Spec(kind=TABLE[kind], nodes=nodes, count=count, memory_bytes=memory_bytes)
    return _cluster(name, [spec], None)


def _cluster(name: str, specs: Sequence[_Spec], network: tuple[int | None, Link] | None) -> Cluster:
    nics, outer = network or (None, _slowest(specs))
    parts = tuple(_part(spec, nics, outer) for spec in specs)
    ranks = enumerate(spec for spec in specs for _ in range(spec.nodes * spec.count))
    return Cluster(
        name=name,
        devices=tuple(
            spec.kind.device(f"{spec.kind.torch_device}:{rank}", spec.memory_bytes) for rank, spec in ranks
        ),
        devices_per_node=parts[0].devices_per_node,
        inner=parts[0].inner,
        outer=outer,
        nics_per_node=parts[0].nics_per_node,
        devices_per_domain=parts[0].devices_per_domain,
        parts=parts if len(parts) > 1 else (),
    )


def _part(spec: _Spec, nics: int | None, outer: Link) -> Part:
    """Returns a part; unless the name counts NICs, Ethernet serves a node, and InfiniBand and RoCE
    each GPU.
    """
    nodes = _nodes_of_a_rack(spec)
    shared = spec.kind.family == "cpu" or outer.name.startswith("eth")
    return Part(
        devices=spec.nodes * spec.count,
        devices_per_node=spec.count,
        inner=spec.kind.link,
        nics_per_node=nics or (1 if shared else spec.count),
        devices_per_domain=nodes * spec.count if nodes > 1 else None,
    )


def _nodes_of_a_rack(spec: _Spec) -> int:
    """Returns how many nodes switches of NVLink join, of the same number in each rack.

    Who takes several racks takes equal parts of them: 128 nodes of four GB200 are eight times 16 of a rack's
    18. Where no part of at least half a rack divides the nodes, the last rack is not full.
    """
    most = min((spec.kind.nvlink_domain or 0) // spec.count, spec.nodes)
    parts = (nodes for nodes in range(most, most // 2, -1) if spec.nodes % nodes == 0)
    return next(parts, most)


def _slowest(specs: Sequence[_Spec]) -> Link:
    return min((NETWORKS[spec.kind.network] for spec in specs), key=lambda link: link.bytes_per_s)


def _spec(part: str, text: str) -> _Spec:
    match = _PART.match(part.strip())
    if match is None:
        raise _unknown(text, part)
    nodes, count = int(match[1] or 1), int(match[2])
    if nodes < 1 or count < 1:
        raise BadOption(f"cluster {text!r} has no device", next_step="--cluster 2xcpu")
    size = _SIZE.match(match[3])
    if size is not None:
        return _Spec(kind=TABLE[STAND_IN], nodes=nodes, count=count, memory_bytes=_memory(size[1], text))
    kind = kind_named(match[3])
    if kind is None:
        raise _unknown(text, part)
    return _Spec(kind=kind, nodes=nodes, count=count)


def _memory(gigabytes: str, text: str) -> int:
    memory = int(float(gigabytes) * 1e9)
    if memory < 1:
        what = f"cluster {text!r} has devices without memory"
        raise BadOption(what, numbers=f"{gigabytes} GB", next_step="--cluster 2x12GB")
    return memory


def _network(network: str, text: str) -> tuple[int | None, Link]:
    match = _NETWORK.match(network.strip())
    if match is None or match[2] not in NETWORKS or match[1] == "0":
        raise BadOption(
            f"cluster {text!r} has a network that is not known: {network!r}",
            numbers=f"known networks: {', '.join(NETWORKS)}",
            next_step=f"--cluster {text.partition('@')[0]}@ib400",
        )
    return (int(match[1]) if match[1] else None), NETWORKS[match[2]]


def _unknown(text: str, part: str) -> UnknownDevice:
    """Returns the error for a name, with the cluster that was most likely meant."""
    return UnknownDevice(
        f"cluster {text!r} is not known",
        numbers=f"known devices: {', '.join(KNOWN)}, a size such as 12GB, or local",
        next_step=_meant(part.strip().lower()),
    )


def _meant(part: str) -> str:
    """Returns what to type for a part of a name: its count and its kind of device in our order."""
    here = next(filter(None, (value_here("cluster", word) for word in (part, *_WORDS.split(part)))), None)
    if here is not None:
        return f"--cluster {here}, the devices of this machine, or 8xh100-80gb, others"
    words = [word for word in _WORDS.split(part) if word]
    kinds = [word for word in words if whole_number(word) is None]
    model = next((word for word in words if kind_named(f"rtx{word}")), None)
    counts = [word for word in words if whole_number(word) and word != model]
    count, size = "x".join(counts[:2]) or "2", next(filter(None, map(_SIZE.match, kinds)), None)
    if size is not None:
        return f"--cluster {count}x{size[1]}GB"
    if model is None and not kinds:
        return f"--cluster {count}x24GB, {count} devices by their memory, {count}xh100-80gb, or {count}xcpu"
    named = (f"rtx{model}", *(name for kind in kinds[::-1] for name in (kind, kind.replace("-", ""))))
    known = next(filter(None, map(kind_named, named)), None)
    if known is not None:
        return f"--cluster {count}x{known.name}"
    near = " or ".join(f"{count}x{name}" for name in _nearest(kinds[-1]))
    by_memory = f"{count}x32GB, by the memory of a device that is not in the list"
    own = "or write a file with its figures, as outsize explain E105 shows"
    return f"--cluster {near}, or {by_memory}; {own}" if near else f"--cluster {by_memory}; {own}"


def _nearest(word: str) -> list[str]:
    """Returns up to three kinds whose names are most like a word: by the whole name, then the usual one of
    each first word.
    """
    usual = {name: kind.name for name in KNOWN if (kind := kind_named(name)) is not None}
    whole = difflib.get_close_matches(word, KINDS, n=1, cutoff=0.7) if "-" in word else []
    first = difflib.get_close_matches(word.split("-")[0], KNOWN, n=3, cutoff=0.6)
    return [*dict.fromkeys((*whole, *(usual[name] for name in first)))][:3]
