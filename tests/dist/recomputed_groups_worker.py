"""Run by test_recomputed_groups.py, one process per rank: stages of two devices that recompute some units."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from tensor_models import MODELS
from tensor_worker import all_in
from torch import Tensor, nn

import outsize
from outsize.ir.units.names import compress_units

STEPS = 2
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "tp": ("llama", torch.float64, {"axes": {"tp": 2}, "microbatches": 2}),
    "sequence": ("llama", torch.float64, {"axes": {"tp": 2}, "microbatches": 2, "sequence_parallel": True}),
    "shards": ("llama", torch.float64, {"axes": {"dp_shard": 2}, "microbatches": 1, "weights": "sharded"}),
    "adapters": ("adapters", torch.float64, {"axes": {"tp": 2}, "microbatches": 2}),
    "experts": ("mixtral", torch.float32, {"axes": {"ep": 2}, "microbatches": 1}),
}


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, _, batch = MODELS[name]()
    rows = {key: torch.cat([value, value.flip(1)]) for key, value in batch.items()}
    return model.to(dtype), rows


def plan_of(model: nn.Module, batch: dict[str, Tensor], asked: dict[str, Any]) -> outsize.Plan:
    """A plan whose memory would ask for nothing: of three units two are recomputed, also within layers."""
    request = outsize.Request(cluster="2xcpu", stages=1, recompute="none", **asked)
    plan = outsize.plan(model, (), batch, request=request)
    graph = outsize.capture(model, (), batch)
    names = [unit.name for unit in graph.units]
    (run,) = pairwise(plan.bounds(graph))
    units = compress_units(names, [unit for unit in range(*run) if unit % 3])
    stage = plan.stages[0].model_copy(update={"recompute": "selective", "recomputed": units})
    return plan.model_copy(update={"stages": (stage,)})


def plain(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after steps of SGD over the two halves of the batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    half = len(next(iter(batch.values()))) // 2
    for _ in range(STEPS):
        for part in (slice(half), slice(half, None)):
            (model(**{name: value[part] for name, value in batch.items()}).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def distance(pair: tuple[Tensor, Tensor]) -> float:
    """How far a tensor is from the expected one, of whose largest element."""
    one, expected = pair
    return float((one - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def found(case: str) -> dict[str, Any]:
    name, dtype, asked = CASES[case]
    model, batch = made(name, dtype)
    expected = plain(copy.deepcopy(model), batch)
    plan = plan_of(model, batch, asked)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = outsize.parallelize(model, (), batch, plan=plan, optimizer=sgd)
    for _ in range(STEPS):
        engine.step(**cast(Any, batch))
    state = engine.weights.full_state_dict()
    pairs = ((state[key], value) for key, value in expected.items()) if state else ()
    far = max(map(distance, pairs), default=0.0)
    start = made(name, dtype)[0].state_dict()
    moved = max(float((start[key] - value).abs().max()) for key, value in expected.items())
    return {"far": far, "moved": moved, "recomputed": len(plan.stages[0].recomputed)}


def main(folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    with all_in(CASES[case][1]):
        said = found(case)
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
