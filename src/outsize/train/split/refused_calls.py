"""Problem: who calls a split model may not know that a call runs microbatches on stages and keeps graphs.

A compiler would trace into it, `torch.func` would map over it, and a checkpoint around it takes what stages
save for its own, and calls the model again within the backward, with the random numbers of another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from outsize.errors import BadOption
from outsize.train.variants.variant import Variant

_CHECKPOINT: Final = "_checkpoint_hook."  # how the names of the hooks begin that torch.utils.checkpoint sets
_NEXT_STEP: Final = (
    "torch.utils.checkpoint inside of the model, or plan=outsize.Request(recompute='full'), which computes "
    "each stage again"
)


def insist_on_a_plain_call() -> None:
    """Raises BadOption for a call within a compiler, a transform of torch.func, or a checkpoint."""
    if torch.compiler.is_compiling():
        raise BadOption(
            "a split model is called inside of torch.compile",
            next_step="outsize.split(..., compiled=True), which compiles stages, called outside of it",
        )
    of_torch: Any = torch._C
    if of_torch._functorch.peek_interpreter_stack() is not None:
        raise BadOption(
            "a split model is called inside of a transform of torch.func (vmap, jvp, grad)",
            next_step="loss.backward() of a plain call, or the transform on the plain model, model.module",
        )
    hooks = of_torch._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and hooks[0].__qualname__.startswith(_CHECKPOINT):
        raise BadOption("a split model is called inside of torch.utils.checkpoint", next_step=_NEXT_STEP)


def insist_on_first_run(variants: Sequence[Variant]) -> None:
    """Raises BadOption for a call within a backward, as a reentrant checkpoint makes it, if it draws other
    random numbers than the one whose loss the user has seen.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and any(i.random for variant in variants for i in variant.tape.instructions):
        raise BadOption(
            "a split model that draws random numbers is called again within a backward, as "
            "torch.utils.checkpoint(use_reentrant=True) does",
            next_step=_NEXT_STEP,
        )
