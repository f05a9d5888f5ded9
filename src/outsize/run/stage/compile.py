"""Checks that stages can be compiled, without importing torch's compiler (run/stage/stage_compiler.py)."""

from __future__ import annotations

import torch

from outsize.errors import BadOption
from outsize.ir.graph import Form


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
