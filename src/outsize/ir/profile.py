"""Describes what each unit costs on one kind of device, per microbatch, and where the number is from.

Cost per sample is not constant: a `ProfileSet` holds a model at several microbatch sizes. Between two of them
each unit's seconds and bytes are interpolated linearly; beyond them nothing was measured, so it refuses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self, final

from pydantic import Field, model_validator

from outsize.errors import BadOption, ModelMismatch
from outsize.files.strict_json import BadJson
from outsize.ir.base import Bytes, Count, Operations, Record, Seconds, Whole
from outsize.ir.graph import ModelGraph
from outsize.policies.precisions import FP32

Source = Literal["measured", "roofline"]


@final
class UnitCost(Record):
    """Holds seconds and bytes of one unit for one microbatch.

    `spread_s` is the distance between the quartiles of the laps of forward and backward together; 0 for an
    estimate.
    """

    name: str
    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds
    saved_bytes: Bytes
    workspace_bytes: Bytes
    flops: Operations
    source: Source
    spread_s: Seconds = 0.0

    @property
    def backward_s(self) -> float:
        """Returns the seconds of input gradient and weight gradient together."""
        return self.backward_input_s + self.backward_weight_s


@final
class Profile(Record):
    """Holds costs of all units of a graph, in its order; `device` names the kind they are valid for.

    `host`, `threads` and `beside` (how many processes computed on the same host meanwhile) say where and how
    it was measured; empty and 0 for an estimate. `precision` is the training's, as a plan names it.
    """

    fingerprint: str
    device: str
    microbatch_size: Count
    units: tuple[UnitCost, ...]
    host: str = ""
    threads: Whole = 0
    beside: Whole = 0
    precision: str = FP32.name

    def recomputed(self) -> Self:
        """Returns the costs when a backward begins with a second forward."""
        later = ({"backward_input_s": u.backward_input_s + u.forward_s} for u in self.units)
        units = (u.model_copy(update=more) for u, more in zip(self.units, later, strict=True))
        return self.model_copy(update={"units": tuple(units)})

    def in_order(self, order: Sequence[int]) -> Self:
        """Returns the costs in the unit order of `ModelGraph.in_order`."""
        return self.model_copy(update={"units": tuple(self.units[unit] for unit in order)})

    @property
    def step_compute_s(self) -> float:
        """Returns the seconds of forward and backward of all units for one microbatch."""
        return sum(u.forward_s + u.backward_s for u in self.units)


@final
class ProfileSet(Record):
    """Holds profiles of one model on one kind of device, by ascending microbatch size."""

    version: Literal[1] = 1
    model: str
    profiles: tuple[Profile, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _same_model(self) -> Self:
        if any(a >= b for a, b in pairwise(self.sizes)):
            raise ValueError("microbatch sizes must ascend")
        names = {tuple(u.name for u in p.units) for p in self.profiles}
        if len(names) > 1 or len({(p.fingerprint, p.device, p.precision) for p in self.profiles}) > 1:
            raise ValueError("profiles of different models, devices or precisions")
        return self

    @classmethod
    def of(cls, model: str, profiles: Iterable[Profile]) -> Self:
        """Returns a set with the profiles in the order of their sizes."""
        return cls(model=model, profiles=tuple(sorted(profiles, key=lambda p: p.microbatch_size)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the microbatch sizes that were measured."""
        return tuple(p.microbatch_size for p in self.profiles)

    def covers(self, size: int) -> bool:
        """Returns whether `size` lies between the smallest and the largest measured size."""
        return self.sizes[0] <= size <= self.sizes[-1]

    def at(self, size: int) -> Profile:
        """Returns the profile at `size` samples, each unit piecewise linear between its neighbours.

        Raises BadOption beyond the measured sizes: small microbatches are not scaled-down large ones.
        """
        if not self.covers(size):
            raise BadOption(
                f"the profile of {self.model} says nothing about microbatches of {size}",
                numbers=f"measured at {', '.join(map(str, self.sizes))}",
                next_step=f"outsize measure MODEL --microbatch-sizes {_with(self.sizes, size)} --out FILE",
            )
        place = bisect_left(self.sizes, size)
        above = self.profiles[place]
        if above.microbatch_size == size:
            return above
        return _between(self.profiles[place - 1], above, size)

    def counts(self, counts: Iterable[int], batch_size: int) -> list[int]:
        """Returns those microbatch counts whose microbatches it covers; all of them when there is none."""
        all_counts = list(counts)
        return [count for count in all_counts if self.covers(-(-batch_size // count))] or all_counts

    def of_graph(self, graph: ModelGraph, device: str, precision: str = FP32.name) -> Profile:
        """Returns the profile at the graph's batch, with the graph's saved bytes, workspace and FLOPs.

        These are exact. `device` is the kind that the cluster has. Raises ModelMismatch for another model's
        graph, BadOption for another precision or for a CPU's times on a GPU or the other way round, and what
        `at` raises.
        """
        self._insist(graph, device, precision)
        profile = self.at(graph.batch_size)
        exact = (
            {"saved_bytes": u.saved_bytes, "workspace_bytes": u.workspace_bytes, "flops": u.flops}
            for u in graph.units
        )
        units = (cost.model_copy(update=more) for cost, more in zip(profile.units, exact, strict=True))
        return profile.model_copy(update={"units": tuple(units)})

    def _insist(self, graph: ModelGraph, device: str, precision: str) -> None:
        """Raises unless the profile is valid for this model, on such a device, in this precision."""
        mine = self.profiles[0]
        if (device == "cpu") != (mine.device == "cpu"):
            raise BadOption(
                f"the profile of {self.model} does not hold for {device}",
                numbers=f"measured on {mine.host or mine.device}",
                next_step="outsize measure MODEL on such a device, or a --cluster of this one's kind",
            )
        if precision != mine.precision:
            raise BadOption(
                f"the profile of {self.model} does not hold for precision {precision}",
                numbers=f"measured in {mine.precision}",
                next_step=f"outsize measure MODEL --precision {precision} --out FILE",
            )
        if graph.fingerprint != mine.fingerprint or len(graph.units) != len(mine.units):
            raise ModelMismatch(
                f"the profile is of {self.model}, this model is {graph.model}",
                numbers=f"fingerprint {mine.fingerprint} against {graph.fingerprint}",
                next_step="outsize measure MODEL --out FILE with this model, input and loss",
            )

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        self.write(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a profile file. Raises BadOption that says what is wrong with it."""
        try:
            return cls.read(path)
        except (OSError, BadJson) as error:
            raise _no_profile(path, str(error)) from None


def _between(below: Profile, above: Profile, size: int) -> Profile:
    fraction = (size - below.microbatch_size) / (above.microbatch_size - below.microbatch_size)
    pairs = zip(below.units, above.units, strict=True)
    units = tuple(_mixed(a, b, fraction) for a, b in pairs)
    return below.model_copy(update={"microbatch_size": size, "units": units})


def _mixed(a: UnitCost, b: UnitCost, share: float) -> UnitCost:
    def line(low: float, high: float) -> float:
        return low + (high - low) * share

    return UnitCost(
        name=a.name,
        forward_s=line(a.forward_s, b.forward_s),
        backward_input_s=line(a.backward_input_s, b.backward_input_s),
        backward_weight_s=line(a.backward_weight_s, b.backward_weight_s),
        saved_bytes=round(line(a.saved_bytes, b.saved_bytes)),
        workspace_bytes=round(line(a.workspace_bytes, b.workspace_bytes)),
        flops=round(line(a.flops, b.flops)),
        source=a.source,
        spread_s=max(a.spread_s, b.spread_s),
    )


def _with(sizes: Iterable[int], size: int) -> str:
    return ",".join(map(str, sorted({*sizes, size})))


def _no_profile(path: str | Path, numbers: str) -> BadOption:
    return BadOption(f"{path} is no profile", numbers=numbers, next_step="outsize measure MODEL --out FILE")
