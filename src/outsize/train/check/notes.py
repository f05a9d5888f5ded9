"""Words the notes on where a split run, or a run by microbatches, differs by design from what one may
expect.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.capture.graph.build import Captured
from outsize.ir.plan import Plan
from outsize.train.check.compare import Differences
from outsize.train.variants.instruction_owners import instruction_owners


def batchnorm_note(plan: Plan, samples: int, whole: Differences) -> str:
    """Returns the note on BatchNorm; `whole` compares the plain loop over microbatches with one whole
    batch.
    """
    return (
        f"BatchNorm normalises each of {plan.microbatches} microbatches by itself (bn={plan.bn}), as "
        f"gradient accumulation does. Against one batch of {samples} the loss differs by {whole.loss:.2g}, "
        f"gradients by up to {whole.grads:.2g}, running statistics by {whole.buffers:.2g}; bn=sync has the "
        "numbers of that."
    )


def constant_note() -> str:
    """Returns the note on a run that is right on the first batch and wrong on the second."""
    return (
        "the first batch agrees and the second, with other values, does not: something that follows from the "
        "first batch, or from the number of the step, is a constant of the recorded program. Pass what "
        "differs from batch to batch as tensors in args, kwargs or target"
    )


def undivided_note(plan: Plan, whole: float, weighted: float, distance: float, doubt: str | None) -> str:
    """`whole` is the loss of the batch in one piece, `weighted` that of the microbatches by their shares, and
    `doubt` why shares do not give the former, where the loss says so.
    """
    reason = doubt or "the loss compares samples with each other, or a layer normalises over the batch"
    return (
        f"the loss of the batch in one piece is {whole:.7g}, that of its {plan.microbatches} microbatches "
        f"together {weighted:.7g}, and gradients differ by {distance:.2g} of their largest element: "
        f"{reason}. "
        "Each microbatch is computed by itself, as gradient accumulation does; with microbatches=1 the loss "
        "is over all samples, and so is one in your own loop over outsize.split(model, (x,))"
    )


def autocast_note(captured: Captured, plan: Plan) -> Iterator[str]:
    """Yields a note when several stages read a weight under autocast, and not all in one precision.

    One process casts such a weight once per forward and adds up the gradients of its casts in the low
    precision; each stage casts it for itself and adds up in the weight's own precision.
    """
    owners = instruction_owners(plan, captured)
    stages: dict[str, set[int]] = {}
    # Dtypes, "own" where a call does not cast, None where that is not known.
    reads: dict[str, set[object]] = {}
    for instruction in captured.tape.instructions:
        casts = dict(instruction.casts)
        for name in instruction.parameters() if instruction.modes.autocast else ():
            stages.setdefault(name, set()).add(owners[instruction.index])
            reads.setdefault(name, set()).add(casts.get(name, "own"))
    several = [name for name, weight_stages in stages.items() if len(weight_stages) > 1]
    shared = [name for name in several if len(reads[name]) > 1 or None in reads[name]]
    if shared:
        others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        yield (
            f"under autocast several stages read {shared[0]}{others}, cast or not, and gradients add up in "
            "the weight's own precision; one process adds them in the low one. "
            "torch.autocast(..., cache_enabled=False) is bit-equal."
        )
