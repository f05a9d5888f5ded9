"""Clips by global norm over parameters that live on several ranks, bit-equal to one process.

In one process torch's own functions are called: on devices they take the norms of all gradients at once, and
the host waits for none of them. Over processes, numbers are added on the host:

`torch.nn.utils.clip_grad_norm_` takes the norm of the vector of per-parameter norms, in the order of the
parameters. Each rank fills in the norms of its own parameters and zeros elsewhere; the sum over ranks is
exact, so every rank computes the same norm of that vector. A tied parameter has one owner and counts once.
Where ranks hold parts of a parameter (tensor parallelism), the squares of their norms are added first. Where
the optimizer has stepped already (run/host/speculative_step.py), the norm decides whether that step is kept.
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
from outsize.run.host.speculative_step import Speculation
from outsize.run.tensor_parallel.collectives import local_of, norms_of_shards
from outsize.train.crew.crew import Crew, LocalCrew
from outsize.train.ranks.tensor_parallel import TensorRanks

Clipping = Literal["exact", "speculative"]


def clip_by_global_norm(
    owned: Mapping[str, nn.Parameter],
    everything: Mapping[str, nn.Parameter],
    max_norm: float,
    crew: Crew,
    tensor: TensorRanks | None = None,
    speculation: Speculation | None = None,
) -> Tensor:
    """Scales the owned gradients in place; returns the norm before clipping (0-dim).

    `everything` holds the model's parameters in its order, those of other ranks on meta. `speculation` holds
    steps that have been taken already: they are kept when no gradient has to be scaled, else undone.
    """
    if isinstance(crew, LocalCrew) and speculation is None:  # all gradients are here: torch's own norm
        total = nn.utils.get_total_norm([p.grad for p in everything.values() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(everything.values(), max_norm, total)
        return total
    known_norms = {} if speculation is None else speculation.norms
    position_of = {name: i for i, name in enumerate(everything)}
    # fp64 holds the norms of every dtype exactly.
    norms, present = torch.zeros(2, len(position_of), dtype=torch.float64)
    for name, parameter in owned.items():
        if parameter.grad is not None:
            norm = known_norms.get(parameter)
            norms[position_of[name]] = (
                torch.linalg.vector_norm(local_of(parameter.grad)) if norm is None else norm
            )
            present[position_of[name]] = 1.0
    norms = norms_of_shards(norms, {position_of[n]: p.grad for n, p in owned.items() if p.grad is not None})
    if tensor is not None:
        norms = tensor.norms(norms, list(position_of))
    norms, present = crew.sum(norms), crew.sum(present)
    dtypes = [p.dtype for p, has_grad in zip(everything.values(), present, strict=True) if has_grad]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
    total = torch.linalg.vector_norm(norms[present.bool()].to(dtype))
    if speculation is not None:  # torch's coefficient; with NaN the step is undone
        speculation.settle(stands=bool(max_norm / (total + 1e-6) >= 1))
    torch.nn.utils.clip_grads_with_norm_(owned.values(), max_norm, total)
    return total


def speculation_for(
    clipping: Clipping, clip_norm: float | None, scaler: GradScaler | None, crew: Crew, plan: Plan
) -> Speculation | None:
    """Returns the object that can undo steps; None: each step waits for its norm.

    Raises BadOption where no step could be taken before the norm is known.
    """
    if clipping == "exact":
        return None
    if clipping != "speculative":
        raise BadOption(
            f"clipping={clipping!r}", numbers="'exact' or 'speculative'", next_step='clipping="exact"'
        )
    speculation = None if clip_norm is None or scaler is not None else crew.moves.speculation()
    if speculation is None:
        raise BadOption(
            f"clipping={clipping!r} is for steps that begin while gradients land on the host",
            numbers=f"clip_norm={clip_norm}, weights {plan.weights!r}, scaler {scaler is not None}",
            next_step='clipping="exact", or clip_norm=1.0 and a plan with weights="host" or "host-optimizer"',
        )
    return speculation
