"""Joins the packages: only this one imports both the planner and the engine.

graph  = capture(model, args, kwargs)                    what is it made of
costs  = estimate(graph, cluster) | measure(model, ...)  what does each unit cost
plan   = plan(model, args, kwargs, cluster="2xcpu")      how to split it
report = check(model, args, kwargs, stages=3)            does the split compute the same
engine = parallelize(model, args, kwargs, plan=plan)     run it; `ops` has it watched and published
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.api.planning import capture, estimate, fit, measure, outlook, plan, price
    from outsize.api.running import check, parallelize
    from outsize.api.sizes import largest, largest_batch

__all__ = [
    "capture",
    "check",
    "estimate",
    "fit",
    "largest",
    "largest_batch",
    "measure",
    "outlook",
    "parallelize",
    "plan",
    "price",
]
_HOME = {
    "check": "running",
    "largest": "sizes",
    "largest_batch": "sizes",
    "parallelize": "running",
}


def __getattr__(name: str) -> Any:
    """Imports a function from its file on first use: a question loads nothing that runs."""
    if name not in __all__:
        raise AttributeError(f"module 'outsize.api' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"outsize.api.{_HOME.get(name, 'planning')}"), name)
    globals()[name] = value
    return value
