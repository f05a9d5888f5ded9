"""Models that cannot be trained as they are handed over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from mistake import Mistake, engine, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """Opens a default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _within_group(wrap: Any) -> None:
    with _group():
        engine(wrap(mlp()))


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def _in_parts(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(model[:-1], DistributedDataParallel(model[-1]))


@final
class _Engine(nn.Module):
    """What DeepSpeed's engine holds: the model, and the group over which it adds up gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.data_parallel_group = model, dist.group.WORLD

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def _by_sample(model: nn.Module) -> nn.Module:
    """As opacus' GradSampleModule leaves a model: its hooks fill an attribute of each weight."""
    for weight in model.parameters():
        weight.__dict__["grad_sample"] = None
    return model


def _fsdp(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


MODEL_MISTAKES = {
    "a model in DistributedDataParallel": Mistake(
        lambda: _within_group(DistributedDataParallel),
        "the model is a DistributedDataParallel, which adds up gradients over its own process group",
        "pass model.module in place of model; axes={'dp_replicate': 2}",
    ),
    "a part in DistributedDataParallel": Mistake(
        lambda: _within_group(_in_parts),
        "the part '1' of the model is a DistributedDataParallel",
        "put model.1.module in the place of its wrapper",
    ),
    "a model in FSDP": Mistake(
        lambda: _within_group(_fsdp),
        "the model is a FullyShardedDataParallel",
        "in place of model; axes={'dp_replicate'",
    ),
    "a model in FSDP2": Mistake(
        lambda: _within_group(_sharded),
        "divides weights over processes (FSDP), as outsize does",
        "leave out fully_shard, and pass axes={'dp_shard': 2}",
    ),
    "a model in an engine": Mistake(
        lambda: _within_group(_Engine),
        "the model is a _Engine, which adds up gradients over its own process group",
        "pass model.module in place of model",
    ),
    "a model in DataParallel": Mistake(
        lambda: engine(nn.DataParallel(mlp())),
        "the model is a DataParallel, which copies the model to several devices at each call",
        "pass model.module in place of model",
    ),
    "a model with gradients by sample": Mistake(
        lambda: engine(_by_sample(mlp())),
        "hooks give the weights a gradient for each sample (grad_sample)",
        "train without outsize where each sample has to be clipped",
    ),
    "a model without shapes": Mistake(
        lambda: engine(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.Linear(8, 4))),
        "the model has weights without a shape",
        "model(x) once under torch.no_grad()",
    ),
    "a function as the model": Mistake(
        lambda: engine(lambda x: x), "the model is a function, no torch.nn.Module", "pass the built module"
    ),
    "a class as the model": Mistake(
        lambda: engine(nn.Linear), "the model is a type, no torch.nn.Module", "pass the built module"
    ),
}
