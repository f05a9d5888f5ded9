"""Scales seconds that are known, by the ratio that the roofline predicts: from the timed kind of device to
another kind, and from a whole microbatch to a slice of its sequences.
"""

from __future__ import annotations

import numpy as np

from outsize.ir.cluster import Device
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.costs.roofline import roofline_seconds
from outsize.planner.costs.unit_times import Seconds, UnitSeconds


def on_kind(graph: ModelGraph, profile: Profile, timed: Device, device: Device) -> UnitSeconds:
    """Returns the measured costs times the ratio that the roofline predicts between the two kinds, unit by
    unit.
    """
    measured = UnitSeconds.of(profile)
    if device.kind == timed.kind:
        return measured
    timed_roofline, device_roofline = roofline_seconds(graph, timed), roofline_seconds(graph, device)
    return UnitSeconds(
        _times(measured.forward, timed_roofline.forward, device_roofline.forward),
        _times(measured.backward_input, timed_roofline.backward_input, device_roofline.backward_input),
        _times(measured.backward_weight, timed_roofline.backward_weight, device_roofline.backward_weight),
    )


def of_slice(
    model: tuple[ModelGraph, Profile], sliced: ModelGraph, slices: int, device: Device
) -> tuple[ModelGraph, Profile]:
    """Returns the model of a mean slice, whose graph is `sliced`, with its costs on the profile's device.

    A unit of which only sums are known costs 1 / n.
    """
    graph, profile = model
    if not any(unit.forward for unit in graph.units):
        seconds = UnitSeconds.of(profile).times(*[1 / slices] * 3)
        return sliced, seconds.written(_bytes_of_slice(profile, slices))
    has_works = np.array([bool(unit.forward) for unit in graph.units])
    whole, part = roofline_seconds(graph, device), roofline_seconds(sliced, device)
    known = UnitSeconds.of(profile)

    def passed(cost: Seconds, of_whole: Seconds, of_part: Seconds) -> Seconds:
        return np.where(has_works, _times(cost, of_whole, of_part), cost / slices)

    seconds = UnitSeconds(
        passed(known.forward, whole.forward, part.forward),
        passed(known.backward_input, whole.backward_input, part.backward_input),
        passed(known.backward_weight, whole.backward_weight, part.backward_weight),
    )
    return sliced, seconds.written(_bytes_of_slice(profile, slices))


def _bytes_of_slice(profile: Profile, slices: int) -> Profile:
    names = ("saved_bytes", "workspace_bytes", "flops")
    units = tuple(
        cost.model_copy(
            update={name: getattr(cost, name) // slices for name in names}
            | {"spread_s": cost.spread_s / slices}
        )
        for cost in profile.units
    )
    return profile.model_copy(update={"units": units})


def _times(cost: Seconds, timed: Seconds, other: Seconds) -> Seconds:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(timed > 0, cost * other / timed, other)
