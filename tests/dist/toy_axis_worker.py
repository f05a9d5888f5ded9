"""A program over a package that has one axis more, `dp_pod`: it is planned, written, read, run and judged.

`toy_axis_worker.py FOLDER` leaves FOLDER/plan.json, a plan with the axis, and FOLDER/told.json: what is
compared with dp_replicate, which divides the batch in the same way, and with the loop in one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from outsize.ir.plan import Plan

# By the toy's name, and by that of the real axis: a request of the search, and one over ranks that also share
# states and layers.
ASKED: dict[str, tuple[str, dict[str, int]]] = {
    "alone": ("2xcpu", {}),
    "searched": ("4xcpu", {}),
    "composed": ("8xcpu", {"dp_shard": 2, "tp": 2}),
}
RUN: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "alone": ("2xcpu", {"dp_pod": 2}, {}),
    "sharded": ("4xcpu", {"dp_pod": 2, "dp_shard": 2}, {"weights": "sharded"}),
}
BATCH = 8


def net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    x, y = torch.randn(BATCH, 8, dtype=torch.float64), torch.randn(BATCH, 4, dtype=torch.float64)
    return nn.Sequential(*layers).double(), x, y


def planned(cluster: str, axes: dict[str, int], **asked: Any) -> Plan:
    model, x, y = net()
    loss_fn = nn.functional.mse_loss
    return outsize.plan(model, (x,), loss_fn=loss_fn, target=y, cluster=cluster, axes=axes, **asked)


def told_of(plan: Plan) -> dict[str, Any]:
    assert plan.expected is not None
    facts = {"axes": plan.axes.used, "bits": plan.bit_identical, "unsupported": plan.unsupported}
    return facts | {"step_s": plan.expected.step_s, "peak": plan.expected.stages[0].peak_bytes}


def main() -> None:
    folder, told = Path(sys.argv[1]), dict[str, Any]()
    for name, (cluster, more) in ASKED.items():
        plans = [planned(cluster, {axis: 2, **more}) for axis in ("dp_pod", "dp_replicate")]
        told[name] = [told_of(plan) for plan in plans]
    for name, (cluster, axes, more) in RUN.items():
        model, x, y = net()
        planned(cluster, axes, stages=1, **more).save(folder / "plan.json")
        plan = Plan.load(folder / "plan.json")
        verdict = outsize.check(
            model, (x,), loss_fn=nn.functional.mse_loss, target=y, plan=plan, processes=True, steps=3
        )
        told[f"run {name}"] = {**verdict.model_dump(), "axes": plan.axes.used}
    (folder / "told.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main()
