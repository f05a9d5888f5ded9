"""Problem: which devices of a priced cluster train the model for the least money per sample?

    money per sample = price of the rented devices x step / samples

A plan's seconds say nothing of what its devices cost, and idle devices of a rented cluster are paid for. So
each part of the cluster that could be rented alone is planned for speed (planning.py), and the part whose
plan costs least is taken: of each run of equal nodes none, all, a half, a quarter and so on. The fastest plan
of the whole cluster is among them. Complexity: a plan for each part, of n equal devices log2(n) + 1. Oracle:
tests/unit/test_cheapest_plan.py plans every part by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, product

from outsize.api.problem import SearchedPlan
from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError, TooFewSamples, TooManyStages
from outsize.ir.answers.ranking import price_per_million
from outsize.ir.cluster import Cluster, Device, Part
from outsize.ir.findings import CheapestDevices
from outsize.ir.plan import Plan


def cheapest(cluster: Cluster, plan_on: Callable[[Cluster], SearchedPlan]) -> SearchedPlan:
    """Returns the plan that costs least per sample, on the devices that have to be rented for it.

    `plan_on` makes the fastest plan of a part. Raises BadOption where a
    device has no price, and what `plan_on` raises for the whole cluster where no part has a plan.
    """
    unpriced = sorted({device.kind for device in cluster.devices if device.price_per_hour is None})
    if unpriced:
        raise BadOption(
            "objective='cost' ranks plans by money, and devices have no price",
            numbers=f"no price for {', '.join(unpriced)} of cluster {cluster.name!r}",
            next_step="price_per_hour for each device in a cluster file, or outsize fit --devices --prices",
        )
    plans, refusals = list[tuple[float, Cluster, SearchedPlan]](), list[OutsizeError]()
    for part in parts_of(cluster):
        try:
            searched = plan_on(part)
        except (BadOption, NoFeasiblePlan, TooFewSamples, TooManyStages) as refused:
            refusals.append(refused)
            continue
        plans.append((_cost(searched.plan, part), part, searched))
    if not plans:
        raise refusals[0]
    price, part, searched = min(plans, key=lambda row: (row[0], len(row[1].devices)))
    fastest = min(plans, key=lambda row: _step_s(row[2].plan))
    found = CheapestDevices(
        devices=len(part.devices),
        of_devices=len(cluster.devices),
        price_per_million=price,
        fastest_devices=len(fastest[1].devices),
        fastest_step_s=_step_s(fastest[2].plan),
        fastest_price_per_million=fastest[0],
    )
    plan = searched.plan
    return replace(searched, plan=plan.model_copy(update={"why": (found, *plan.why)}))


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the parts of a cluster that may be rented alone, the whole one first; each keeps its name."""
    yield cluster
    runs = tuple(_runs(cluster))
    whole = tuple(run.devices for run in runs)
    for counts in product(*map(_counts, whole)):
        if any(counts) and counts != whole:
            yield _part(cluster, runs, counts)


def _runs(cluster: Cluster) -> Iterator[Part]:
    """Yields the runs of nodes that have the same devices, in rank order."""
    first = 0
    for part in cluster.parts or (cluster.whole,):
        devices, size = cluster.devices[first : first + part.devices], part.devices_per_node
        nodes = [devices[at : at + size] for at in range(0, len(devices), size)]
        for _, equal in groupby(nodes, lambda node: [_sort_of(device) for device in node]):
            yield part.model_copy(update={"devices": sum(map(len, equal))})
        first += part.devices


def _sort_of(device: Device) -> tuple[object, ...]:
    return device.kind, device.memory_bytes, device.price_per_hour


def _counts(devices: int) -> list[int]:
    """Returns how many of equal devices may be rented: all, halves, and none."""
    counts = [devices]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    return [*counts, 0]


def _part(cluster: Cluster, runs: tuple[Part, ...], counts: tuple[int, ...]) -> Cluster:
    devices, first, taken = list[Device](), 0, list[Part]()
    for run, count in zip(runs, counts, strict=True):
        devices += cluster.devices[first : first + count]
        first += run.devices
        if count:
            per_node = min(run.devices_per_node, count)
            taken.append(run.model_copy(update={"devices": count, "devices_per_node": per_node}))
    lead = taken[0]
    return cluster.model_copy(
        update={
            "devices": tuple(devices),
            "devices_per_node": lead.devices_per_node,
            "inner": lead.inner,
            "nics_per_node": lead.nics_per_node,
            "devices_per_domain": lead.devices_per_domain,
            "parts": tuple(taken) if len(taken) > 1 else (),
        }
    )


def _step_s(plan: Plan) -> float:
    assert plan.expected is not None, "the search has priced it"
    return plan.expected.step_s


def _cost(plan: Plan, part: Cluster) -> float:
    assert part.price_per_hour is not None, "every device has a price"
    return price_per_million(part.price_per_hour, _step_s(plan), plan.batch_size)
