"""Finds the numbers of nodes that a run can have: it is planned again for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Unpack

from torch import nn

from outsize.api.elastic import REFUSALS, request_like
from outsize.api.options import OutlookOptions, reads_options
from outsize.api.planning import Args, Kwargs, plan_case
from outsize.api.problem import Profiler, adapted_case, asked_in, asked_of, cluster_of
from outsize.api.records import OF_A_SEARCH
from outsize.errors import BadOption, BadPlan, OutsizeError, UnsupportedPlan
from outsize.ir.answers.job import JobRequest, JobSize, JobSizeLeftOut
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan

_Answer = Callable[[int], Plan]


@reads_options(OutlookOptions)
def job_request(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    nodes: Sequence[int],
    **options: Unpack[OutlookOptions],
) -> JobRequest:
    """Returns the numbers of nodes, of those in `nodes`, that have a plan, and why the others have none.

    `cluster` gives the devices of one node, or several such nodes; by default it is that of `plan`. The most
    nodes that fit are planned by the options, which are those of `plan`, unless a `plan` is given. All others
    are planned as an elastic run plans them: for the same batch, and where that plan keeps the bits of one
    device, for the same microbatches and on an exact layout where one fits. Raises BadOption, as `plan`, and
    the error of the fewest nodes where no number of them has a plan.
    """
    asked, given = asked_in(options), options.get("plan")
    asked.insist_on_none("job_request", OF_A_SEARCH, "leave it out: outsize.plan follows it")
    case, profiler = adapted_case(model, args, kwargs, options, asked), Profiler.of(asked)
    node = node_of(cluster_of(asked.cluster or ("local" if given is None else given.cluster)))
    request = asked_of(case, asked) if given is None else request_like(given)

    def planned(request: PlanRequest) -> _Answer:
        return lambda count: _runs(plan_case(case, request, with_nodes(node, count), profiler).plan)

    first = _given(given, node) if given is not None else _first(nodes, planned(_fills(request)))
    like = _fills(request_like(first) if given is not None else request)
    ways = [planned(way) for way in _ways(like, first)]
    made = {first.axes.world_size // len(node.devices): first}
    return _request(first, node, nodes, lambda count: made.get(count) or _first_way(ways, count))


def job_request_of_plans(plans: Sequence[Plan], nodes: Sequence[int], cluster: str | None) -> JobRequest:
    """Returns the numbers of nodes that these plans are for, out of `nodes`.

    `cluster` gives the devices of one node; by default it is that of the first plan. Raises BadPlan for plans
    of several models, and BadOption where none is for one of these numbers.
    """
    first = plans[0]
    node = node_of(cluster_of(cluster or first.cluster))
    each = len(node.devices)
    other = next((plan for plan in plans if plan.fingerprint != first.fingerprint), None)
    if other is not None:
        raise BadPlan(
            "the plans are for several models",
            numbers=f"{first.model} ({first.fingerprint}), {other.model} ({other.fingerprint})",
            next_step="one --plan for each number of nodes, all of one model",
        )
    by_nodes = {plan.axes.world_size // each: plan for plan in plans if plan.axes.world_size % each == 0}

    def planned(count: int) -> Plan:
        if count in by_nodes:
            return _runs(by_nodes[count])
        raise BadOption(
            f"no plan is given for {count * each} devices",
            numbers=f"plans for {', '.join(str(plan.axes.world_size) for plan in plans)}",
            next_step=f"outsize plan MODEL --cluster {with_nodes(node, count).name} --out FILE, then "
            "--plan FILE, or --model MODEL to plan here",
        )

    return _request(first, node, nodes, planned)


def node_of(cluster: Cluster) -> Cluster:
    """Returns one node of a cluster whose nodes are equal. Raises BadOption where they differ."""
    each = min(cluster.devices_per_node, len(cluster.devices))
    if cluster.parts or cluster.unequal or len(cluster.devices) % each:
        raise BadOption(
            f"a job has equal nodes, and those of {cluster.name} differ",
            numbers=f"{len(cluster.devices)} devices on {cluster.nodes} nodes",
            next_step="--cluster 8xh100-80gb, the devices of one node",
        )
    if cluster.nodes == 1:
        return cluster
    name = cluster.name.partition("x")[2] if cluster.name.startswith(f"{cluster.nodes}x") else cluster.name
    return cluster.model_copy(update={"name": name, "devices": cluster.devices[:each]})


def with_nodes(node: Cluster, count: int) -> Cluster:
    """Returns a cluster of `count` such nodes."""
    if count == 1:
        return node
    each = len(node.devices)
    devices = [
        node.devices[rank % each].model_copy(
            update={"name": f"{node.devices[0].name.partition(':')[0]}:{rank}"}
        )
        for rank in range(count * each)
    ]
    name = f"{count}x{node.name}"
    return node.model_copy(update={"name": name, "devices": tuple(devices), "devices_per_node": each})


def _given(plan: Plan, node: Cluster) -> Plan:
    """Returns the plan, if it fills nodes. Raises BadOption and UnsupportedPlan."""
    if plan.axes.world_size % len(node.devices):
        raise BadOption(
            "the plan does not fill its nodes",
            numbers=f"{plan.axes.world_size} devices, {len(node.devices)} on a node ({node.name})",
            next_step="--cluster with the devices of one node, such as 8xh100-80gb",
        )
    return _runs(plan)


def _runs(plan: Plan) -> Plan:
    plan.check_runs()
    return plan


def _fills(request: PlanRequest) -> PlanRequest:
    return request.model_copy(update={"every_device": True})


def _first(nodes: Sequence[int], planned: _Answer) -> Plan:
    """Returns the plan for the most nodes that have one; raises the error of the fewest if none has."""
    refused: OutsizeError | None = None
    for count in sorted(nodes, reverse=True):
        try:
            return planned(count)
        except (*REFUSALS, UnsupportedPlan) as error:
            refused = error
    assert refused is not None
    raise refused


def _ways(request: PlanRequest, first: Plan) -> Iterator[PlanRequest]:
    """Yields what is asked for at other numbers of nodes: first what keeps the bits, where `first` does."""
    if first.bit_identical and not request.has_group_axes:
        total = first.microbatches * first.axes.replicas
        yield request.model_copy(update={"exact": True, "microbatches": total, "stages": None})
    if not request.exact:
        yield request


def _first_way(ways: Iterable[_Answer], count: int) -> Plan:
    refused: OutsizeError | None = None
    for way in ways:
        try:
            return way(count)
        except (*REFUSALS, UnsupportedPlan) as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _request(first: Plan, node: Cluster, nodes: Sequence[int], planned: _Answer) -> JobRequest:
    """Returns the request whose sizes are the plans for these nodes."""
    sizes, left_out = list[JobSize](), list[JobSizeLeftOut]()
    last: OutsizeError | None = None
    for count in sorted(set(nodes)):
        try:
            size = JobSize.of(planned(count), count)
            if size is None:
                raise BadPlan(
                    f"the plan for {count * len(node.devices)} devices has no prediction",
                    next_step="outsize plan MODEL --check plan.json --out plan.json",
                )
            sizes.append(size)
        except (*REFUSALS, UnsupportedPlan, BadPlan) as error:
            last = error
            left_out.append(
                JobSizeLeftOut(nodes=count, code=error.code, what=error.what, numbers=error.numbers)
            )
    if not sizes:
        assert last is not None
        raise last
    return JobRequest(
        model=first.model,
        batch_size=first.batch_size,
        node=node.name,
        kind=node.devices[0].kind,
        devices_per_node=len(node.devices),
        sizes=tuple(sizes),
        left_out=tuple(left_out),
    )
