"""Joins the packages: only this one imports both the planner and the engine.

graph  = capture(model, args, kwargs)                    what is it made of
costs  = estimate(graph, cluster) | measure(model, ...)  what does each unit cost
plan   = plan(model, args, kwargs, cluster="2xcpu")      how to split it
report = check(model, args, kwargs, stages=3)            does the split compute the same
engine = parallelize(model, args, kwargs, plan=plan)     run it
engine = resume(folder, model, args, kwargs)             go on from a checkpoint
tuned  = tune(model, args, kwargs)                       which one is really fastest
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.api.jobs import job_request, job_request_of_plans
    from outsize.api.planning import capture, estimate, fit, measure, outlook, plan, price
    from outsize.api.renting import rank_clusters
    from outsize.api.running import check, parallelize, resume
    from outsize.api.sizes import largest, largest_batch
    from outsize.api.tuning import tune

__all__ = [
    "capture",
    "check",
    "estimate",
    "fit",
    "job_request",
    "job_request_of_plans",
    "largest",
    "largest_batch",
    "measure",
    "outlook",
    "parallelize",
    "plan",
    "price",
    "rank_clusters",
    "resume",
    "tune",
]
_HOME = {
    "check": "running",
    "job_request": "jobs",
    "job_request_of_plans": "jobs",
    "largest": "sizes",
    "largest_batch": "sizes",
    "parallelize": "running",
    "rank_clusters": "renting",
    "resume": "running",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    """Imports a function from its file on first use: a question loads nothing that runs."""
    if name not in __all__:
        raise AttributeError(f"module 'outsize.api' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"outsize.api.{_HOME.get(name, 'planning')}"), name)
    globals()[name] = value
    return value
