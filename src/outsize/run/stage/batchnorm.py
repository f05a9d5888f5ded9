"""Updates BatchNorm's running statistics once per batch (`bn="deferred"`).

    every microbatch     normalised by its own mean and variance; the moments are recorded, nothing is updated
    end of the batch    running_mean, running_var <- one update with the mean and the unbiased variance over
                        all microbatches; num_batches_tracked + 1

This is torchgpipe's DeferredBatchNorm (Kim et al. 2020, arXiv:2004.09910) on the user's own modules. The
moments of microbatches are merged pairwise in fp64 (Chan, Golub, LeVeque 1983); symbols: n -> count, m2 ->
sum of squared deviations. Oracle: tests/parity/test_batchnorm.py computes them over the concatenated inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from outsize.device.accelerators import widest_float

Moments = tuple[int, Tensor, Tensor]  # n, mean, m2
Calls = list[list[Moments]]  # The outer index is the module, the inner one the call.


@final
class DeferredStatistics:
    """Collects the moments of all BatchNorms of a model during a step."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._moments: dict[nn.Module, list[Moments]] = {}
        self._paused = self._collects = False

    @property
    def training(self) -> bool:
        """Returns whether a BatchNorm normalises by the batch."""
        return any(m.training for m in self._modules)

    @contextmanager
    def collecting(self, whole: Callable[[Calls], Calls] = list) -> Iterator[None]:
        """Collects moments of all microbatches of a batch within the context and updates at its end, unless
        they fail.

        `whole` merges the moments of this rank with those of ranks that have other parts of the batch.
        """
        self._moments = {}
        with self._forwards():
            yield
        for module, calls in zip(self._moments, whole(list(self._moments.values())), strict=True):
            _update(module, reduce(_merged, calls))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collects nothing within the context: around a second forward, whose inputs were counted in the
        first. It has to save what the first one did, also in a backward that comes after `collecting`.
        """
        self._paused = True
        try:
            with nullcontext() if self._collects else self._forwards():
                yield
        finally:
            self._paused = False

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        """Puts a forward that updates nothing in the place of each BatchNorm's."""
        with ExitStack() as stack:
            for module in self._modules:
                if module.training:
                    stack.enter_context(_forward_is(module, partial(self._forward, module, module.forward)))
            self._collects = True
            try:
                yield
            finally:
                self._collects = False

    def _forward(self, module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self._paused:
            self._moments.setdefault(module, []).append(_moments(x.detach()))
        module.track_running_stats = False
        try:
            return forward(x)
        finally:
            module.track_running_stats = True


def use_local_statistics(model: nn.Module) -> None:
    """Makes SyncBatchNorm normalise as BatchNorm does.

    Its default group is all processes, some of which are stages that hold other layers: it would wait for
    them.
    """
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            module.forward = MethodType(_BatchNorm.forward, module)


@contextmanager
def _forward_is(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _moments(x: Tensor) -> Moments:
    dims = [d for d in range(x.ndim) if d != 1]
    variance, mean = torch.var_mean(x, dims, correction=0)
    n = x.numel() // x.shape[1]
    widest = widest_float(x.device)
    return n, mean.to(widest), variance.to(widest) * n


def _merged(a: Moments, b: Moments) -> Moments:
    n, gap = a[0] + b[0], b[1] - a[1]
    return n, a[1] + gap * (b[0] / n), a[2] + b[2] + gap**2 * (a[0] * b[0] / n)


@torch.no_grad()
def _update(module: Any, moments: Moments) -> None:
    n, mean, m2 = moments
    module.num_batches_tracked.add_(1)
    # torch does the same: without momentum the average is cumulative.
    share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    for running, new in ((module.running_mean, mean), (module.running_var, m2 / max(n - 1, 1))):
        running.mul_(1 - share).add_(new.to(running), alpha=share)
