"""Notices the first loss that is NaN or infinite, and says where to look.

On a CPU the loss is looked at after its step. On a device the flag of a step is copied to the host and read
by a later step, once it is there, so that the host never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from outsize.device.readback import HostCopy
from outsize.program.source_line import warn_user
from outsize.train.batch.batch import Batch


@final
class NonFiniteLoss(UserWarning):
    """Says that the loss of a step is NaN or infinite."""


@final
class LossWatch:
    """Looks at the loss of each step until one is not finite."""

    def __init__(self) -> None:
        self._flags: deque[tuple[int, HostCopy]] = deque()
        self._warned = False

    def look(self, step: int, loss: Tensor) -> int | None:
        """Takes the loss of a step; returns the number of the first step whose loss is not finite, once."""
        if self._warned:
            return None
        self._flags.append((step, HostCopy(torch.isfinite(loss))))
        while self._flags and self._flags[0][1].is_there():
            number, is_finite = self._flags.popleft()
            if not is_finite.value:
                self._warned = True
                return number
        return None


def warn_of_loss(
    step: int, parts: Sequence[Batch], named: Iterable[tuple[str, Tensor]], place: str | None
) -> None:
    """Warns of the loss of a step: of the data, the weights, or the place where it became NaN or infinite."""
    warn_user(_words(step, parts, named, place), NonFiniteLoss)


def _words(step: int, parts: Sequence[Batch], named: Iterable[tuple[str, Tensor]], place: str | None) -> str:
    tensors = ((mb, place, t) for mb, part in enumerate(parts) for place, t in enumerate(part.tensors()))
    bad_input = next(((mb, place) for mb, place, t in tensors if not _is_finite(t)), None)
    bad_weight = next((name for name, t in named if not _is_finite(t)), None)
    if bad_input is not None:
        mb, number = bad_input
        where = f"so is tensor {number} of microbatch {mb}; look at the data"
    elif bad_weight is not None:
        where = f"so is weight {bad_weight}; go back to weights of before, with a lower learning rate"
    elif place is not None:
        where = f"{place}; batch and weights of this rank are finite"
    else:
        where = "batch and weights of this rank are finite; torch.autograd.set_detect_anomaly names the line"
    return f"the loss of step {step} is NaN or infinite; {where}"


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_meta or not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())
