"""Clip by global norm over parameters that live on several ranks, bit-equal to one process.

`torch.nn.utils.clip_grad_norm_` takes the norm of the vector of per-parameter norms, in the order of the
parameters. Each rank fills in the norms of its own parameters, the rest is zero, the sum over ranks is
exact, and the same vector norm follows everywhere. A tied parameter has one owner and counts once. Where
ranks have parts of a parameter (tensor parallelism), the squares of their norms are added first. Where the
optimizer has stepped already (run/speculation.py), the norm decides whether that stands.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.run.speculation import Speculation
from outsize.run.spmd import local_of, norms_of_shards
from outsize.train.crew import Crew
from outsize.train.tensor_ranks import TensorRanks

Clipping = Literal["exact", "speculative"]


def clip_by_global_norm(
    owned: Mapping[str, nn.Parameter],
    everything: Mapping[str, nn.Parameter],
    max_norm: float,
    crew: Crew,
    tensor: TensorRanks | None = None,
    speculation: Speculation | None = None,
) -> Tensor:
    """Scale the owned gradients in place; returns the norm before clipping (0-dim).

    `everything` are the model's parameters in its order, those of other ranks on meta. `speculation`: steps
    that stand where nothing is scaled, and have no gradients then; else they are taken back.
    """
    known = {} if speculation is None else speculation.norms
    index = {name: i for i, name in enumerate(everything)}
    # fp64 holds the norms of every dtype exactly.
    norms, present = torch.zeros(2, len(index), dtype=torch.float64)
    for name, parameter in owned.items():
        if parameter.grad is not None:
            norm = known.get(parameter)
            norms[index[name]] = torch.linalg.vector_norm(local_of(parameter.grad)) if norm is None else norm
            present[index[name]] = 1.0
    norms = norms_of_shards(norms, {index[n]: p.grad for n, p in owned.items() if p.grad is not None})
    if tensor is not None:
        norms = tensor.norms(norms, list(index))
    norms, present = crew.sum(norms), crew.sum(present)
    dtypes = [p.dtype for p, there in zip(everything.values(), present, strict=True) if there]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
    total = torch.linalg.vector_norm(norms[present.bool()].to(dtype))
    if speculation is not None:  # torch's coefficient; NaN does not stand
        speculation.settle(stands=bool(max_norm / (total + 1e-6) >= 1))
    torch.nn.utils.clip_grads_with_norm_(owned.values(), max_norm, total)
    return total


def speculation_for(
    clipping: Clipping, clip_norm: float | None, scaler: GradScaler | None, crew: Crew, plan: Plan
) -> Speculation | None:
    """What takes steps back; None: each waits for its norm. Raises BadOption where none could be taken."""
    if clipping == "exact":
        return None
    if clipping != "speculative":
        raise BadOption(
            f"clipping={clipping!r}", numbers="'exact' or 'speculative'", next_step='clipping="exact"'
        )
    found = None if clip_norm is None or scaler is not None else crew.moves.speculation()
    if found is None:
        raise BadOption(
            f"clipping={clipping!r} is for steps that begin while gradients land on the host",
            numbers=f"clip_norm={clip_norm}, weights {plan.weights!r}, scaler {scaler is not None}",
            next_step='clipping="exact", or clip_norm=1.0 and a plan with weights="host" or "host-optimizer"',
        )
    return found
