"""Clip by global norm over parameters that live on several ranks, bit-equal to one process.

`torch.nn.utils.clip_grad_norm_` takes the norm of the vector of per-parameter norms, in the order of the
parameters. Each rank fills in the norms of its own parameters, the rest is zero, the sum over ranks is
exact, and the same vector norm follows everywhere. A tied parameter has one owner and counts once. Where
ranks have parts of a parameter (tensor parallelism), the squares of their norms are added first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outsize.run.spmd import local_of, norms_of_shards
from outsize.train.crew import Crew
from outsize.train.tensor_ranks import TensorRanks


def clip_by_global_norm(
    owned: Mapping[str, nn.Parameter],
    everything: Mapping[str, nn.Parameter],
    max_norm: float,
    crew: Crew,
    tensor: TensorRanks | None = None,
) -> Tensor:
    """Scale the owned gradients in place; returns the norm before clipping (0-dim).

    `everything` are the model's parameters in its order, those of other ranks on meta.
    """
    index = {name: i for i, name in enumerate(everything)}
    # fp64 holds the norms of every dtype exactly.
    norms, present = torch.zeros(2, len(index), dtype=torch.float64)
    for name, parameter in owned.items():
        if parameter.grad is not None:
            norms[index[name]] = torch.linalg.vector_norm(local_of(parameter.grad))
            present[index[name]] = 1.0
    norms = norms_of_shards(norms, {index[n]: p.grad for n, p in owned.items() if p.grad is not None})
    if tensor is not None:
        norms = tensor.norms(norms, list(index))
    norms, present = crew.sum(norms), crew.sum(present)
    dtypes = [p.dtype for p, there in zip(everything.values(), present, strict=True) if there]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
    total = torch.linalg.vector_norm(norms[present.bool()].to(dtype))
    torch.nn.utils.clip_grads_with_norm_(owned.values(), max_norm, total)
    return total
