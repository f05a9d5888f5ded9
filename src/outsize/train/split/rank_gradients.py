"""Problem: `clip_grad_norm_(model.parameters(), 1.0)` sees the gradients of one rank, and would clip by them.

    rank 0    norms of 3 gradients ─┐ stacked    gathered: norms of all 5, in the model's order    one norm
    rank 1    norms of 2 gradients ─┘            gathered: the same                                of norms

Each `.grad` of a split model over processes is a RankGradient. It computes as any tensor does; but the norm
of one is a RankNorm, a stack of those knows that it is a part, and the norm of that stack is the one of all
ranks, in the model's order, so with the bits of one process. A GradScaler's look for infinities is made one
over all ranks in the same way. So torch's own functions give what they give for the whole model:
`clip_grad_norm_`, `get_total_norm`, `GradScaler.unscale_`. All ranks call them alike; a rank without trained
weights has a gradient without elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BadOption, WorldMismatch
from outsize.run.transport.control_messages import all_gather_json, all_gather_values
from outsize.run.transport.groups import RankGroup
from outsize.train.context.run_context import RunContext
from outsize.train.crew.weight_ownership import Ownership

_UNSCALE: Final[Any] = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
_FOREACH_NORM: Final[Any] = getattr(torch, "_foreach_norm", None)
_NORMS: Final = frozenset({torch.linalg.vector_norm, torch.norm, Tensor.norm})
_STACKS: Final = frozenset({torch.stack, torch.cat})
_MARKED: Final = "_has_rank_gradients"
_MOVES: Final = frozenset({Tensor.to, Tensor.cpu, Tensor.float, Tensor.double, Tensor.detach})


@final
@dataclass(frozen=True, slots=True)
class GradientRanks:
    """The ranks of the pipeline, whose gradients together are the model's, and those of the run.

    `are_parts`: several ranks have parts of one gradient, by an axis that divides weights.
    """

    pipeline: RankGroup
    every: RankGroup
    are_parts: bool = False


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Which gradients of the model these are the norms of: by their numbers in its order; None: of a tensor
    that all ranks have.
    """

    numbers: tuple[int | None, ...]
    ranks: GradientRanks


@final
class RankGradients:
    """Lets torch's functions see which gradients of a split model other ranks do not have.

    `stand_in` is a parameter without elements, for a rank that trains no weights: an optimizer refuses an
    empty list, and what sums over ranks must find a gradient on each.
    """

    def __init__(self, run: RunContext, ownership: Ownership) -> None:
        self._run, self._ownership = run, ownership
        self.stand_in = nn.Parameter(torch.zeros(0, device=run.device))
        self._told: dict[str, bool] | None = None

    def agree_on_trained(self) -> None:
        """Tells this rank which weights of the others get gradients, where that has changed on any of them.

        A rank's own loop freezes what `model.parameters()` lists there; what its stage receives and sends
        depends on the others' as well. Every rank calls this before a call. Raises WorldMismatch.
        """
        mesh = self._run.mesh
        if mesh is None or not self._ownership.settled:
            return
        own = {name: weight.requires_grad for name, weight in self._ownership.own_parameters()}
        has_changed = torch.tensor([int(own != self._told)])
        dist.all_reduce(has_changed, dist.ReduceOp.MAX, group=mesh.group.of_tensor(has_changed))
        if not has_changed.item():
            return
        self._told = own
        owners: dict[str, tuple[int, bool]] = {}
        every: list[dict[str, bool]] = all_gather_json(own, mesh.group.host, "which weights get gradients")
        for rank, flags in enumerate(every):
            for name, flag in flags.items():
                first, expected = owners.setdefault(name, (rank, flag))
                if flag != expected:
                    raise WorldMismatch(
                        f"{name} gets a gradient on one rank and none on another that has it, too",
                        numbers=f"requires_grad is {expected} on rank {first}, {flag} on rank {rank}",
                        next_step="freeze weights by their names, alike on every rank",
                    )
        for name, weight in self._run.model.named_parameters():
            if name in owners and weight.requires_grad != owners[name][1]:
                weight.requires_grad_(owners[name][1])

    def mark(self) -> None:
        """Marks this rank's gradients as they arrive, from now on; it may be called again."""
        mesh = self._run.mesh
        if mesh is None or not self._ownership.settled:
            return
        numbers = {name: number for number, (name, _) in enumerate(self._run.model.named_parameters())}
        ranks = GradientRanks(mesh.pipeline, mesh.group)
        parts = replace(ranks, are_parts=True)
        for name, weight in self._ownership.own_parameters():
            is_divided = self._ownership.division(name) is not None
            _mark(weight, _Part((numbers[name],), parts if is_divided else ranks))
        _mark(self.stand_in, _Part((-1,), ranks))

    def touch_stand_in(self) -> None:
        """Gives the stand-in its gradient, which has no elements."""
        torch.zeros_like(self.stand_in).mul(self.stand_in).sum().backward()


def _mark(weight: nn.Parameter, part: _Part) -> None:
    # A weight that stands there for a functional call has no gradient of its own.
    if weight.requires_grad and weight.is_leaf and _MARKED not in vars(weight):
        vars(weight)[_MARKED] = True
        weight.register_post_accumulate_grad_hook(_Mark(part))


@final
class _Mark:
    """Marks the gradient of one parameter, once it has its value."""

    def __init__(self, part: _Part) -> None:
        self._part = part

    def __call__(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is not None and type(gradient) is Tensor:
            marked = gradient.as_subclass(RankGradient)
            vars(marked)["part"] = self._part
            weight.grad = marked


def _plain(value: Any) -> Any:
    if isinstance(value, RankGradient | RankNorm):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _part_of(value: Any) -> _Part | None:
    return vars(value).get("part") if isinstance(value, RankGradient | RankNorm) else None


def _norm(values: Tensor, part: _Part) -> RankNorm:
    if part.ranks.are_parts:
        raise BadOption(
            "a rank has a part of this gradient, whose norm is not that of the whole",
            numbers=f"gradient {part.numbers[0]} of the model",
            next_step="model.clip_grad_norm_(1.0); float('inf') measures without clipping",
        )
    norm = values.as_subclass(RankNorm)
    vars(norm)["part"] = part
    return norm


@final
class RankGradient(Tensor):
    """The gradient of a parameter that this rank has and others do not."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes as torch does; see the head of this file for norms and infinities. Raises BadOption."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            first: Any = args[0] if args else None
            if func is _UNSCALE:
                part = next(part for each in args[0] if (part := _part_of(each)) is not None)
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group=part.ranks.every.of_tensor(args[1]))
                return found
            if func is _FOREACH_NORM:
                pairs = [(norm, _part_of(each)) for norm, each in zip(found, args[0], strict=True)]
                return type(found)(norm if part is None else _norm(norm, part) for norm, part in pairs)
            part = _part_of(first)
            if func in _NORMS and part is not None and isinstance(found, Tensor) and found.ndim == 0:
                return _norm(found, part)
            return _unmarked(found, args)


@final
class RankNorm(Tensor):
    """The norm of a RankGradient, or a stack of such norms."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes as torch does; a norm of norms is one over all ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            first: Any = args[0] if args else None
            if func in _NORMS and (part := _part_of(first)) is not None and first.ndim == 1:
                return func(_gathered(_plain(first), part), *args[1:], **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            if func in _STACKS:
                parts = [_part_of(each) for each in first]
                ranks = next(part.ranks for part in parts if part is not None)
                numbers = [n for part in parts for n in ((None,) if part is None else part.numbers)]
                return _norm(_plain(found), _Part(tuple(numbers), ranks))
            part = _part_of(first)
            if func in _MOVES and part is not None and isinstance(found, Tensor):
                return _norm(_plain(found), part)
            return _unmarked(found, args)


def _unmarked(found: Any, args: tuple[Any, ...]) -> Any:
    """Returns results as plain tensors, but the argument itself where a call has changed it in place."""
    if any(found is each for each in args):
        return found
    return _plain(found)


def _gathered(norms: Tensor, part: _Part) -> Tensor:
    """Returns the norms of all ranks in the model's order, between those of tensors that all ranks have."""
    own = [(number, norm) for number, norm in zip(part.numbers, norms, strict=True) if number is not None]
    first = next(at for at, number in enumerate(part.numbers) if number is not None)
    shared = [(at, norm) for at, norm in enumerate(norms) if part.numbers[at] is None]
    every = [
        pair
        for rank in all_gather_values(own, part.ranks.pipeline.host, "norms of gradients")
        for pair in rank
    ]
    every.sort(key=lambda pair: pair[0])
    ordered = [norm.to(norms.device) for number, norm in every if number >= 0]
    before = [norm for at, norm in shared if at < first]
    return torch.stack([*before, *ordered, *(norm for at, norm in shared if at > first)])
