"""What is asked of the planner, checked, and what it is given: the wishes, the cluster, the costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, final

from pydantic import ValidationError

from outsize.capture.cluster import find_cluster
from outsize.capture.graph import Captured
from outsize.capture.measure import Progress
from outsize.capture.tensor import with_styles
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile, ProfileSet
from outsize.ir.schedule import Schedule
from outsize.planner.fit import Ask
from outsize.planner.request import Request
from outsize.planner.roofline import roofline
from outsize.schedules.planned import read, written
from outsize.train.measuring import how_on, measure_captured
from outsize.train.subject import Subject

Wishes = TypeVar("Wishes", Ask, Request)
# How many microbatch counts the search looks at when none is given, as multiples of the stages.
_MULTIPLES = (1, 2, 4, 8)


@final
@dataclass(frozen=True)
class Question:
    """What the search is called with; `candidates` by number of microbatches."""

    request: Request
    cluster: Cluster
    candidates: dict[int, tuple[ModelGraph, Profile]]


def ask(
    found: Subject, cluster: Cluster, *, measured: bool | ProfileSet, progress: Progress | None, **wishes: Any
) -> Question:
    """The wishes checked, and the model captured for each number of microbatches that is worth a look."""
    given = wishes.pop("batch_size", None)
    size = found.batch.size if given is None else given
    request = request_of(batch_size=size, **wishes)
    found = found.under(request.precision)
    candidates: dict[int, tuple[ModelGraph, Profile]] = {}
    axes, microbatches = request.mesh(1), request.microbatches
    stages = request.stages or max(1, len(cluster.devices) // axes.group_size)
    counts = [count * axes.replicas for count in counts_of(size // axes.replicas, stages, microbatches)]
    if request.open:
        counts = all_counts(size, len(cluster.devices), microbatches)
    for count in measured.counts(counts, size) if isinstance(measured, ProfileSet) else counts:
        captured = found.taken(-(-size // count), size // (request.count or 1))
        if captured is not None:
            graph = styled(found, captured, request.tp, request.open)
            candidates[count] = graph, profile_of(found, captured, cluster, measured, progress)
    return Question(request, cluster, candidates)


def finest(found: Subject, asked: Question) -> int | None:
    """The most microbatches that the model takes; None where they were looked at, or are not to be chosen."""
    request, size = asked.request, asked.request.batch_size
    if request.microbatches or request.open or request.meshed:
        return None
    counts = (d for d in range(size, max(asked.candidates, default=0), -1) if size % d == 0)
    under = found.under(request.precision)
    return next((count for count in counts if under.taken(size // count, size) is not None), None)


def styled(found: Subject, captured: Captured, tp: int, asked: bool = False) -> ModelGraph:
    """The graph, with what tensor parallelism divides where that is `asked` or the plan has some.

    Raises BadOption where so many ranks cannot divide the model.
    """
    if tp == 1 and not asked:
        return captured.graph
    graph = with_styles(captured, found.module)
    if graph.tensor is not None:
        graph.tensor.insist_on_degree(tp)
    elif tp > 1:
        raise BadOption(
            f"{graph.model} runs by modules, in its own Python, which has the sizes of one device in it",
            numbers=f"tp={tp}",
            next_step="tp=1; `why` of such a plan says which line is not captured",
        )
    return graph


def request_of(**fields: Any) -> Request:
    """A request for the search; BadOption for a value that makes no sense."""
    if fields.get("bn") == "sync":
        _insist_on_one_replica(fields)
        fields["microbatches"] = _the_whole_batch(fields.get("microbatches"))
    open_axes = fields.get("what_if") or fields.get("axes") == "all"
    if fields.get("sequence_parallel") and fields.get("tp", 1) == 1 and not open_axes:
        raise BadOption(
            "sequence parallelism is between the ranks of tensor parallelism, and there is one",
            numbers="sequence_parallel=True, tp=1",
            next_step="tp=2, or leave sequence_parallel out",
        )
    if fields.get("weights") == "sharded" and not open_axes:
        _insist_on_shards(fields.get("dp_shard") or 1)
    if isinstance(fields.get("schedule"), Schedule):
        fields |= _as_scheduled(fields, fields["schedule"])
    return checked(Request, **fields)


def checked(kind: type[Wishes], **fields: Any) -> Wishes:
    """What is asked for, or BadOption for a value that makes no sense."""
    try:
        return kind(**fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = problem["loc"][0]
        raise BadOption(
            f"{name}={problem['input']!r} makes no sense",
            numbers=problem["msg"],
            next_step=f"another {name}, or none",
        ) from None


def _as_scheduled(fields: dict[str, Any], schedule: Schedule) -> dict[str, Any]:
    """What a schedule of somebody's own says: ranks and microbatches, and the actions."""
    schedule = read(written(schedule))
    says = {"stages": schedule.ranks, "microbatches": schedule.microbatches}
    for name, value in says.items():
        if fields.get(name) not in (None, value):
            raise BadOption(
                f"{name}={fields[name]} beside a schedule with {value}",
                numbers=f"{schedule.ranks} rows with {schedule.microbatches} microbatches",
                next_step=f"leave {name} away",
            )
    return {**says, "schedule": "custom", "actions": written(schedule)}


def _insist_on_one_replica(fields: dict[str, Any]) -> None:
    sizes = {name: fields.get(name) or 1 for name in ("dp_replicate", "dp_shard")}
    if max(sizes.values()) > 1:
        raise BadOption(
            "bn='sync' takes the statistics of the whole batch, which replicas tear apart",
            numbers=", ".join(f"{name} {size}" for name, size in sizes.items()),
            next_step="bn='deferred'",
        )


def _insist_on_shards(dp_shard: int) -> None:
    if dp_shard == 1:
        raise BadOption(
            "weights='sharded' divides them among replicas, and none are asked for",
            numbers="dp_shard 1",
            next_step="dp_shard=2 (--dp-shard 2), or leave out weights",
        )


def _the_whole_batch(microbatches: int | None) -> int:
    """Statistics of the whole batch want it in one piece."""
    if microbatches in (None, 1):
        return 1
    raise BadOption(
        f"bn='sync' takes the statistics of the whole batch, which {microbatches} microbatches tear apart",
        next_step="microbatches=1, where stages do not overlap, or bn='deferred'",
    )


def cluster_of(cluster: str | Cluster) -> Cluster:
    """By name, or as it is."""
    return find_cluster(cluster) if isinstance(cluster, str) else cluster


def profile_of(
    found: Subject,
    captured: Captured,
    cluster: Cluster,
    measured: bool | ProfileSet,
    progress: Progress | None,
) -> Profile:
    """Costs of the captured units: timed before or here, or by roofline for the cluster's device."""
    if isinstance(measured, ProfileSet):
        return measured.of_graph(captured.graph, cluster.devices[0].kind, found.precision)
    if not measured or captured.graph.form == "modules":
        return roofline(captured.graph, cluster.devices[0])
    return measure_captured(found, captured, how_on(cluster), progress)


def all_counts(batch_size: int, devices: int, microbatches: int | None) -> list[int]:
    """Microbatches of the whole batch worth a capture where replicas share it: also fewer than devices."""
    if microbatches is not None:
        shared = (microbatches * d for d in range(1, devices + 1) if devices % d == 0)
        return [count for count in shared if count <= batch_size]
    fewer = (2**k for k in range(1, devices.bit_length()) if batch_size % 2**k == 0)
    return sorted({*counts_of(batch_size, devices, None), *fewer})


def counts_of(batch_size: int, stages: int, microbatches: int | None) -> list[int]:
    """Microbatch counts worth a capture: the one asked for, or divisors of the batch near multiples of p."""
    if microbatches is not None:
        return [microbatches] if 0 < microbatches <= batch_size else []
    wanted = [stages * factor for factor in _MULTIPLES]
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    near = {min(divisors, key=lambda d, w=w: abs(d - w)) for w in wanted}
    return sorted({1, *near})
