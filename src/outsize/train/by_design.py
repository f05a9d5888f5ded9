"""Where a split run, or a run by microbatches, is by design not what one might take it for."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.capture.graph import Captured
from outsize.ir.plan import Plan
from outsize.train.parity import Differences
from outsize.train.variant import instruction_owners


def batchnorm_note(plan: Plan, samples: int, whole: Differences) -> str:
    """`whole` is the plain loop over microbatches against the batch in one piece."""
    return (
        f"BatchNorm normalises each of {plan.microbatches} microbatches by itself (bn={plan.bn}), as "
        f"gradient accumulation does. Against one batch of {samples} the loss differs by {whole.loss:.2g}, "
        f"gradients by up to {whole.grads:.2g}, running statistics by {whole.buffers:.2g}; bn=sync has the "
        "numbers of that."
    )


def autocast_note(captured: Captured, plan: Plan) -> Iterator[str]:
    """Weights that autocast casts in several stages.

    One process casts such a weight once per forward and adds up its gradients in the low precision; stages
    cast it each for itself and add in the weight's own.
    """
    owners = instruction_owners(plan, captured)
    stages: dict[str, set[int]] = {}
    for instruction in captured.tape.instructions:
        for name in instruction.parameters() if instruction.modes.autocast else ():
            stages.setdefault(name, set()).add(owners[instruction.index])
    shared = [name for name, found in stages.items() if len(found) > 1]
    if shared:
        others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        yield (
            f"under autocast {shared[0]}{others} may be cast in several stages, and gradients then add up in "
            "the weight's own precision; one process adds them in the low one. "
            "torch.autocast(..., cache_enabled=False) is bit-equal."
        )
