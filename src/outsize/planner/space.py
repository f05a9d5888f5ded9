"""Which layouts a request wants to be tried: of what was asked for, of all axes, with weights on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from outsize.errors import BadOption, TooManyStages
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.context import context
from outsize.planner.infeasible import device_part
from outsize.planner.layout import Layout, counts_for, everything, grouped, hosted, pipelines
from outsize.planner.request import Request

Candidates = Mapping[int, tuple[ModelGraph, Profile]]
# zero-bubble only where it is asked for, or on CPUs from measured times: what splitting costs is known there.
SCHEDULES: Final[tuple[ScheduleName, ...]] = ("1f1b", "gpipe", "naive", "interleaved")


def in_a_row(request: Request, candidates: Candidates, cluster: Cluster) -> Iterator[Layout]:
    """Pipelines, each rank with the axes that were given. Raises BadOption, TooManyStages."""
    schedules: tuple[ScheduleName, ...] = _schedules(request, candidates, SCHEDULES)
    ranks = _ranks(request, _units(candidates), cluster)
    if request.schedule is None and cluster.devices[0].kind == "cpu":
        # What twice as many messages cost two CPU processes is not in the simulation.
        schedules = tuple(name for name in schedules if name != "interleaved")
        timed = all(u.source == "measured" for _, found in candidates.values() for u in found.units[:1])
        schedules = (*schedules, "zero-bubble") if timed else schedules
    whole = request.dp_shard == 1 or request.weights == "resident"
    axes, weights = request.mesh(ranks), "resident" if whole else "sharded"
    for layout in pipelines(axes, counts_for(candidates, axes), schedules, _units(candidates)):
        for sequence in _ways_between(request, layout, candidates[layout.captured][0]):
            yield replace(layout, weights=weights, sequence=sequence)


def meshes(request: Request, candidates: Candidates, cluster: Cluster) -> Iterator[Layout]:
    """All axes that are allowed, pp alone among them, under one schedule; unequal devices may stay idle."""
    graph = candidates[max(candidates)][0]
    contexts = context(graph).ways(len(cluster.devices)) if request.what_if else (1,)
    schedules = _schedules(request, candidates, ("1f1b",))
    for layout in everything(cluster, candidates, schedules, _units(candidates), contexts):
        for sequence in _ways_between(request, layout, graph):
            if request.allows(layout, graph):
                yield replace(layout, sequence=sequence)


def on_host(request: Request, candidates: Candidates, cluster: Cluster) -> Iterator[Layout]:
    """Weights in the memory of the host; not beside activations there."""
    if request.recompute == "offload":
        return
    graph, schedules = candidates[max(candidates)][0], _schedules(request, candidates, SCHEDULES)
    for layout in hosted(cluster, candidates, schedules, _units(candidates)):
        if request.allows(layout, graph):
            yield layout


def _ways_between(request: Request, layout: Layout, graph: ModelGraph) -> tuple[bool, ...]:
    """Whether what lies between layers is divided: both where that makes a difference and nobody said."""
    if layout.axes.tp == 1 or all(unit.in_sequence == unit.divided for unit in graph.units):
        return (False,)
    return (False, True) if request.sequence_parallel is None else (request.sequence_parallel,)


def _units(candidates: Candidates) -> int:
    return min(len(graph.units) for graph, _ in candidates.values())


def _schedules(
    request: Request, candidates: Candidates, usual: tuple[ScheduleName, ...]
) -> tuple[ScheduleName, ...]:
    if any(graph.form == "modules" for graph, _ in candidates.values()):
        return ("naive",)  # its modules wait for each other
    return (request.schedule,) if request.schedule else usual


def _ranks(request: Request, units: int, cluster: Cluster) -> int:
    group, count = request.mesh(1).group_size, len(cluster.devices)
    stages = request.stages or max(1, count // group)
    devices = f"cluster {cluster.name!r} has {count} devices"
    if grouped(cluster, group) is None or stages * group > count:
        raise BadOption(
            f"{stages} stages want {'as many devices' if group == 1 else f'{group} devices each'}",
            numbers=f"{request.mesh(stages).beyond_pp}; {devices}" if group > 1 else devices,
            next_step=f"--cluster {stages * group}x{device_part(cluster)}",
        )
    if stages > units:
        raise TooManyStages(
            f"{stages} stages were asked for, the model has {units} units to put into them",
            numbers=f"one unit is the smallest stage; {devices}",
            next_step=f"--stages {units}",
        )
    return stages
