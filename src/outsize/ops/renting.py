"""Ranks clusters for a model: on which does it fit, how fast is it there, and what does a sample cost?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final, Unpack

from torch import nn

from outsize.api.options import FitOptions, reads_options
from outsize.api.planning import plan_case
from outsize.api.problem import Profiler, adapted_case, asked_in, asked_of, cluster_of
from outsize.errors import BadOption, NoFeasiblePlan, TooFewSamples, TooManyStages
from outsize.errors.arguments import is_number, shown
from outsize.ir.answers.ranking import ClusterRanking, RankedCluster
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.devices import kind_named
from outsize.planner.evaluate.ranking import refusal
from outsize.planner.fit.from_plan import recompute_of
from outsize.train.measure.training_case import TrainingCase, bare_graph

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# So many devices of a kind are looked at where no number is given.
COUNTS: Final = (1, 2, 4, 8)


@reads_options(FitOptions)
def rank_clusters(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    devices: Sequence[str | Cluster],
    prices: Mapping[str, float] | None = None,
    **options: Unpack[FitOptions],
) -> ClusterRanking:
    """Returns clusters in the order in which they should be rented: by money per sample, else by speed.

    `devices` are kinds ("h100-80gb" stands for 1, 2, 4 and 8 of them) or clusters, by name, file or record.
    `prices` are per hour and device, by kind, in any currency; a cluster file may state them as
    `price_per_hour`. All devices of a cluster are paid for, also idle ones. The other options are those of
    `plan`; `cluster` is not one of them. Raises BadOption, UnknownDevice and TooFewSamples.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise BadOption(
            f"devices={shown(devices)} is no list of devices", next_step="devices=['a100-80gb', 'h100-80gb']"
        )
    if not isinstance(prices or {}, Mapping):
        raise BadOption(
            f"prices={shown(prices)} names no kind of device", next_step="prices={'h100-80gb': 2.5}, per hour"
        )
    clusters = _priced([_cluster for each in devices for _cluster in _clusters(each)], prices or {})
    asked = asked_in(options, "fit")
    if not clusters or asked.cluster is not None:
        raise BadOption(
            "the devices to rank are given by `devices` alone",
            numbers=f"{len(clusters)} clusters, cluster={asked.cluster!r}",
            next_step="devices=['a100-80gb', '2x8xh100-80gb'], without cluster",
        )
    case = adapted_case(model, args, kwargs, options, asked)
    request = asked_of(case, asked)
    ranked = sorted((_ranked(case, request, cluster) for cluster in clusters), key=_order)
    whole = bare_graph(case.under(request.precision).on(clusters[0]), request.batch_size)
    return ClusterRanking(
        model=whole.model,
        parameters=sum(parameter.count for parameter in whole.parameters),
        batch_size=request.batch_size,
        optimizer=request.optimizer,
        precision=request.precision,
        clusters=tuple(ranked),
    )


def _clusters(named: str | Cluster) -> Iterator[Cluster]:
    """Yields the clusters of a kind of device, or the one cluster that is meant."""
    kind = kind_named(named) if isinstance(named, str) else None
    if kind is None:
        yield cluster_of(named)
        return
    yield from (cluster_of(f"{count}x{kind.name}") for count in COUNTS)


def _priced(clusters: Sequence[Cluster], prices: Mapping[str, float]) -> list[Cluster]:
    """Returns the clusters with prices by kind. Raises BadOption for a price that no device has."""
    known = {device.kind for cluster in clusters for device in cluster.devices}
    of_kind = dict[str, float]()
    for name, price in prices.items():
        row = kind_named(name)
        kind = name if name in known or row is None else row.name
        if kind not in known or not is_number(price) or not 0 <= price < inf:
            raise BadOption(
                f"the price {name}={price} is of no use",
                numbers=f"kinds: {', '.join(sorted(known))}; a price is a number per hour from 0 on",
                next_step=f"prices such as {min(known)}=2.5",
            )
        of_kind[kind] = price
    return [_with_prices(cluster, of_kind) for cluster in clusters]


def _with_prices(cluster: Cluster, of_kind: Mapping[str, float]) -> Cluster:
    devices = (
        device.model_copy(update={"price_per_hour": of_kind.get(device.kind, device.price_per_hour)})
        for device in cluster.devices
    )
    return cluster.model_copy(update={"devices": tuple(devices)})


def _ranked(case: TrainingCase, request: PlanRequest, cluster: Cluster) -> RankedCluster:
    """Returns a cluster with its fastest plan, or with why there is none."""
    ranked = RankedCluster(
        cluster=cluster.name,
        devices=len(cluster.devices),
        batch_size=request.batch_size,
        price_per_hour=cluster.price_per_hour,
    )
    try:
        plan = plan_case(case, request, cluster, Profiler()).plan
    except (BadOption, NoFeasiblePlan, TooFewSamples, TooManyStages) as refused:
        return ranked.model_copy(update={"refused": refusal(refused)})
    assert plan.expected is not None, "the search has priced it"
    fractions = (stage.p95_bytes / stage.device_bytes for stage in plan.expected.stages if stage.device_bytes)
    found = {
        "axes": plan.axes,
        "weights": plan.weights,
        "recompute": recompute_of(plan),
        "step_s": plan.expected.step_s,
        "share": max(fractions, default=None),
    }
    return ranked.model_copy(update=found)


def _order(ranked: RankedCluster) -> tuple[bool, float, float, int]:
    """Orders by money per sample, then by speed, then by fewer devices; what does not fit is last."""
    price = ranked.price_per_million
    return ranked.refused is not None, inf if price is None else price, ranked.step_s or inf, ranked.devices
