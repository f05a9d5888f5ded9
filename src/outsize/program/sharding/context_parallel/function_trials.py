"""Problem: does a function of which no inside is recorded compute each row from the same row of its
arguments?

A custom autograd function (a GELU with a backward of its own, a fused norm with its weight) and a scripted
one are one instruction each. Such a function is tried on small tensors: on all rows, and on two blocks of
them. Results and gradients of divided arguments have to be those of the blocks one after the other, and the
gradients of whole arguments, such as weights, the sum of the blocks': then ranks that hold rows compute what
one device does. What raises an error in the trial, or draws random numbers, is not accepted.

Complexity: three runs on six rows. Oracle:
tests/unit/program/sharding/context_parallel/test_function_trials.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor

from outsize.program.sharding.rank_step import NotPropagated, Operand, RankStep, RuleInput
from outsize.program.sharding.share import Share
from outsize.program.tape import Meta, Ref, Weight
from outsize.program.tree import leaves

_BLOCKS: Final = (2, 4)
_ROWS: Final = sum(_BLOCKS)


def has_no_inside(target: object) -> bool:
    """Returns whether a target is `apply` of a custom autograd function, or a scripted function."""
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):
        return issubclass(owner, torch.autograd.Function)
    return isinstance(owner, torch.jit.ScriptFunction)


def follow_by_trial(call: RuleInput) -> RankStep:
    """Returns the step of a function that works on each row alone. Raises NotPropagated for any other."""
    instruction, shares = call.instruction, {*call.divided().values()}
    share, name = shares.pop(), instruction.name
    if shares or instruction.random or instruction.writes or instruction.kwargs:
        raise NotPropagated(f"{name} draws, writes, or has arguments that are divided differently")
    before = call.shape(next(iter(call.divided())))
    if any(after[: share.dim + 1] != before[: share.dim + 1] for after in call.results()):
        raise NotPropagated(f"{name} does not return the rows that it is given")
    if not any(_works_by_rows(call, share, dtype) for dtype in (torch.float64, torch.float32)):
        raise NotPropagated(f"{name} does not compute each row from that row alone, as a trial has shown")
    return call.same(share)


def _works_by_rows(call: RuleInput, share: Share, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    drawn = {o: _drawn(call, o, share.dim, dtype, generator) for o in dict.fromkeys(call.operands())}
    divided, rows = call.divided(), [*pairwise([0, *accumulate(_BLOCKS)])]
    within = 1e-10 if dtype == torch.float64 else 1e-4

    def block(start: int, stop: int) -> dict[Operand, Tensor]:
        return {o: _rows(x, share.dim, start, stop) if o in divided else x for o, x in drawn.items()}

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole = _run(call, drawn, share.dim, (0, _ROWS))
            parts = [_run(call, block(*each), share.dim, each) for each in rows]
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError):
            return False
    results = _joined([result for result, _ in parts], share.dim)
    if results is None or not _equal(whole[0], results, within):
        return False
    for operand, gradient in whole[1].items():
        each = [gradients[operand] for _, gradients in parts]
        if any((g is None) is not (gradient is None) for g in each):
            return False
        known = [g for g in each if g is not None]
        if gradient is None:
            continue
        summed = torch.cat(known, share.dim) if operand in divided else torch.stack(known).sum(0)
        if not _equal([gradient], [summed], within):
            return False
    return True


def _drawn(call: RuleInput, operand: Operand, dim: int, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Returns a value like the operand, with few samples and tokens where it is divided."""
    shape = [*call.shape(operand)]
    if call.share(operand) is not None:
        shape = [min(size, 2) if d < len(shape) - 1 else size for d, size in enumerate(shape)]
        shape[dim] = _ROWS
    like: Meta | None = call.metas[operand.slot] if isinstance(operand, Ref) else None
    if like is not None and not like.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=draw).to(like.dtype)
    return torch.randn(shape, generator=draw, dtype=dtype)


def _rows(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    return x.narrow(dim, start, stop - start).contiguous()


def _run(
    call: RuleInput, operands: dict[Operand, Tensor], dim: int, rows: tuple[int, int]
) -> tuple[list[Tensor], dict[Operand, Tensor | None]]:
    """Returns the results for these operands, and the gradients of those that have some."""
    own = {o: x.detach().clone().requires_grad_(x.is_floating_point()) for o, x in operands.items()}
    target: Any = call.instruction.target
    results = [*leaves(target(*(own[a] if isinstance(a, Ref | Weight) else a for a in call.args)))]
    if not all(isinstance(each, Tensor) and each.ndim > dim for each in results):
        raise TypeError("a result without rows")
    roots = [each for each in results if each.requires_grad]
    names = [operand for operand, x in own.items() if x.requires_grad]
    if not roots or not names:
        return results, {}
    given = [_rows(_gradient(each, dim), dim, *rows) for each in roots]
    found = torch.autograd.grad(roots, [own[name] for name in names], given, allow_unused=True)
    return results, dict(zip(names, found, strict=True))


def _gradient(result: Tensor, dim: int) -> Tensor:
    """Returns a gradient of all rows, the same for a block of them."""
    shape = [_ROWS if d == dim else size for d, size in enumerate(result.shape)]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)


def _joined(parts: Sequence[Sequence[Tensor]], dim: int) -> list[Tensor] | None:
    if len({len(part) for part in parts}) > 1:
        return None
    return [torch.cat(each, dim) for each in zip(*parts, strict=True)]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor], within: float) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.double(), b.double(), rtol=within, atol=within)
        for a, b in zip(some, others, strict=True)
    )
