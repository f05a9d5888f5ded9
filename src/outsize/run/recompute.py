"""Recompute: what a stage's backward needs is computed a second time instead of kept.

    forward    the received values and the inputs stay, what autograd would save does not
    backward   the stage's function runs again on them, and saves; then the backward goes on

The second forward is the first to the bit: every random instruction seeds its generators (law 6), and the
buffers that the first one changed are as before it, so nothing is counted twice (law 5).
Chen et al. 2016, arXiv:1604.06174, by torch's non-reentrant `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.run.statistics import Statistics


@final
class Recompute:
    """Runs a stage's function so that its activations are computed anew in the backward."""

    def __init__(self, model: nn.Module, written: Iterable[str], statistics: Statistics | None) -> None:
        self._buffers = [model.get_buffer(name) for name in sorted(written)]
        self._statistics = statistics

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, with gradients."""
        # The generators are seeded inside the function, so torch need not keep their states.
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._again([b.clone() for b in self._buffers])

    @contextmanager
    def _again(self, before: list[Tensor]) -> Iterator[None]:
        now = [b.clone() for b in self._buffers]
        self._set(before)
        try:
            with nullcontext() if self._statistics is None else self._statistics.paused():
                yield
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)
