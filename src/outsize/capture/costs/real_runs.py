"""Holds what is run on real numbers while a model is captured to so many FLOPs and bytes.

    recording          fakes: nothing is computed, whatever the size
    a decision         the part of the forward that it depends on, on the real example
    a leaf that fails  two copies of it with made-up numbers, at the size of the example
      on fakes
    the model itself   where it may reject the example

The last two compute at full size on this CPU: a Llama of 70 B would take hours, and all its bytes.
Each op is counted before it begins, by the same formulas as costs, so that none above the limit is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from outsize.capture.costs.meter import flops_of, formula_of
from outsize.errors import BadOption
from outsize.program.source_line import raising_line
from outsize.program.tree import map_leaves

MOST_FLOPS: Final = 2 * 10**11
"""The FLOPs that one run on real numbers may take: seconds on a core, and more than a detector needs."""
MOST_BYTES: Final = 4 << 30
"""The bytes of weights and arguments that may be made for it."""


@final
class TooLarge(Exception):
    """Says which limit a run on real numbers would exceed."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises TooLarge before an op that would exceed MOST_FLOPS, all ops within the context together."""
    with _Counting():
        yield


def insist_on_room(tensors: Iterable[Tensor]) -> None:
    """Raises TooLarge where tensors of these sizes would take more than MOST_BYTES."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > MOST_BYTES:
        raise TooLarge(f"{size / 2**30:.1f} GiB of values; the limit is {MOST_BYTES / 2**30:.0f} GiB")


def too_large(what: str, reason: BaseException, large: TooLarge) -> BadOption:
    """Returns the error for a part of a model that would have to be computed, and is too large for it."""
    return BadOption(
        f"{what} decides on values, so that it has to be computed on this CPU to be captured, and it is too "
        f"large for that ({' '.join(str(reason).split())[:200]})",
        numbers=f"{large}; at {raising_line(reason)}",
        next_step="ask for smaller microbatches (microbatches=), or take the decision out of the forward",
    )


@final
class _Counting(TorchDispatchMode):
    """Counts the FLOPs of each op before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # The tensor's own class computes it by ops on the tensors that it holds.
        formula = formula_of(func)
        if formula is not None:
            self._flops += _flops_ahead(func, formula, args, kwargs or {})
            if self._flops > MOST_FLOPS:
                raise TooLarge(f"{self._flops / 1e9:.0f} GFLOP so far; the limit is {MOST_FLOPS / 1e9:.0f}")
        return func(*args, **(kwargs or {}))


def _flops_ahead(op: Any, formula: Any, args: Any, kwargs: Any) -> int:
    """Returns the FLOPs of an op by the shape of its result, which it has on meta as well."""
    args, kwargs = map_leaves(_on_meta, args), map_leaves(_on_meta, kwargs)
    try:
        with _disable_current_modes():  # Whoever watches the run sees the op when it begins.
            return flops_of(formula, args, kwargs, op(*args, **kwargs))
    except (NotImplementedError, RuntimeError):
        return 0  # It has no rule for meta, or refuses these arguments: then it says so itself.


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
