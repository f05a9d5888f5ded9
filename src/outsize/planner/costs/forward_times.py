"""Problem: how long does a forward of a batch take through stages, and how long one more token?

    batch    m microbatches through a chain of machines, which are stages and the links between them: the sum
             over machines, and m - 1 times the slowest (a flow shop of equal jobs, exact)
    token    the ops of a prompt of T tokens with 1 / T of their work. A product reads its whole weight for
             it, an embedding its row, and attention reads the whole cache. Stages wait for each other

The seconds of an op are those of the roofline. A host that launches op by op is slower than the devices for
one token; its seconds were calibrated on training, so they are an upper end, and the devices' a lower one.
Sources: Johnson, Naval Research Logistics 1(1), 1954, for equal jobs; the memory bound of decoding, Pope et
al., arXiv 2211.05102, sec. 2.1. Deviations: sampling, and growth of the cache by copying, are not counted; a
mixture of experts reads all experts; messages over a stage arrive with those of the stages between.
Complexity: O(units).
Oracle: tests/unit/planner/costs/test_forward_times.py plays the stages and adds the bytes up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from outsize.ir.cluster import Cluster
from outsize.ir.graph import CONVOLUTIONS, MATMULS, ModelGraph, Unit, Work
from outsize.ir.hardware.devices import Device
from outsize.ir.profile import Profile
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.roofline import host_blocks, host_seconds, seconds
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.costs.unit_times import UnitSeconds


def batch_s(
    graph: ModelGraph, profile: Profile, bounds: Sequence[int], cluster: Cluster, microbatches: int
) -> float:
    """Returns the seconds in which all microbatches have passed the stages, one on each device in order."""
    stages = [sum(u.forward_s for u in profile.units[a:b]) for a, b in pairwise(bounds)]
    machines = [*stages, *_links_s(graph, bounds, cluster, share=1.0)]
    return sum(machines) + (microbatches - 1) * max(machines)


def token_s(graph: ModelGraph, bounds: Sequence[int], cluster: Cluster) -> tuple[float, float] | None:
    """Returns the seconds for one more token of every sequence, from a prompt of `graph.cached_tokens`: of
    the devices, and with their host. None where nothing is cached.
    """
    if not graph.cached_tokens:
        return None
    links_s = sum(_links_s(graph, bounds, cluster, 1 / graph.cached_tokens))
    device_s, eager_s = _decoded_s(graph, cluster.devices[0])
    return device_s + links_s, eager_s + links_s


def _decoded_s(graph: ModelGraph, device: Device) -> tuple[float, float]:
    """Returns the seconds of all units for one token, without and with their host."""
    curves = default_of(device)
    works = [tuple(_decoded(graph, unit)) for unit in graph.units]
    reads_s = device.bytes_per_s * curves.memory["attention"].peak
    busy = [
        seconds(own, device, curves) + cached / reads_s
        for own, cached in zip(works, graph.cache_bytes, strict=True)
    ]
    device_s = UnitSeconds.from_rows([(each, 0.0, 0.0) for each in busy])
    host_s = host_seconds([(own, (), ()) for own in works], device)
    eager_s = device_s.behind_host(host_s, host_blocks(graph), curves.lateness(1))
    return float(device_s.forward.sum()), float(eager_s.forward.sum())


def _decoded(graph: ModelGraph, unit: Unit) -> Iterator[Work]:
    """Yields the works of a unit for one token of each sequence."""
    weights = sum(graph.parameter_of[name].size_bytes for name in unit.parameters)
    tokens = graph.cached_tokens
    for work in unit.forward:
        whole = min(weights, work.moved_bytes) if work.family in MATMULS | CONVOLUTIONS else 0
        moved = whole + (work.moved_bytes - whole) // tokens
        own = {"flops": work.flops // tokens, "instructions": work.instructions // tokens}
        yield work.model_copy(update={"moved_bytes": moved, **own})


def _links_s(graph: ModelGraph, bounds: Sequence[int], cluster: Cluster, share: float) -> Iterator[float]:
    """Yields the seconds of each message of a microbatch to the next stage, of which a share is sent."""
    for (source, destination), size in edges_between(graph, bounds).forward.items():
        if destination == source + 1:
            yield cluster.link(source, destination).seconds(round(size * share))
