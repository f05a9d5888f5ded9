"""Scales seconds from the timed kind of device to another kind."""

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


def _times(cost: Seconds, timed: Seconds, other: Seconds) -> Seconds:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(timed > 0, cost * other / timed, other)
