"""Records ranges for torch.profiler, which cost nothing while no profiler is on.

`torch.profiler` has a range as a user annotation, also above the kernels that were launched in it, and
`torch.autograd.profiler.emit_nvtx` hands it to Nsight Systems.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_NO_RANGE: Final = nullcontext()


def is_profiled() -> bool:
    """Returns whether a profiler of torch records what this thread does now."""
    return _profiler_enabled()


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """Returns a context that a profiler records under this name, if one is on."""
    return record_function(name) if is_profiled() else _NO_RANGE


def in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function` within a range of this name."""

    def ranged(*args: Any) -> Any:
        with record_function(name):
            return function(*args)

    return ranged
