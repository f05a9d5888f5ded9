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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.axes.registry import PARTS
from outsize.errors import BadOption, WorldMismatch
from outsize.run.collectives.tensor_parallel import (
    AskingShard,
    asking,
    full_of,
    local_of,
    part_number,
    plain_shard,
)
from outsize.run.transport.control_messages import all_gather_json, all_gather_values
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.train.context.run_context import RunContext
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.split.gradient_sums import BackwardArrivals
from outsize.train.split.optimizers import OptimizerCheck

_UNSCALE: Final[Any] = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
_FOREACH_NORM: Final[Any] = getattr(torch, "_foreach_norm", None)
_NORMS: Final = frozenset({torch.linalg.vector_norm, torch.norm, Tensor.norm})
_STACKS: Final = frozenset({torch.stack, torch.cat})
_MARKED: Final = "_has_rank_gradients"
_MOVES: Final = frozenset({Tensor.to, Tensor.cpu, Tensor.float, Tensor.double, Tensor.detach})


_Place = tuple[int, tuple[int, ...]]
"""The number of a gradient in the model's order, and where the ranks stand that have this part of it."""


@final
@dataclass(frozen=True, slots=True)
class GradientRanks:
    """The ranks whose gradients, or parts of them, together are the model's, and those of the run."""

    holders: RankGroup
    every: RankGroup


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Which gradients of the model these are the norms of; None: of a tensor that all ranks have.

    `is_known` tells whether the norm of one whole gradient is known, or can be asked for.
    """

    places: tuple[_Place | None, ...]
    ranks: GradientRanks
    is_known: bool = True


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
        self._check: OptimizerCheck | None = None

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
        RankCollectives.of(mesh.group.of_tensor(has_changed)).all_reduce(has_changed, dist.ReduceOp.MAX)
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
        """Marks this rank's gradients as they arrive, from now on; it may be called again.

        Optimizers that step them are looked at, too.
        """
        mesh = self._run.mesh
        if mesh is None or not self._ownership.settled:
            return
        if self._check is None:
            self._check = OptimizerCheck(self._run, self._ownership)
        own = list(self._ownership.own_parameters())
        if not any(_is_unmarked(weight) for _, weight in (*own, (None, self.stand_in))):
            return
        numbers = {name: number for number, (name, _) in enumerate(self._run.model.named_parameters())}
        is_divided = bool(self._run.plan.axes.used_of(PARTS))
        holders = mesh.holding(whole_model=True) if is_divided else mesh.pipeline
        ranks = GradientRanks(holders, mesh.group)
        for name, weight in own:
            divided = self._ownership.part_of(name)
            own = () if divided is None else (divided,)
            place = numbers[name], (*own, *part_number(weight))
            _mark(weight, _Part((place,), ranks, is_known=divided is None))
        _mark(self.stand_in, _Part(((-1, ()),), ranks))

    def arrivals(self, calls: int) -> BackwardArrivals:
        """Returns what knows of how many calls the backward has come, for an optimizer's step to ask."""
        made = BackwardArrivals(calls)
        if self._check is not None:
            self._check.asks(made)
        return made

    def touch_stand_in(self) -> None:
        """Gives the stand-in its gradient, which has no elements."""
        torch.zeros_like(self.stand_in).mul(self.stand_in).sum().backward()


def _is_unmarked(weight: nn.Parameter) -> bool:
    # A weight that stands there for a functional call has no gradient of its own.
    return weight.requires_grad and weight.is_leaf and _MARKED not in vars(weight)


def _mark(weight: nn.Parameter, part: _Part) -> None:
    if _is_unmarked(weight):
        vars(weight)[_MARKED] = True
        weight.register_post_accumulate_grad_hook(_Mark(part))


@final
class _Mark:
    """Marks the gradient of one parameter, once it has its value."""

    def __init__(self, part: _Part) -> None:
        self._part = part

    def __call__(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is None or _part_of(gradient) is not None:
            return
        marked = gradient.as_subclass(RankGradient) if type(gradient) is Tensor else asking(gradient, _answer)
        if marked is not gradient:
            vars(marked)["part"] = self._part
            weight.grad = marked


def _plain(value: Any) -> Any:
    if isinstance(value, RankGradient | RankNorm):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else plain_shard(value)


def _part_of(value: Any) -> _Part | None:
    return vars(value).get("part") if isinstance(value, RankGradient | RankNorm | AskingShard) else None


def _norm(values: Tensor, part: _Part, whole: Callable[[], Tensor] | None = None) -> RankNorm:
    norm = values.as_subclass(RankNorm)
    vars(norm).update(part=part, whole=whole)
    return norm


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes as torch does; see the head of this file for norms and infinities."""
    with torch._C.DisableTorchFunctionSubclass():
        first: Any = args[0] if args else None
        if func is _UNSCALE:
            part = next(part for each in first if (part := _part_of(each)) is not None)
            found = func([local_of(_plain(each)) for each in first], *args[1:], **kwargs)
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=part.ranks.every.of_tensor(args[1]))
            return found
        if func is _FOREACH_NORM:
            return type(first)(_norm_of(torch.linalg.vector_norm, each, args[1:], kwargs) for each in first)
        if func in _NORMS:
            return _norm_of(func, first, args[1:], kwargs)
        plain = _plain(args)
        found = func(*plain, **{name: _plain(value) for name, value in kwargs.items()})
        # What a call has changed in place is the argument itself.
        return next((given for given, each in zip(args, plain, strict=True) if found is each), _plain(found))


def _norm_of(func: Any, gradient: Tensor, further: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Returns the norm of a gradient; of one that ranks have parts of, that of this rank's part, which knows
    the whole one.
    """
    part, plain = _part_of(gradient), _plain(gradient)
    own = local_of(plain)
    norm = func(own, *further, **named) if own.numel() else own.new_zeros(())
    if part is None or norm.ndim:
        return func(plain, *further, **named)
    if not part.is_known:
        return _norm(norm, part, partial(_refuse, part))
    return _norm(norm, part, None if own is plain else lambda: full_of(func(plain, *further, **named)))


def _refuse(part: _Part) -> NoReturn:
    raise BadOption(
        "a rank has a part of this gradient, whose norm is not that of the whole",
        numbers=f"gradient {part.places[0]} of the model",
        next_step="torch.nn.utils.get_total_norm or clip_grad_norm_ of all gradients, on every rank",
    )


@final
class RankGradient(Tensor):
    """The gradient of a parameter that this rank has and others do not."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns what `_answer` does."""
        return _answer(func, args, kwargs or {})


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
            part, further, named = _part_of(first), args[1:], kwargs or {}
            if func in _NORMS and part is not None and first.ndim == 1:

                def again(norms: Tensor) -> Tensor:
                    return func(norms, *further, **named)

                return again(_gathered(_plain(first), part, again))
            if func in _STACKS:
                found = func(*args, **named)
                parts = [_part_of(each) for each in first]
                ranks = next(part.ranks for part in parts if part is not None)
                places = [n for part in parts for n in ((None,) if part is None else part.places)]
                return _norm(_plain(found), _Part(tuple(places), ranks))
            if func in _MOVES and part is not None:
                return _norm(_plain(func(*args, **named)), part, vars(first)["whole"])
            return _plain(func(*map(_settled, args), **named))


def _settled(value: Any) -> Any:
    """Returns the norm of a whole gradient; all ranks that have parts of it ask for it."""
    whole = vars(value).get("whole") if isinstance(value, RankNorm) else None
    return value if whole is None else whole()


def _gathered(norms: Tensor, part: _Part, joined: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the norms of all ranks in the model's order, between those of tensors that all ranks have.

    `joined` makes the norm of a gradient from those of its parts.
    """
    own = [(place, norm) for place, norm in zip(part.places, norms, strict=True) if place is not None]
    first = next(at for at, place in enumerate(part.places) if place is not None)
    shared = [(at, norm) for at, norm in enumerate(norms) if part.places[at] is None]
    ranks = all_gather_values(own, part.ranks.holders.host, "norms of gradients")
    # Ranks that have the same part have the same norm of it.
    every: dict[_Place, Tensor] = {place: norm for rank in ranks for place, norm in rank if place[0] >= 0}
    ordered: list[Tensor] = []
    for _, places in groupby(sorted(every), key=itemgetter(0)):
        parts = [every[place].to(norms.device) for place in places]
        ordered.append(parts[0] if len(parts) == 1 else joined(torch.stack(parts)))
    before = [norm for at, norm in shared if at < first]
    return torch.stack([*before, *ordered, *(norm for at, norm in shared if at > first)])
