"""Computes attention of a rank's rows a few heads at a time, so that few keys and values are whole at once.

    forward     for each piece of heads: gather its k, v; attend with the rows of its q; drop k, v
    backward    for each piece: gather k, v again; gradients of kernels; scatter those of k, v; drop all

What waits for the backward is a rank's rows of q, k and v, and what the kernels returned (kept_attention.py),
so the second call of a piece computes gathers alone. Each head is computed as it is without pieces, by the
same kernels on the same values, and so are its gradients.

Source: pieces of heads, UPipe (arXiv 2602.21196), which exchanges them by all-to-all; gathers of keys and
values (arXiv 2407.21783, sec. 3.3.2) are as few bytes where heads share keys, and keep causal rows balanced.
Oracle: tests/dist/test_context.py, the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.run.collectives.functions import lowered
from outsize.run.collectives.kept_attention import KeptAttention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Gathers rows of keys and values, and attends with rows of queries: (..., heads, rows, width) each."""


def attention_by_heads(attend: Attend, query: Tensor, key: Tensor, value: Tensor, pieces: int) -> Tensor:
    """Returns the attention of all heads, of which so many pieces are computed one after the other."""
    query, key, value = lowered(query), lowered(key), lowered(value)
    heads, times = key.shape[-3], query.shape[-3] // key.shape[-3]
    sizes = [heads // pieces + (piece < heads % pieces) for piece in range(pieces)]
    parts = zip(
        query.split([times * size for size in sizes], -3),
        key.split(sizes, -3),
        value.split(sizes, -3),
        strict=True,
    )
    with torch.autocast(query.device.type, enabled=False):
        return torch.cat([_PieceOfHeads.apply(attend, *part) for part in parts], -3)


@final
class _PieceOfHeads(torch.autograd.Function):
    """Attends with some heads; the backward attends again, but for what kernels returned."""

    @staticmethod
    def forward(ctx: Any, attend: Attend, *operands: Tensor) -> Tensor:
        """Returns the attention; what it saves is a rank's own rows and the results of kernels."""
        kept = KeptAttention()
        # Kernels are chosen by whether there will be a gradient, as they are in the backward.
        with torch.enable_grad(), kept.first():
            out = attend(*_leaves(operands))
        calls = kept.calls()
        ctx.attend, ctx.calls = attend, [[_or_type(each) for each in call] for call in calls]
        results = [each for call in calls for each in call if isinstance(each, Tensor)]
        ctx.save_for_backward(*operands, *results)
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of this rank's rows."""
        saved: Sequence[Tensor] = ctx.saved_tensors
        leaves, results = _leaves(saved[:3]), iter(saved[3:])
        calls = [[next(results) if each is Tensor else each for each in call] for call in ctx.calls]
        wanted = [leaf for leaf, needed in zip(leaves, ctx.needs_input_grad[1:], strict=True) if needed]
        with torch.enable_grad(), KeptAttention.of(calls).second():
            out = ctx.attend(*leaves)
        found = iter(torch.autograd.grad(out, wanted, grads[0]))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])


def _or_type(value: Any) -> Any:
    """Returns a number as it is, and the type in the place of a tensor, which autograd saves."""
    return Tensor if isinstance(value, Tensor) else value


def _leaves(operands: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_() for each in operands]
