"""Train a U-Net over two processes and write what pipeline.py draws to pipeline.json.

    python docs/img/measure.py

The plan's units and the prediction are timed on this machine, one thread; the measured step is the one of
median length among the last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize import api
from outsize.ops.launch.launch import run_script

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "parity"))
STEPS, WATCHED = 20, 9


def subject() -> tuple[nn.Module, Tensor, Tensor]:
    """The U-Net of the parity zoo, wider; eight images of 96 x 96 with a class for each pixel."""
    from zoo_models import UNet

    torch.manual_seed(0)
    return UNet(width=24), torch.randn(8, 3, 96, 96), torch.randint(0, 5, (8, 96, 96))


def launch(target: Path) -> None:
    """Plan, train over two processes, write down."""
    model, images, labels = subject()
    loss: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": labels}
    how: dict[str, Any] = {"cluster": "2xcpu", "stages": 2, "microbatches": 4, "schedule": "1f1b"}
    seen = api.outlook(model, (images,), **how, **loss, measured=True)
    plan, graph = seen.plan, seen.graph
    verdict = outsize.check(model, (images,), plan=plan, **loss)
    plan.save(target)
    assert run_script([str(HERE / "measure.py"), "worker", str(target)], 2) == 0
    record = {
        "units": [{"name": u.name, "s": u.forward_s + u.backward_s} for u in seen.profile.units],
        "values": [
            {"producer": v.producer, "consumers": v.consumers, "bytes": v.size_bytes} for v in graph.values
        ],
        "bounds": plan.bounds(graph),
        "bit_equal": verdict.bit_equal,
        "predicted": seen.timeline.model_dump(mode="json"),
        "measured": json.loads(target.read_text()),
    }
    target.write_text(json.dumps(record) + "\n")


def work(file: Path) -> None:
    """One process of the run; rank 0 replaces the plan in the file by the measured timeline."""
    model, images, labels = subject()
    loss: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": labels}
    plan = outsize.Plan.load(file)
    engine = outsize.parallelize(
        model, (images,), plan=plan, **loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
    )
    timelines = []
    for step in range(STEPS):
        engine.step(images, target=labels)
        if step >= STEPS - WATCHED:
            timelines.append(engine.timeline())
    timelines.sort(key=lambda timeline: timeline.duration_s)
    if engine.rank == 0:
        file.write_text(timelines[WATCHED // 2].to_json())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["worker"]:
        work(Path(sys.argv[2]))
    else:
        launch(HERE / "pipeline.json")
