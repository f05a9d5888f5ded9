"""Prepares projections and masks of an nn.MultiheadAttention, for some of its heads, before it attends."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def by_heads(x: Tensor, module: nn.MultiheadAttention) -> Tensor:
    """Reshapes a projection to (batch, heads of this rank, tokens, width)."""
    if x.ndim == 2:
        x = x.unsqueeze(0)
    elif not module.batch_first:
        x = x.transpose(0, 1)
    return x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def one_mask(
    q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """Merges masks into one to add to (batch, heads, tokens, keys); without a mask, returns whether to be
    causal.
    """
    if padding is None and mask is not None and is_causal:
        return None, True
    masks = [_added(m, q.dtype) for m in (mask, padding) if m is not None]
    if mask is not None:
        m = masks[0]
        masks[0] = m if m.ndim == 2 else m.view(q.shape[0], -1, *m.shape[1:])
    if padding is not None:
        masks[-1] = masks[-1].view(q.shape[0], 1, 1, k.shape[2])
    return (None, False) if not masks else (sum(masks[1:], masks[0]), False)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
