"""Refuses a model that another library has already prepared to train over devices, or by each sample.

Such a wrapper communicates in its own forward and backward, on all ranks at once. In a pipeline each rank has
other stages, so a rank would wait in the backward for a call that the others never make. By what they hold:

    holds a process group, and all its weights belong to one child    DistributedDataParallel, FSDP, an engine
    has its weights divided by FSDP2                                   fully_shard
    copies the model to several devices at each call                   DataParallel

Hooks that give a weight the gradient of each sample (`grad_sample`, of opacus and others) look at the
backward of a whole batch through the whole model, and their optimizers read that in place of `grad`.
"""

from __future__ import annotations

import sys
from typing import Final

import torch.distributed as dist
from torch import nn

from outsize.errors import BadOption


def insist_on_unwrapped(model: nn.Module) -> None:
    """Raises BadOption for a model that is, or has within it, a wrapper which trains over devices by itself.

    So is one whose weights have a gradient for each sample. All ranks have the same model, so the error is
    the same on each of them.
    """
    _insist_on_summed_gradients(model)
    for fqn, module in model.named_modules():
        what = _own_parallelism(module)
        if what is not None:
            error = BadOption(
                f"{f'the part {fqn!r} of the model' if fqn else 'the model'} is a {type(module).__name__}, "
                f"which {what}, as outsize does",
                numbers="both would divide one training, and wait for each other",
                next_step=_next_step(fqn, module),
            )
            raise error.on_all_ranks()


def _insist_on_summed_gradients(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    by_sample = [name for name, weight in weights.items() if hasattr(weight, "grad_sample")]
    if by_sample:
        error = BadOption(
            "hooks give the weights a gradient for each sample (grad_sample), and a pipeline sums those of a "
            "microbatch, stage by stage",
            numbers=f"{len(by_sample)} of {len(weights)} weights of the {type(model).__name__}, the first is "
            f"{by_sample[0]}",
            next_step="train without outsize where each sample has to be clipped (differential privacy), or "
            "pass the model without these hooks; clip_norm=1.0 then clips the whole batch",
        )
        raise error.on_all_ranks()


def _own_parallelism(module: nn.Module) -> str | None:
    """Returns what a wrapper does over devices; None for any other module."""
    if isinstance(module, nn.DataParallel):
        return "copies the model to several devices at each call"
    if _is_fully_sharded(module):
        return "divides weights over processes (FSDP)"
    holds_group = dist.is_available() and any(isinstance(v, dist.ProcessGroup) for v in vars(module).values())
    if holds_group and _only_child(module) is not None:
        return "adds up gradients over its own process group"
    return None


def _only_child(module: nn.Module) -> str | None:
    """Returns the name of the child to which all weights of a module belong."""
    weights = set(module.parameters())
    return next(
        (n for n, child in module.named_children() if weights and weights == {*child.parameters()}), None
    )


_DIVIDES: Final = "axes={'dp_replicate': 2} or {'dp_shard': 2} divides the batch"


def _next_step(fqn: str, module: nn.Module) -> str:
    child = _only_child(module)
    if _is_fully_sharded(module) or child is None:
        return "leave out fully_shard, and pass axes={'dp_shard': 2}, of devices that share the weights"
    inner = ".".join(part for part in ("model", fqn, child) if part)
    if fqn:
        return f"put {inner} in the place of its wrapper; {_DIVIDES}"
    return f"pass {inner} in place of model; {_DIVIDES}"


def _is_fully_sharded(module: nn.Module) -> bool:
    """Tells whether fully_shard has divided a module; then FSDP is loaded, a second of importing."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is None or "FSDPModule" not in vars(loaded):  # `outsize fit` has a stand-in there
        return False
    from outsize.run.moves.fsdp import is_fully_sharded

    return is_fully_sharded(module)
