"""Copies a model without copying its weights, so that they can be frozen or wrapped for planning alone."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from outsize.program.objects import copy_attributes


def sharing_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of the modules whose tensors are the memory of the model's own."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    copied = copy.deepcopy(model, memo)
    copy_attributes(model.parameters(), memo)
    return copied


def frozen(model: nn.Module) -> nn.Module:
    """Returns such a copy in eval mode, none of whose weights is trained."""
    copied = sharing_weights(model).eval()
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    return copied
