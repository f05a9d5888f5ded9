"""Clips by global norm over parameters that live on several ranks, bit-equal to one process.

In one process torch's own functions are called. Over processes each rank's device computes the norms of its
gradients, and one sum over the ranks' devices makes them known to all; the host waits for no device:

`torch.nn.utils.clip_grad_norm_` takes the norm of the vector of per-parameter norms, in the order of the
parameters. Each rank fills in the norms of its own parameters and zeros elsewhere; the sum over ranks is
exact, so every rank computes the same norm of that vector. A tied parameter has one owner and counts once.
Where ranks hold parts of a parameter (tensor parallelism), the squares of their norms are added first. Where
the optimizer has stepped already (run/host/speculative_step.py), the norm decides whether that step is kept.
Where the norm is known on the host and small enough, no gradient is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from outsize.device.accelerators import is_accelerator, widest_float
from outsize.device.readback import launched_to
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.run.collectives.tensor_parallel import local_of, mesh_of, norms_of_shards
from outsize.run.host.speculative_step import Speculation
from outsize.train.context.options import Clipping
from outsize.train.crew.crew import Crew, LocalCrew
from outsize.train.ranks.divided_weights import DividedWeights


def clip_by_global_norm(
    owned: Mapping[str, nn.Parameter],
    everything: Mapping[str, nn.Parameter],
    max_norm: float,
    crew: Crew,
    tensor: DividedWeights | None = None,
    speculation: Speculation | None = None,
) -> Tensor:
    """Scales the owned gradients in place; returns the norm before clipping (0-dim).

    `everything` holds the model's parameters in its order, those of other ranks on meta. `speculation` holds
    steps that have been taken already: they are kept when no gradient has to be scaled, else undone.
    """
    if isinstance(crew, LocalCrew) and speculation is None:  # all gradients are here
        total = _total_norm([p for p in everything.values() if p.grad is not None])
        _scale(everything.values(), max_norm, total)
        return total
    names, place = list(owned), crew.gradient_device
    gradients = [parameter.grad for parameter in owned.values()]
    norms = _norms(list(owned.values()), {} if speculation is None else speculation.norms, place)
    norms = norms_of_shards(norms, gradients)
    norms = norms if tensor is None else tensor.norms(norms, names)
    # Hosts know which gradients there are, and devices know their norms.
    has_gradient = {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    present = crew.sum(torch.tensor([float(name in has_gradient) for name in everything]))
    every_norm = crew.sum(_in_order(everything, dict(zip(names, norms, strict=True)), place))
    total = _norm_of_norms(every_norm, present.tolist(), [p.dtype for p in everything.values()])
    if speculation is not None:  # torch's coefficient; with NaN the step is undone
        speculation.settle(stands=bool(max_norm / (total + 1e-6) >= 1))
    # torch scales many gradients at once, but not of several meshes (experts have another than the rest).
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in owned.values():
        by_mesh.setdefault(None if parameter.grad is None else mesh_of(parameter.grad), []).append(parameter)
    for parameters in by_mesh.values():
        _scale(parameters, max_norm, total)
    return total


def _scale(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scales gradients as torch does; where the host knows that it would multiply with 1, a pass over all of
    them that changes no bit, it leaves that out.
    """
    if is_accelerator(total.device) or not bool(max_norm / (total + 1e-6) >= 1):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)


def _total_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Returns torch's norm of gradients that are on one device, which others have to the bit.

    torch itself adds up the norms of one device after those of another, so its sum depends on the layout.
    """
    places = list(dict.fromkeys(parameter.device for parameter in parameters))
    if len(places) < 2:
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norms: dict[nn.Parameter, Tensor] = {}
    for place in places:
        here = [parameter for parameter in parameters if parameter.device == place]
        norms |= dict(zip(here, _norms(here, {}, place), strict=True))
    return torch.linalg.vector_norm(torch.stack([norms[parameter].to(places[0]) for parameter in parameters]))


def _norms(
    parameters: Sequence[nn.Parameter], known: Mapping[nn.Parameter, Tensor], place: torch.device
) -> list[Tensor]:
    """Returns the norm (0-dim) of each parameter's gradient on this rank, 0 where there is none.

    They are computed where the gradients are, as torch's clipping does: on an accelerator all of a dtype at
    once, else one by one.
    """
    zero = torch.zeros((), device=place)
    norms = [known.get(parameter, zero) for parameter in parameters]
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for at, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter not in known:
            # A gradient of a split model would look for the norms of other ranks by itself.
            own = local_of(parameter.grad).as_subclass(Tensor)
            by_kind.setdefault((own.device, own.dtype), []).append((at, own))
    for (device, _), members in by_kind.items():
        gradients = [gradient for _, gradient in members]
        if is_accelerator(device):
            found = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
        else:
            found = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        for (at, _), norm in zip(members, found, strict=True):
            norms[at] = norm if device == place else launched_to(place, norm)
    return norms


def _in_order(names: Iterable[str], norms: Mapping[str, Tensor], place: torch.device) -> Tensor:
    """Returns the norms in the order of the names, in fp64, which holds those of every dtype exactly; 0 for
    the names of other ranks.
    """
    parts: list[Tensor] = []
    for is_own, run in groupby(names, key=norms.__contains__):
        members = list(run)
        own = (
            torch.stack([norms[name] for name in members])
            if is_own
            else torch.zeros(len(members), device=place)
        )
        parts.append(own.to(place, widest_float(place)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=widest_float(place), device=place)


def _norm_of_norms(norms: Tensor, present: Sequence[float], dtypes: Sequence[torch.dtype]) -> Tensor:
    """Returns the norm of the norms of the gradients that some rank has."""
    used = [dtype for dtype, has_gradient in zip(dtypes, present, strict=True) if has_gradient]
    dtype = functools.reduce(torch.promote_types, used) if used else torch.get_default_dtype()
    if len(used) < len(dtypes):
        kept = [norm for norm, has_gradient in zip(norms.unbind(), present, strict=True) if has_gradient]
        norms = torch.stack(kept) if kept else norms[:0]
    return torch.linalg.vector_norm(norms.to(dtype))


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
