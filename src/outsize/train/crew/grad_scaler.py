"""GradScaler over stages: when the gradients of one rank overflow, every rank skips the step.

    step      loss * scale           backward of all microbatches, on every rank
    unscale   gradients / scale      each device notes whether any is infinite or NaN
    combine   one flag of all        over the devices of a process, then over all ranks by one all-reduce
    update    the step, unless the flag is set; the scale grows or backs off

The scaler is the user's ordinary `torch.amp.GradScaler` (Micikevicius et al. 2018, arXiv:1710.03740), one per
rank; all of them see one flag, so their scales stay equal. The scale and the flag stay on the devices. The
host waits once, where the scaler reads the flag before the optimizer's step, as in a plain loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from outsize.run.collectives.tensor_parallel import local_of
from outsize.train.crew.crew import Crew


@final
class Scaling:
    """One rank's part of a step under a GradScaler, whose numbers are on `device`: where the loss is, or else
    this rank's gradients.
    """

    def __init__(self, scaler: GradScaler, crew: Crew, device: torch.device) -> None:
        self._scaler, self._crew, self._device = scaler, crew, device
        self._empty = torch.zeros((), device=device, requires_grad=True)
        # A rank without parameters takes part with an optimizer over one empty parameter.
        self._spare = SGD([self._empty], lr=0.0)
        self._shown: Optimizer = self._spare
        self._unscaled = False

    def scale(self) -> Tensor:
        """Returns the factor by which this step's loss is multiplied (0-dim)."""
        return self._scaler.scale(torch.ones((), device=self._device))

    def unscale(self, optimizer: Optimizer | None, parts: Sequence[Tensor] | None = None) -> None:
        """Divides the gradients by the scale, once per step, and lets all ranks know of an overflow.

        `parts` are this rank's weights, where the optimizer has other tensors in their place.
        """
        if self._unscaled:
            return
        scaled_optimizer = optimizer or self._spare
        self._empty.grad = torch.zeros_like(self._empty)
        weights = parts
        if weights is None:
            weights = [p for group in scaled_optimizer.param_groups for p in group["params"]]
        stepped: list[Any] = [weight for weight in weights if weight.grad is not None]
        whole = bool(stepped) and parts is None and all(p.grad is local_of(p.grad) for p in stepped)
        self._shown = scaled_optimizer if whole else _Parts(scaled_optimizer, stepped, self._empty)
        self._scaler.unscale_(self._shown)
        if self._scaler.is_enabled():
            flags: dict[Any, Tensor] = self._scaler._found_inf_per_device(self._shown)
            flag = torch.stack([flag.to(self._device) for flag in flags.values()]).amax(0)
            flags.clear()
            flags[self._device] = self._crew.largest(flag)
        self._unscaled = True

    def step(self) -> None:
        """Takes the optimizer's step unless a rank overflowed, then updates the scale; called after
        `unscale`.
        """
        self._scaler.step(self._shown)
        self._scaler.update()
        self._unscaled = False


@final
class _Parts(Optimizer):
    """An optimizer whose sharded weights and gradients a scaler sees as this rank's parts.

    A scaler wants some gradient: where there is none it sees `empty`.
    """

    def __init__(self, whole: Optimizer, parameters: Sequence[Any], empty: Tensor) -> None:
        parts = [nn.Parameter(local_of(p).detach(), requires_grad=p.requires_grad) for p in parameters]
        for part, p in zip(parts, parameters, strict=True):
            part.grad = local_of(p.grad)
        super().__init__(parts or [empty], {})
        self._whole = whole

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._whole.step(closure)
