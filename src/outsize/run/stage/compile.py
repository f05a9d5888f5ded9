"""Problem: a stage's function is plain Python; torch.compile may make it faster, and must not change it.

    backend     effect on the numbers
    eager       bit-identical: Dynamo alone, with the same kernels and autograd nodes
    aot_eager   bit-identical: forward and backward are graphs of the same kernels
    inductor    rounding differs where kernels are fused: about 1e-6 of a tensor's largest element

A graph ends where random numbers are seeded (law 6), which Dynamo does not trace. Under aot_eager and
inductor the backward of a graph is one autograd node, which cannot delay its weight gradients: the schedule's
I does all of it, and its W is empty. Recompute runs the compiled function twice; if it is selective, the
recomputed segments are compiled and the rest of the stage is not. Oracle:
tests/parity/test_schedule_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from outsize.errors import BadOption
from outsize.ir.graph import Form
from outsize.run.stage.rng import Seed

Function = Callable[..., Any]
# With this option dropout draws the same numbers as uncompiled.
_SAME_NUMBERS: Final[dict[str, Any]] = {"fallback_random": True}


def compiled(function: Function, backend: str) -> Function:
    """Compiles a stage's function, whose last argument is the seed, at its first call."""
    now: list[Seed] = []

    def seed(instruction: int) -> None:
        now[0](instruction)

    # One object serves all microbatches, or the function would be compiled again for each.
    apart: Any = torch.compiler.disable(seed)
    options = _SAME_NUMBERS if backend == "inductor" else None
    fast = torch.compile(function, backend=backend, dynamic=False, options=options)

    def run(*values: Any) -> Any:
        now[:] = values[-1:]
        return fast(*values[:-1], apart)

    return run


def insist_on_backend(backend: str | None, form: Form) -> None:
    """Raises BadOption for a backend that torch lacks, or where there is no stage function to compile."""
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
            next_step="compiled='inductor', or 'aot_eager', which is bit-identical",
        )
