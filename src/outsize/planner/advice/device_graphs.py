"""Decides whether the stages of a plan are worth recording as graphs of their devices.

A graph is launched once for all its kernels, so it pays where devices wait for their host: by the rule of
compiled stages (compilation.py), on the seconds of kernels and of their launches. Recording costs no more
than two steps, so there is no limit to how many stages are worth it. Oracle:
tests/unit/planner/advice/test_device_graphs.py.
"""

from __future__ import annotations

from outsize.ir.answers.compilation import GraphUse
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import Device
from outsize.ir.plan import Plan
from outsize.planner.advice.compilation import LEAST_WAITING, waiting_share


def graph_use_of(graph: ModelGraph, plan: Plan, device: Device) -> GraphUse:
    """Returns whether the plan's stages are recorded on such devices; `graph` is of one microbatch."""
    if plan.form == "modules":
        return GraphUse(on=False, cause="modules")
    if not device.is_accelerator:
        return GraphUse(on=False, cause="host")
    waiting = waiting_share(graph, device)
    waits = waiting >= LEAST_WAITING
    return GraphUse(on=waits, cause="launches" if waits else "busy", waiting=waiting)
