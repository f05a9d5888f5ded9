"""GradScaler over stages: when the gradients of one rank overflow, every rank skips the step.

    step      loss * scale           backward of all microbatches, on every rank
    update    overflow here?  ->  sum over ranks  ->  where it happened elsewhere, one own gradient is made
              inf, so that torch's own GradScaler skips this rank's step too and backs its scale off alike

The scaler is the user's ordinary `torch.amp.GradScaler` (Micikevicius et al. 2018, arXiv:1710.03740), one per
rank; all of them see the same overflows, so their scales stay equal.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from outsize.run.tensor_parallel.collectives import local_of
from outsize.train.crew.crew import Crew
from outsize.train.ranks.tensor_parallel import TensorRanks


@final
class Scaling:
    """One rank's part of a step under a GradScaler."""

    def __init__(self, scaler: GradScaler, crew: Crew, tensor: TensorRanks | None = None) -> None:
        self._scaler, self._crew, self._tensor = scaler, crew, tensor
        self._device = crew.device or torch.device("cpu")
        self._empty = torch.zeros((), device=self._device, requires_grad=True)
        # A rank without parameters takes part with an optimizer over one empty parameter.
        self._spare = SGD([self._empty], lr=0.0)
        self._shown: Optimizer = self._spare
        self._unscaled = False

    def scale(self) -> float:
        """Returns the factor by which this step's loss is multiplied."""
        return float(self._scaler.scale(torch.ones((), device=self._device)))

    def unscale(self, optimizer: Optimizer | None) -> None:
        """Divides the gradients by the scale, once per step; where any rank overflowed, one becomes inf."""
        if self._unscaled:
            return
        scaled_optimizer = optimizer or self._spare
        self._empty.grad = torch.zeros_like(self._empty)
        grads = [
            p.grad for group in scaled_optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        overflowed = self._overflow(grads)
        flag = torch.full((1,), float(overflowed))  # on the host, where ranks tell each other numbers
        flag = flag if self._tensor is None else self._tensor.any(flag)
        flag = self._crew.replicas.total(self._crew.sum(flag)[0])
        if bool(flag > 0) and not overflowed and grads:
            max(map(local_of, grads), key=Tensor.numel).fill_(torch.inf)  # a shard may be empty
        whole = bool(grads) and all(g is local_of(g) for g in grads)
        self._shown = scaled_optimizer if whole else _Parts(scaled_optimizer, self._empty)
        self._scaler.unscale_(self._shown)
        self._unscaled = True

    def step(self) -> None:
        """Takes the optimizer's step unless a rank overflowed, then updates the scale; called after
        `unscale`.
        """
        self._scaler.step(self._shown)
        self._scaler.update()
        self._unscaled = False

    @staticmethod
    def _overflow(grads: list[Tensor]) -> bool:
        return not all(bool(torch.isfinite(local_of(g)).all()) for g in grads)


@final
class _Parts(Optimizer):
    """An optimizer whose sharded weights and gradients a scaler sees as this rank's parts.

    A scaler wants some gradient: where there is none it sees `empty`.
    """

    def __init__(self, whole: Optimizer, empty: Tensor) -> None:
        parameters = [p for group in whole.param_groups for p in group["params"] if p.grad is not None]
        parts = [nn.Parameter(local_of(p).detach(), requires_grad=p.requires_grad) for p in parameters]
        for part, p in zip(parts, parameters, strict=True):
            part.grad = local_of(p.grad)
        super().__init__(parts or [empty], {})
        self._whole = whole

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._whole.step(closure)
