"""Problem: a stage's function is plain Python; torch.compile may make it faster, and must not change it.

    backend     what becomes of the numbers
    eager       they stay as they are to the bit: Dynamo alone, kernels and autograd's nodes are as ever
    aot_eager   they stay as they are to the bit: forward and backward are graphs of the same kernels
    inductor    rounding differs where kernels are fused: about 1e-6 of a tensor's largest element

A graph ends where random numbers are seeded (law 6), which Dynamo leaves alone. Under aot_eager and inductor
the backward of a graph is one node of autograd, whose weights cannot wait: what a schedule calls I is all of
it, and its W is empty. Recompute runs the compiled function twice; if it is selective, what runs twice is
compiled and the rest of the stage is not.
Oracle: tests/parity/test_schedule_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from outsize.errors import BadOption
from outsize.ir.graph import Form
from outsize.run.rng import Seed

Function = Callable[..., Any]
# Dropout draws what it draws uncompiled.
_SAME_NUMBERS: Final[dict[str, Any]] = {"fallback_random": True}


def compiled(function: Function, backend: str) -> Function:
    """A stage's function, whose last argument is the seed; it is compiled when it is first called."""
    now: list[Seed] = []

    def seed(instruction: int) -> None:
        now[0](instruction)

    # One object for all microbatches, or each would be compiled anew.
    apart: Any = torch.compiler.disable(seed)
    options = _SAME_NUMBERS if backend == "inductor" else None
    fast = torch.compile(function, backend=backend, dynamic=False, options=options)

    def run(*values: Any) -> Any:
        now[:] = values[-1:]
        return fast(*values[:-1], apart)

    return run


def insist_on_backend(backend: str | None, form: Form) -> None:
    """Raise BadOption for one that torch does not have, or where there is no stage function to compile."""
    if backend is not None and form == "modules":
        raise BadOption(
            f"compiled={backend!r} is for stages, and this model runs by modules, in its own Python",
            next_step="module.compile() on the modules that are worth it",
        )
    known = () if backend is None else torch.compiler.list_backends(exclude_tags=())
    if backend is not None and backend not in known:
        raise BadOption(
            f"torch.compile has no backend {backend!r}",
            numbers=f"it has {', '.join(known)}",
            next_step="compiled='inductor', or 'aot_eager', which keeps every bit",
        )
