"""Bytes of optimizer state, as torch.optim keeps them: in the parameter's own dtype, per tensor.

    sgd          nothing
    momentum     momentum_buffer                         1 x the parameter
    adam, adamw  exp_avg, exp_avg_sq, a float32 `step`   2 x the parameter + 4 bytes

Not counted: the temporaries of `foreach` updates (up to one copy of the parameters, torch.optim docs),
which live when no activation does. Oracle: tests/unit/planner/test_optimizer.py counts real torch states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from outsize.errors import BadOption


@final
@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """State of one optimizer: `copies` tensors like the parameter and `counter_bytes` beside them."""

    name: str
    copies: int
    counter_bytes: int

    def state_bytes(self, parameter_bytes: int) -> int:
        """Bytes of state for one trainable parameter tensor of `parameter_bytes`."""
        return self.copies * parameter_bytes + self.counter_bytes


_KNOWN = (
    OptimizerBytes("sgd", 0, 0),
    OptimizerBytes("momentum", 1, 0),
    OptimizerBytes("adam", 2, 4),
    OptimizerBytes("adamw", 2, 4),
)


def optimizer_bytes(name: str) -> OptimizerBytes:
    """The optimizer called `name`; BadOption lists the known ones."""
    for optimizer in _KNOWN:
        if optimizer.name == name:
            return optimizer
    known = ", ".join(o.name for o in _KNOWN)
    raise BadOption(
        f"optimizer {name!r} is not known", numbers=f"known: {known}", next_step="--optimizer adamw"
    )
