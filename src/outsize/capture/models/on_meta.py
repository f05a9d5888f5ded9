"""Builds a model on the meta device, also one whose builder computes with tensors.

RegNet's builder gets its widths from `torch.linspace(...).tolist()`, which meta tensors do not have. Then
only what layers of torch.nn make is on meta; what other code computes is real, and small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils._device import DeviceContext


def built_on_meta(builder: Callable[[], Any]) -> Any:
    """Returns what `builder()` returns, with weights on meta. Raises what the builder raises."""
    try:
        with torch.device("meta"):
            return builder()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
    with _LayersOnMeta(torch.device("meta")):
        return builder()


@final
class _LayersOnMeta(DeviceContext):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn."):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
