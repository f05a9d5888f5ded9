"""What is asked of the search: what is fixed, and which ways are open."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import Weights
from outsize.ir.plan import (
    Axes,
    BatchNormMode,
    Count,
    Precision,
    Recompute,
    ScheduleName,
    beyond,
)
from outsize.planner.divided import divides
from outsize.planner.layout import Layout

Space = Literal["pp", "all"]
"""Axes that are looked at beside those that were asked for: none, or all that run."""


@final
class Request(Record):
    """What is asked for; None leaves the choice to the search (stages: one per device, or group of devices).

    `dp_replicate`, `dp_shard`, `tp`: the sizes of these axes; microbatches are those of each replica.
    `sequence_parallel`: whether tp divides what lies between layers; left open, both are priced.
    `axes` "all": those that are not given are searched. None is "pp" here; who asks may look further where
    nothing fits (`further`). `what_if`: all, and layouts that nothing runs yet.
    `weights`: where they are; left open they are sharded over dp_shard, and on the host where one device is
    too small for all else.
    `actions` are those of the schedule "custom".
    """

    batch_size: Count
    microbatches: Count | None = None
    stages: Count | None = None
    schedule: ScheduleName | None = None
    optimizer: str = "adamw"
    precision: Precision = "fp32"
    recompute: Recompute | None = None
    bn: BatchNormMode = "micro"
    axes: Space | None = None
    dp_replicate: Count = 1
    dp_shard: Count = 1
    tp: Count = 1
    sequence_parallel: bool | None = None
    weights: Weights | None = None
    what_if: bool = False
    actions: tuple[str, ...] = ()

    def mesh(self, pp: int) -> Axes:
        """With so many ranks in a pipeline, and the axes that were given."""
        return Axes(pp=pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, tp=self.tp)

    @property
    def meshed(self) -> bool:
        """Is more given than a pipeline?"""
        return self.mesh(1).group_size > 1

    @property
    def count(self) -> int | None:
        """Microbatches of the whole batch, where they are asked for."""
        return self.microbatches and self.microbatches * self.mesh(1).replicas

    @property
    def open(self) -> bool:
        """Are axes searched that were not given?"""
        return self.what_if or self.axes == "all"

    @property
    def plain(self) -> bool:
        """Is it a pipeline with a schedule that has a name, whose stages keep all or recompute all?"""
        named = self.schedule not in ("auto", "custom") and self.recompute in (None, "none", "full")
        return named and self.weights is None and not (self.open or self.meshed)

    @property
    def given(self) -> Request:
        """The same with no axes but pp and those that were given."""
        return self.model_copy(update={"axes": None})

    def further(self, devices: int) -> bool:
        """Has nobody said that it should stay at pipelines, and is there anything else to try?"""
        plain = self.axes is None and not (self.meshed or self.actions)
        return plain and devices > (self.stages or 1)

    def allows(self, layout: Layout, graph: ModelGraph) -> bool:
        """What was given stays: stages are ranks of the pipeline, microbatches those of a replica. And it
        runs, unless a what-if is asked for.
        """
        given, axes = self.mesh(layout.axes.pp).model_dump(), layout.axes.model_dump()
        kept = all(axes[name] == size for name, size in given.items() if size > 1)
        kept &= self.stages in (None, axes["pp"]) and self.microbatches in (None, layout.microbatches)
        kept &= self.weights in (None, layout.weights) and (self.bn != "sync" or layout.replicas == 1)
        runs = self.what_if or not beyond(layout.axes, layout.weights, graph.form)
        return kept and runs and divides(graph, layout.axes.tp)
