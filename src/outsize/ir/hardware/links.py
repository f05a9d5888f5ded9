"""Models what a message costs (Hockney, 1994), for the kinds of wire that a cluster's name can ask for.

A row of the table says what the standard allows in one direction and which share of it large messages reach.

Sources of the peaks: NVIDIA's NVLink page (25 GB/s per link and direction, 20 for the first generation; 4, 6,
12, 18, 18 links of generations 1 to 5, the last at 50 GB/s), PCI-SIG (16 lanes), the InfiniBand roadmap (EDR,
HDR, NDR), IEEE 802.3. Shares: the bus bandwidth of nccl-tests on DGX machines (235 of 300 GB/s on eight A100,
which NCCL's tuning.cc also takes as its bound), perftest on InfiniBand, one TCP stream on Ethernet; orders of
magnitude, to be replaced by `outsize measure --links`. A hop inside a collective starts no kernel, so it is
shorter than a first message: the LL128 column of NCCL's tuning.cc (NVLink 1.9 us, PCIe 2.5, network 4.0).
Switches of NVLink 4 add up: nccl-tests report a bus bandwidth of 480 GB/s for an all_reduce of eight H100,
more than a ring's 360, and count 14/8 bytes of it for each byte of the tensor.
"""

from __future__ import annotations

from typing import Final, final

from outsize.ir.base import Record, Seconds, Speed


@final
class Link(Record):
    """Models point-to-point cost: latency_s + bytes / bytes_per_s (Hockney, 1994).

    `hop_s` is the latency of each further hop of a collective that has begun; None means `latency_s`.
    `switch_bytes_per_s` are the bytes of an all_reduce among any number of ranks that switches add up in a
    second (NVLink SHARP); None where they add nothing.
    """

    name: str
    latency_s: Seconds
    bytes_per_s: Speed
    hop_s: Seconds | None = None
    switch_bytes_per_s: Speed | None = None
    source: str = ""

    def seconds(self, size_bytes: int) -> float:
        """Returns the seconds to move `size_bytes` in one message; zero bytes cost nothing."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0

    @property
    def step_s(self) -> float:
        """Returns the latency of one hop within a collective."""
        return self.latency_s if self.hop_s is None else self.hop_s


def _link(name: str, latency_us: float, peak: float, share: float, hop_us: float | None, source: str) -> Link:
    hop_s = None if hop_us is None else hop_us * 1e-6
    reached = f"{source}; {peak / 1e9:g} GB/s per direction, {share:.0%} of it reached"
    return Link(name=name, latency_s=latency_us * 1e-6, bytes_per_s=peak * share, hop_s=hop_s, source=reached)


LINKS: Final = {
    link.name: link
    for link in (
        _link("loopback", 60, 1.5e9, 1.0, None, "TCP within a machine, order of magnitude"),
        _link("pcie3", 10, 15.75e9, 0.8, 2.5, "PCIe 3.0 x16"),
        _link("pcie4", 10, 31.5e9, 0.8, 2.5, "PCIe 4.0 x16"),
        _link("pcie5", 10, 63e9, 0.8, 2.5, "PCIe 5.0 x16"),
        _link("nvlink1", 7, 80e9, 0.8, 1.9, "NVLink 1, 4 links (P100)"),
        _link("nvlink2", 7, 150e9, 0.8, 1.9, "NVLink 2, 6 links (V100)"),
        _link("nvlink3", 6, 300e9, 0.8, 1.9, "NVLink 3, 12 links (A100)"),
        _link("nvlink3-8", 6, 200e9, 0.8, 1.9, "NVLink 3, 8 links (A800)"),
        _link("nvlink4", 6, 450e9, 0.8, 1.9, "NVLink 4, 18 links (H100, H200)").model_copy(
            update={"switch_bytes_per_s": 480e9 * 8 / 14}
        ),
        _link("nvlink4-8", 6, 200e9, 0.8, 1.9, "NVLink 4, 8 links (H800)"),
        _link("nvlink5", 6, 900e9, 0.8, 1.9, "NVLink 5, 18 links (B200)"),
    )
}
"""Kinds of link within a node are listed by name."""

NETWORKS: Final = {
    link.name: link
    for link in (
        _link("ib100", 12, 12.5e9, 0.92, 4, "InfiniBand EDR"),
        _link("ib200", 12, 25e9, 0.92, 4, "InfiniBand HDR"),
        _link("ib400", 12, 50e9, 0.92, 4, "InfiniBand NDR"),
        _link("roce400", 14, 50e9, 0.85, 6, "RDMA over 400 Gb/s Ethernet"),
        _link("eth10", 50, 1.25e9, 0.9, 25, "10 Gb/s Ethernet, TCP"),
        _link("eth25", 40, 3.125e9, 0.8, 25, "25 Gb/s Ethernet, TCP"),
        _link("eth100", 40, 12.5e9, 0.6, 25, "100 Gb/s Ethernet, TCP"),
    )
}
"""Kinds of network between nodes are listed by name; the figures are of one NIC."""
