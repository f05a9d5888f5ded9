"""One rank of two: `heads_worker.py FOLDER`. A step of cp 2 with keys and values whole, and by heads."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from launches import HERE
from torch import Tensor

import outsize
from outsize.policies import heads
from outsize.run.collectives import context_parallel
from outsize.run.collectives.kept_attention import outside_modes
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

sys.path.append(str(HERE.parent / "parity"))

from counted import Device
from decoders import NumberDecoder, mean_square

WIDTH, HEADS, TOKENS, LAYERS = 128, 8, 1024, 3
# With masks that are there before: a CPU writes out what kernels of GPUs know.
CASES = (("whole", "selective"), ("pieces", "selective"), ("pieces", "streamed"))
PIECE_BYTES = {"whole": 1 << 30, "pieces": 1 << 18}


def model_of(sharing: int) -> NumberDecoder:
    torch.manual_seed(0)
    return NumberDecoder(WIDTH, HEADS, LAYERS, sharing=sharing)


def tokens() -> Tensor:
    return torch.randn(1, TOKENS, 8, generator=torch.Generator().manual_seed(0))


def stepped(sharing: int, how: str, world: World) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a second step holds beside weights, what the plan says of it, and its gradients."""
    asked: dict[str, Any] = {"axes": {"cp": 2}, "stages": 1, "microbatches": 1, "recompute": "none"}
    plan = outsize.plan(model_of(sharing), (tokens(),), loss_fn=mean_square, cluster="2xcpu", **asked)
    if how == "selective":
        (stage,) = plan.stages
        again = stage.model_copy(update={"recompute": how, "recomputed": stage.units})
        plan = plan.model_copy(update={"stages": (again,)})
    else:
        plan = plan.model_copy(update={"recompute": how})
    priced, _, _ = outsize.api.price(plan, model_of(sharing), (tokens(),), loss_fn=mean_square)
    assert priced.expected is not None
    engine = make_engine(model_of(sharing), plan, world.group, EngineOptions(loss_fn=mean_square))
    engine.step(tokens(), update=False)
    lanes = engine.crew.activations.lanes.values()
    with Device(lambda: [data for lane in lanes for data in lane.buffers]) as device:
        engine.step(tokens(), update=False)
    grads = {n: p.grad for n, p in engine.weights.named_parameters() if p.grad is not None}
    planned = priced.expected.stages[0].activations_bytes
    return {"planned": planned, "counted": device.peak}, grads


@cache
def mask_of(rows: int, keys: int) -> Tensor:
    """What follows the last row's own key at the lower right is hidden."""
    with outside_modes():
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        return torch.zeros(rows, keys).masked_fill(hidden, -torch.inf)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    context_parallel.causal_lower_right = mask_of  # pyright: ignore
    world, found = join(), dict[str, Any]()
    for sharing in (1, 4):
        reference: dict[str, Tensor] = {}
        for gathered, how in CASES:
            heads.PIECE_BYTES = PIECE_BYTES[gathered] // sharing  # pyright: ignore
            said, grads = stepped(sharing, how, world)
            reference = reference or grads
            same = all(torch.equal(reference[n], grad) for n, grad in grads.items())
            found[f"{sharing} {gathered} {how}"] = {**said, "same": same}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
