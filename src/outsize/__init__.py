"""Train PyTorch models that outsize your GPU, with the numbers one big device would give.

import outsize
plan   = outsize.plan(model, args, kwargs, cluster="2xcpu", batch_size=32)
engine = outsize.parallelize(model, args, kwargs, plan=plan, loss_fn=loss_fn, optimizer=make_optimizer)
result = engine.step(x, target=y)

To read the package, start at a room's first paragraph: `capture` records a model, `planner` decides,
`schedules` orders the work, `run` executes a stage, `train` is the training step and its processes, `ir` has
the records that pass between them, `report` and `cli` show them, `api` joins them. CONTRIBUTING.md lists
what you may want to change and where to start.

Names are imported when first used: `import outsize` alone loads neither torch nor the planner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The subpackage `outsize.capture` has the name of a public function. Importing it binds that name once. It is
# imported here, before the function below is bound to the name, so that it can never hide the function later.
importlib.import_module("outsize.capture")
# Plans check the names of schedules and place their stages by these records, which are a floor above them.
importlib.import_module("outsize.schedules.families")

if TYPE_CHECKING:
    from outsize.api import check, estimate, fit, largest, largest_batch, measure, plan
    from outsize.api.records import (
        Checkpoint,
        Clip,
        Compile,
        Lora,
        Loss,
        Quantize,
        Ranks,
        Recordings,
        Request,
        Watch,
    )
    from outsize.errors import OutsizeError
    from outsize.ir.answers.verdict import Verdict
    from outsize.ir.cluster import Cluster
    from outsize.ir.graph import ModelGraph
    from outsize.ir.plan import Plan
    from outsize.ir.profile import Profile, ProfileSet
    from outsize.ir.schedule import Schedule
    from outsize.ir.timeline import Timeline
    from outsize.ir.units.tensor_styles import TensorStyles
    from outsize.ops.renting import rank_clusters
    from outsize.ops.training import parallelize, resume, split
    from outsize.ops.tuning import tune
    from outsize.run.collectives.linear import ColumnParallelLinear, RowParallelLinear
    from outsize.train.batch.batch import microbatch
    from outsize.train.context.callback import Callback
    from outsize.train.engine.engine import Engine
    from outsize.train.tensor_parallel import tensor_parallel, tensor_styles

__version__ = "0.1.0"

_HOME = {
    "check": "outsize.api",
    "estimate": "outsize.api",
    "fit": "outsize.api",
    "largest": "outsize.api",
    "largest_batch": "outsize.api",
    "measure": "outsize.api",
    "microbatch": "outsize.train.batch.batch",
    "parallelize": "outsize.ops.training",
    "plan": "outsize.api",
    "rank_clusters": "outsize.ops.renting",
    "resume": "outsize.ops.training",
    "split": "outsize.ops.training",
    "tensor_parallel": "outsize.train.tensor_parallel",
    "tensor_styles": "outsize.train.tensor_parallel",
    "tune": "outsize.ops.tuning",
    "Callback": "outsize.train.context.callback",
    "Checkpoint": "outsize.api.records",
    "Clip": "outsize.api.records",
    "Compile": "outsize.api.records",
    "Lora": "outsize.api.records",
    "Loss": "outsize.api.records",
    "Quantize": "outsize.api.records",
    "Ranks": "outsize.api.records",
    "Recordings": "outsize.api.records",
    "Request": "outsize.api.records",
    "Watch": "outsize.api.records",
    "Cluster": "outsize.ir.cluster",
    "ColumnParallelLinear": "outsize.run.collectives.linear",
    "Engine": "outsize.train.engine.engine",
    "ModelGraph": "outsize.ir.graph",
    "OutsizeError": "outsize.errors",
    "Plan": "outsize.ir.plan",
    "Profile": "outsize.ir.profile",
    "ProfileSet": "outsize.ir.profile",
    "RowParallelLinear": "outsize.run.collectives.linear",
    "Schedule": "outsize.ir.schedule",
    "TensorStyles": "outsize.ir.units.tensor_styles",
    "Timeline": "outsize.ir.timeline",
    "Verdict": "outsize.ir.answers.verdict",
}

__all__ = [
    "Callback",
    "Checkpoint",
    "Clip",
    "Cluster",
    "ColumnParallelLinear",
    "Compile",
    "Engine",
    "Lora",
    "Loss",
    "ModelGraph",
    "OutsizeError",
    "Plan",
    "Profile",
    "ProfileSet",
    "Quantize",
    "Ranks",
    "Recordings",
    "Request",
    "RowParallelLinear",
    "Schedule",
    "TensorStyles",
    "Timeline",
    "Verdict",
    "Watch",
    "__version__",
    "capture",
    "check",
    "estimate",
    "fit",
    "largest",
    "largest_batch",
    "measure",
    "microbatch",
    "parallelize",
    "plan",
    "rank_clusters",
    "resume",
    "split",
    "tensor_parallel",
    "tensor_styles",
    "tune",
]


def capture(*args: Any, **kwargs: Any) -> ModelGraph:
    """The model as units and values; parameters and errors as in `outsize.api.capture`."""
    from outsize import api

    return api.capture(*args, **kwargs)


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use."""
    if name not in _HOME:
        # Loaded where a name is missing alone, as everything here.
        names = importlib.import_module("outsize.errors.names")
        raise AttributeError(names.missing("module 'outsize'", name, names.PACKAGE))
    with importlib.import_module("outsize.program.garbage").uncollected():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those that were not used yet: what Tab offers in a shell or a notebook."""
    return sorted({*globals(), *__all__})
