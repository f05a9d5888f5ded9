"""Models what a message costs (Hockney, 1994), for the kinds of wire that a cluster's name can ask for.

The numbers are in links.json, each row with its origin: what the standard allows in one direction and which
share of it large messages reach; orders of magnitude, to be replaced by `outsize measure --links`. A hop
inside a collective starts no kernel, so it is shorter than a first message. NCCL has three protocols, of
which one is quick and two are not as fast: flags in every 8 or 128 bytes say that data are there (LL,
LL128), or a fence does (Simple). Switches of NVLink 4 add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, final

from outsize.ir.base import Record, Seconds, Speed
from outsize.ir.hardware.collectives import RING_ALL_REDUCE
from outsize.ir.hardware.constants import DataFile

Medium = Literal["nvlink", "pcie", "network"]


@final
class Protocol(Record):
    """Says how a collective moves bytes over one kind of link: seconds until it has begun, of each hop, the
    share of the link's bytes per second that it reaches, and their largest number.
    """

    start_s: Seconds
    hop_s: Seconds
    share: float
    most_bytes_per_s: Speed = float("inf")

    def bytes_per_s(self, link_bytes_per_s: float) -> float:
        """Returns what it reaches of a link."""
        return min(self.share * link_bytes_per_s, self.most_bytes_per_s)


@final
class _LinkRow(NamedTuple):
    """Is a kind of wire: `gb_per_s` is its peak in one direction, of which messages reach `share`. Its hops
    take `hop_us`, or as long as the protocols of its `medium` say.
    """

    name: str
    latency_us: float
    gb_per_s: float
    share: float
    about: str
    origin: str
    hop_us: float | None = None
    medium: Medium | None = None


@final
class _ProtocolRow(NamedTuple):
    medium: Medium
    name: str
    start_us: float
    share: float
    hop_us: float
    origin: str
    most_gb_per_s: float = float("inf")


@final
class _SwitchRow(NamedTuple):
    """Is a kind of link whose switches add up: the bus bandwidth of an all_reduce that nccl-tests report for
    so many devices, and the latency of one.
    """

    link: str
    bus_gb_per_s: float
    devices: int
    latency_us: float
    origin: str


_FILE: Final = DataFile.beside(__file__)
_PROTOCOLS: Final = _FILE.rows("protocols", _ProtocolRow)
_SWITCHES: Final = _FILE.rows("switches", _SwitchRow)


def _protocols(medium: Medium) -> Mapping[str, Protocol]:
    return MappingProxyType(
        {
            row.name: Protocol(
                start_s=row.start_us * 1e-6,
                hop_s=row.hop_us * 1e-6,
                share=row.share,
                most_bytes_per_s=row.most_gb_per_s * 1e9,
            )
            for row in _PROTOCOLS
            if row.medium == medium
        }
    )


PROTOCOLS: Final[Mapping[Medium, Mapping[str, Protocol]]] = MappingProxyType(
    {row.medium: _protocols(row.medium) for row in _PROTOCOLS}
)


@final
class Link(Record):
    """Models point-to-point cost: latency_s + bytes / bytes_per_s (Hockney, 1994).

    `hop_s` is the latency of each further hop of a collective that has begun; None means `latency_s`, or what
    NCCL's protocols have on a `medium`.
    `switch_bytes_per_s` are the bytes of an all_reduce among any number of ranks that switches add up in a
    second (NVLink SHARP); None where they add nothing.
    """

    name: str
    latency_s: Seconds
    bytes_per_s: Speed
    hop_s: Seconds | None = None
    medium: Medium | None = None
    switch_bytes_per_s: Speed | None = None
    source: str = ""

    def seconds(self, size_bytes: int) -> float:
        """Returns the seconds to move `size_bytes` in one message; zero bytes cost nothing."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0

    @property
    def protocols(self) -> Mapping[str, Protocol]:
        """Returns the protocols of collectives by name; none where nothing is known of them."""
        return {} if self.hop_s is not None or self.medium is None else PROTOCOLS[self.medium]

    @property
    def plain(self) -> Protocol:
        """Returns a protocol that starts as a message does and reaches all of the link."""
        return Protocol(start_s=max(0.0, self.latency_s - self.step_s), hop_s=self.step_s, share=1.0)

    @property
    def step_s(self) -> float:
        """Returns the latency of one hop within a collective of large messages, at most a message's."""
        if self.hop_s is not None:
            return self.hop_s
        return min([self.latency_s, *(p.hop_s for name, p in self.protocols.items() if name == "simple")])


def _link(row: _LinkRow) -> Link:
    reached = f"{row.about}; {row.gb_per_s:g} GB/s per direction, {row.share:.0%} of it reached"
    switches = [switch for switch in _SWITCHES if switch.link == row.name]
    return Link(
        name=row.name,
        latency_s=row.latency_us * 1e-6,
        bytes_per_s=row.gb_per_s * 1e9 * row.share,
        hop_s=None if row.hop_us is None else row.hop_us * 1e-6,
        medium=row.medium,
        # nccl-tests count the bytes of a ring for each byte of the tensor, whoever adds up.
        switch_bytes_per_s=next(
            (s.bus_gb_per_s * 1e9 / RING_ALL_REDUCE.sent(1.0, s.devices) for s in switches), None
        ),
        source=reached,
    )


LINKS: Final = {row.name: _link(row) for row in _FILE.rows("links", _LinkRow)}
"""Kinds of link within a node are listed by name."""

NETWORKS: Final = {row.name: _link(row) for row in _FILE.rows("networks", _LinkRow)}
"""Kinds of network between nodes are listed by name; the figures are of one NIC."""

SWITCH_S: Final = _SWITCHES[0].latency_us / 1e6
"""The latency of an all_reduce in switches."""
