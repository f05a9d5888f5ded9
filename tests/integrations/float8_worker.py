"""Run by test_torchao_ranks.py, one process per rank: layers of torchao that ranks divide, against the plain
loop of one process.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.errors import OutsizeError
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

float8: Any = importlib.import_module("torchao.float8")
STEPS, MICROBATCHES = 2, 2
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "use_cache": False,
}  # fmt: skip
RECIPES = {
    "tensors": float8.Float8LinearConfig(emulate=True),
    "powers of two": float8.Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True),
    "rows": float8.Float8LinearConfig.from_recipe_name("rowwise"),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def made(recipe: str) -> tuple[nn.Module, Batch]:
    """A Llama of float8 layers; sides of 64 and 96 are multiples of 16 on each of two ranks."""
    torch.manual_seed(1)  # With this seed no value lies so close to the border of two codes that it matters.
    model = float8.convert_to_float8_training(LlamaForCausalLM(LlamaConfig(**SIZES)), config=RECIPES[recipe])
    ids = torch.randint(0, 128, (4, 16))
    return model, Batch((), {"input_ids": ids, "labels": ids})


def plain(model: nn.Module, batch: Batch) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of all steps, the gradients of the first, the parameters after the last."""
    optimizer, losses, grads = sgd(model.parameters()), list[float](), dict[str, Tensor]()
    for step in range(STEPS):
        parts = {name: value.chunk(MICROBATCHES) for name, value in batch.kwargs.items()}
        total = 0.0
        for number in range(MICROBATCHES):
            loss = model(**{name: value[number] for name, value in parts.items()}).loss / MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {n: p.detach() for n, p in model.named_parameters()}


def split(engine: Engine, batch: Batch) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same with the engine."""
    losses, grads = list[float](), dict[str, Tensor]()
    for step in range(STEPS):
        found = engine.step(**batch.kwargs, update=False)
        losses.append(found.loss.item())
        if step == 0:
            own = [(n, p.grad.clone()) for n, p in engine.weights.named_parameters() if p.grad is not None]
            grads = {n: engine.weights.whole(n, grad) for n, grad in own}
        engine.update()
    return losses, grads, engine.weights.full_state_dict()


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference relative to a tensor's largest element."""
    apart = {n: (found[n] - t).abs().max() / t.abs().max() for n, t in expected.items() if n in found}
    return max(apart.values()).item()


def compared(text: str, world: World) -> dict[str, Any]:
    recipe, axes, *sequence = text.split(":")
    model, batch = made(recipe)
    alone = copy.deepcopy(model)
    mesh = {name: int(size) for name, size in (axis.split("=") for axis in axes.split(","))}
    request = outsize.Request(
        cluster=f"{world.world_size}xcpu", stages=1, microbatches=MICROBATCHES, axes={**mesh, "others": 1},
        optimizer="sgd", sequence_parallel=True if sequence else None,
    )  # fmt: skip
    plan = outsize.plan(model, batch.args, batch.kwargs, request=request)
    engine = make_engine(model, plan, world.group, EngineOptions(optimizer=sgd))
    engine.prepare(batch)
    losses, grads, trained = split(engine, batch)
    expected_losses, expected_grads, expected = plain(alone, batch)
    divided = [n for n, p in engine.weights.named_parameters() if p.numel() < expected[n].numel()]
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)),
        "gradients": far(grads, expected_grads),
        "trained": far(trained, expected) if trained else 0.0,  # Rank 0 has the whole state.
        "divided": len(divided),
    }


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    world = join()
    found: dict[str, Any] = {}
    for text in cases:
        try:
            found[text] = compared(text, world)
        except OutsizeError as refused:
            found[text] = {"refused": str(refused)}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
