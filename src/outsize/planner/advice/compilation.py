"""Decides whether the stages of a plan are worth compiling, from what is known before the first step.

A compiled stage launches fewer kernels and needs no Python between them, so it pays where devices wait for
their host:

    waiting = max(0, 1 - device_s / host_s)     the roofline's seconds of all ops, and those of their launches

Below `LEAST_WAITING` fused kernels save what the compiler costs only in long runs, which nobody has
announced. Each stage is a function, and with selective recompute each recomputed segment; each is compiled
for each shape of a microbatch. Oracle: tests/unit/planner/advice/test_compilation.py.
"""

from __future__ import annotations

from typing import Final

from outsize.ir.answers.compilation import Compilation
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import Device
from outsize.ir.plan import Plan
from outsize.ir.units.recompute_segments import blocks, segments
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.roofline import mean_ops, passes_of, seconds

LEAST_WAITING: Final = 0.1
MOST_FUNCTIONS: Final = 64
BACKEND: Final = "inductor"


def compilation_of(graph: ModelGraph, plan: Plan, device: Device) -> Compilation:
    """Returns whether the plan's stages are compiled on such devices; `graph` is of one microbatch."""
    if plan.form == "modules":
        return Compilation(backend=None, cause="modules")
    if not device.is_accelerator:
        return Compilation(backend=None, cause="host")
    waiting, functions = waiting_share(graph, device), _functions(graph, plan)
    if functions > MOST_FUNCTIONS:
        return Compilation(backend=None, cause="functions", waiting=waiting, functions=functions)
    if waiting < LEAST_WAITING:
        return Compilation(backend=None, cause="busy", waiting=waiting, functions=functions)
    return Compilation(backend=BACKEND, cause="launches", waiting=waiting, functions=functions)


def waiting_share(graph: ModelGraph, device: Device, parts: int = 1) -> float:
    """Returns the share of its time that the device is expected to wait for launches, 0 to 1; it has one of
    so many parts of the graph's work.
    """
    works = [work for unit in graph.units for each in passes_of(unit) for work in each]
    host_s = default_of(device).host_s * mean_ops(graph, device)
    return max(0.0, 1 - seconds(works, device) / parts / host_s) if host_s else 0.0


def _functions(graph: ModelGraph, plan: Plan) -> int:
    """Returns the most functions that one device has to compile."""
    names = [unit.name for unit in graph.units]
    block_of, count = blocks(names), dict[str, int]()
    for number, stage in enumerate(plan.stages):
        chosen = plan.recomputed(number, names) if plan.activation_policy(number).in_blocks else ()
        count[stage.device] = count.get(stage.device, 0) + max(1, len(segments(block_of, chosen)))
    return max(count.values())
