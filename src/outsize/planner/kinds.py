"""Seconds on another kind of device than the one that was timed."""

from __future__ import annotations

import numpy as np

from outsize.ir.cluster import Device
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.roofline import roofline
from outsize.planner.seconds import Seconds, UnitSeconds


def on_kind(graph: ModelGraph, profile: Profile, timed: Device, device: Device) -> UnitSeconds:
    """The costs, times what the roofline says the two kinds differ by, unit by unit."""
    known = UnitSeconds.of(profile)
    if device.kind == timed.kind:
        return known
    here, there = UnitSeconds.of(roofline(graph, timed)), UnitSeconds.of(roofline(graph, device))
    return UnitSeconds(
        _times(known.forward, here.forward, there.forward),
        _times(known.given, here.given, there.given),
        _times(known.weight, here.weight, there.weight),
    )


def _times(cost: Seconds, here: Seconds, there: Seconds) -> Seconds:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(here > 0, cost * there / here, there)
