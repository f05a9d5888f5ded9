"""Models what a message costs (Hockney, 1994), for the kinds of wire that a cluster's name can ask for.

A row of the table says what the standard allows in one direction and which share of it large messages reach.

Sources of the peaks: NVIDIA's NVLink page (25 GB/s per link and direction, 20 for the first generation; 4, 6,
12, 18, 18 links of generations 1 to 5, the last at 50 GB/s), PCI-SIG (16 lanes), the InfiniBand roadmap (EDR,
HDR, NDR), IEEE 802.3. Shares: the bus bandwidth of nccl-tests on DGX machines (235 of 300 GB/s on eight A100,
which NCCL's tuning.cc also takes as its bound), perftest on InfiniBand, one TCP stream on Ethernet; orders of
magnitude, to be replaced by `outsize measure --links`. A hop inside a collective starts no kernel, so it is
shorter than a first message. NCCL has three protocols, of which one is quick and two are not as fast: flags
in every 8 or 128 bytes say that data are there (LL, LL128), or a fence does (Simple). Their seconds to start,
of a hop, and shares of the bandwidth are those of NCCL's tuning.cc (rings; LL reaches at most 87.7 GB/s on an
A100). LL128 needs NVLink, at least within nodes. Switches of NVLink 4 add up: nccl-tests report a bus
bandwidth of 480 GB/s for an all_reduce of eight H100, more than a ring's 360, and count 14/8 bytes of it for
each byte of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, final

from outsize.ir.base import Record, Seconds, Speed

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


def _protocols(**hops_us: float) -> Mapping[str, Protocol]:
    free = float("inf")
    known = {"ll": (6.6, 0.5, 87.7e9), "ll128": (14.0, 0.92, free), "simple": (8.4, 1.0, free)}
    return MappingProxyType(
        {
            name: Protocol(start_s=start * 1e-6, hop_s=hop * 1e-6, share=share, most_bytes_per_s=most)
            for name, hop in hops_us.items()
            for start, share, most in (known[name],)
        }
    )


PROTOCOLS: Final[Mapping[Medium, Mapping[str, Protocol]]] = MappingProxyType(
    {
        "nvlink": _protocols(ll=0.6, ll128=1.9, simple=3.4),
        "pcie": _protocols(ll=1.0, simple=5.7),
        "network": _protocols(ll=2.7, ll128=4.0, simple=14.0),
    }
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


def _link(name: str, latency_us: float, peak: float, share: float, hop: float | Medium, source: str) -> Link:
    """Returns a link whose hops take as many us, or as long as the protocols of a medium say."""
    hop_s, medium = (None, hop) if isinstance(hop, str) else (hop * 1e-6, None)
    reached = f"{source}; {peak / 1e9:g} GB/s per direction, {share:.0%} of it reached"
    latency_s, speed = latency_us * 1e-6, peak * share
    return Link(name=name, latency_s=latency_s, bytes_per_s=speed, hop_s=hop_s, medium=medium, source=reached)


LINKS: Final = {
    link.name: link
    for link in (
        _link("loopback", 60, 1.5e9, 1.0, 60, "TCP within a machine, order of magnitude"),
        _link("pcie3", 10, 15.75e9, 0.8, "pcie", "PCIe 3.0 x16"),
        _link("pcie4", 10, 31.5e9, 0.8, "pcie", "PCIe 4.0 x16"),
        _link("pcie5", 10, 63e9, 0.8, "pcie", "PCIe 5.0 x16"),
        _link("nvlink1", 7, 80e9, 0.8, "nvlink", "NVLink 1, 4 links (P100)"),
        _link("nvlink2", 7, 150e9, 0.8, "nvlink", "NVLink 2, 6 links (V100)"),
        _link("nvlink3", 6, 300e9, 0.8, "nvlink", "NVLink 3, 12 links (A100)"),
        _link("nvlink3-8", 6, 200e9, 0.8, "nvlink", "NVLink 3, 8 links (A800)"),
        _link("nvlink4", 6, 450e9, 0.8, "nvlink", "NVLink 4, 18 links (H100, H200)").model_copy(
            update={"switch_bytes_per_s": 480e9 * 8 / 14}
        ),
        _link("nvlink4-8", 6, 200e9, 0.8, "nvlink", "NVLink 4, 8 links (H800)"),
        _link("nvlink5", 6, 900e9, 0.8, "nvlink", "NVLink 5, 18 links (B200)"),
    )
}
"""Kinds of link within a node are listed by name."""

NETWORKS: Final = {
    link.name: link
    for link in (
        _link("ib100", 12, 12.5e9, 0.92, "network", "InfiniBand EDR"),
        _link("ib200", 12, 25e9, 0.92, "network", "InfiniBand HDR"),
        _link("ib400", 12, 50e9, 0.92, "network", "InfiniBand NDR"),
        _link("roce400", 14, 50e9, 0.85, "network", "RDMA over 400 Gb/s Ethernet"),
        _link("eth10", 50, 1.25e9, 0.9, 25, "10 Gb/s Ethernet, TCP"),
        _link("eth25", 40, 3.125e9, 0.8, 25, "25 Gb/s Ethernet, TCP"),
        _link("eth100", 40, 12.5e9, 0.6, 25, "100 Gb/s Ethernet, TCP"),
    )
}
"""Kinds of network between nodes are listed by name; the figures are of one NIC."""
