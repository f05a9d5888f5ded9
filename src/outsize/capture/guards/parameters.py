"""The flags of parameters that decide how they are computed with: dtype and `requires_grad`.

A model of 80 layers has hundreds of parameters, and they are looked at before each step. torch's compiled
guards (torch._dynamo's TENSOR_MATCH, torch/csrc/dynamo/guards.cpp) compare dtype, `requires_grad`, type and
device of all of them in one call, in about half the time of two passes in Python. They are stricter than what
is asked here (modes and devices count as well): their yes is taken, and after their no the two passes decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, cast, final

from torch import nn

_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_DTYPE: Final = attrgetter("dtype")


@final
class ParameterFlags:
    """The dtype and `requires_grad` of each parameter, as they were when this was made."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients = list(map(_REQUIRES_GRAD, parameters))
        self._dtypes = list(map(_DTYPE, parameters))
        self._check_at_once = _compiled_check(parameters)

    def are_same(self) -> bool:
        """Returns whether every parameter has the dtype and the `requires_grad` that it had."""
        check = self._check_at_once
        if check is not None and check(*self._parameters):
            return True
        return (
            list(map(_REQUIRES_GRAD, self._parameters)) == self._gradients
            and list(map(_DTYPE, self._parameters)) == self._dtypes
        )


def _compiled_check(parameters: Sequence[nn.Parameter]) -> Callable[..., bool] | None:
    """Returns torch's compiled guards for the parameters, sizes and strides left open; None where this
    version of torch has none.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards  # private: another version may lack it
    except ImportError:
        return None
    try:
        open_dims = [[None] * p.dim() for p in parameters]
        guards = cast(Any, TensorGuards)(
            *parameters, dynamic_dims_sizes=open_dims, dynamic_dims_strides=open_dims
        )
    except (TypeError, ValueError, RuntimeError):
        return None
    return guards.check
