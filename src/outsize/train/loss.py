"""What share of the batch's loss a microbatch has (exactness law 4).

A mean over the batch is the mean over microbatches weighted by what each mean was taken over: samples, or
the tokens that count (`ignore_index` takes padding out). The denominators are read off the tape: every
mean-reduced cross entropy that the loss depends on names its target, and where that follows from the
inputs alone it can be counted before the step. If they disagree, or none is found, samples are counted. A
loss function that adds up over samples instead (reduction="sum") weighs every microbatch by 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.ladder import LossFn
from outsize.program.liveness import live, replicable
from outsize.program.reader import slot_reader
from outsize.program.tape import Instruction, Ref, Tape, backward_slice
from outsize.program.tree import map_leaves
from outsize.train.batch import Batch

Counting = Literal["auto", "samples"]
_LOSSES = (F.cross_entropy, F.nll_loss)


@final
@dataclass(frozen=True, slots=True)
class _MeanLoss:
    """A mean-reduced cross entropy of the tape: the slot of its targets, and what they leave out."""

    target: int
    ignore_index: int


@final
class Counted(NamedTuple):
    """What the shares of microbatches follow from: samples, targets of each mean loss (none: they cannot be
    counted), is the loss a sum?
    """

    samples: int
    targets: tuple[int, ...] = ()
    summed: bool = False


@final
class LossShares:
    """Weights of microbatches for one tape; what follows from the tape alone is worked out once."""

    def __init__(
        self,
        tape: Tape,
        model: nn.Module,
        counting: Counting = "auto",
        *,
        summed: bool = False,
        home: torch.device | None = None,
    ) -> None:
        self._summed = summed
        self._losses = _mean_losses(tape) if counting == "auto" else []
        self._read = slot_reader(tape, model, [loss.target for loss in self._losses], home)

    def of(self, parts: Sequence[Batch], each: Sequence[LossShares] | None = None) -> list[float]:
        """Weights that add up to 1, equal ones for equal microbatches; 1 for each of a loss that is a sum.

        `each` are those of the microbatches, where they have tapes of their own.
        """
        counters = each or [self] * len(parts)
        return shares_of([own.counted(part) for own, part in zip(counters, parts, strict=True)])

    def counted(self, part: Batch) -> Counted:
        """Of one microbatch."""
        return Counted(part.size, () if self._summed else tuple(self.counts(part)), self._summed)

    def counts(self, part: Batch) -> list[int]:
        """How many targets each loss's mean is taken over; nothing where that cannot be counted."""
        if not self._losses:
            return []
        targets = self._read(part.tensors())
        return [int(torch.count_nonzero(targets[x.target] != x.ignore_index)) for x in self._losses]


def shares_of(counted: Sequence[Counted]) -> list[float]:
    """Weights of all microbatches of a batch, as `LossShares.of` gives them."""
    if counted[0].summed:
        return [1.0] * len(counted)
    alike = len({len(part.targets) for part in counted}) == 1
    columns = zip(*(part.targets for part in counted), strict=True) if alike else ()
    shares = [_shares(column) for column in columns if sum(column)]
    agreed = bool(shares) and all(s == shares[0] for s in shares)
    return shares[0] if agreed else _shares([part.samples for part in counted])


def _shares(counts: Sequence[int]) -> list[float]:
    return [c / sum(counts) for c in counts]


def _mean_losses(tape: Tape) -> list[_MeanLoss]:
    """The losses whose targets can be counted; none when one of them cannot."""
    if tape.loss is None:
        return []
    alive, free = live(tape, [tape.loss.slot]), replicable(tape)
    found = [_mean_loss(tape, i, free) for i in tape.instructions if alive[i.index] and _is_mean(i)]
    losses = [loss for loss in found if loss is not None]
    return losses if len(losses) == len(found) else []


def _is_mean(instruction: Instruction) -> bool:
    if instruction.target not in _LOSSES:
        return False
    given = _arguments(instruction)
    return given["reduction"] == "mean" and given["weight"] is None and isinstance(given["target"], Ref)


def _mean_loss(tape: Tape, instruction: Instruction, free: Sequence[bool]) -> _MeanLoss | None:
    given = _arguments(instruction)
    target = given["target"]
    needs = backward_slice(tape.instructions, tape.metas, [target.slot])
    # Targets that depend on activations cannot be counted before the step; class probabilities not at all.
    if not all(free[i] for i in needs) or tape.metas[target.slot].dtype.is_floating_point:
        return None
    return _MeanLoss(target.slot, given["ignore_index"])


def _arguments(instruction: Instruction) -> dict[str, Any]:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    return {**defaults, **dict(zip(names, instruction.args, strict=False)), **instruction.kwargs}


def is_sum(loss_fn: LossFn | None, tape: Tape, part: Batch) -> bool:
    """Is the loss of two samples twice the loss of one? Tried on random outputs of the model's shapes.

    A loss inside the model is read off the tape. False for a loss function that takes no such outputs.
    """
    if loss_fn is None:
        return _sums_inside(tape)
    draw, one = torch.Generator().manual_seed(0), part.take(slice(0, 1))
    output = map_leaves(lambda leaf: _drawn(leaf, tape, part.size, draw), tape.output)
    target = map_leaves(_on_cpu, one.target)
    try:
        with torch.no_grad():
            once = float(loss_fn(output, *target))
            twice = float(loss_fn(*(map_leaves(_doubled, x) for x in (output, *target))))
    except Exception:
        return False
    return once != 0 and math.isclose(twice, 2 * once, rel_tol=1e-3)


def _sums_inside(tape: Tape) -> bool:
    """A summed cross entropy, divided at most by what all microbatches share (`num_items_in_batch`)."""
    shared = {s for s in tape.inputs if not tape.metas[s].shape} | set(tape.constants)
    sums: set[int] = set()
    for instruction in tape.instructions:
        read = set(instruction.reads())
        begins = instruction.target in _LOSSES and _arguments(instruction)["reduction"] == "sum"
        if begins or (read & sums and read <= sums | shared):
            sums.update(instruction.defines())
        elif read and read <= shared and not instruction.weights:
            shared.update(instruction.defines())
    return tape.loss is not None and tape.loss.slot in sums


def _drawn(leaf: Any, tape: Tape, samples: int, draw: torch.Generator) -> Any:
    """One sample of an output: between 0 and 1, which is a logit, a probability and a pixel."""
    if not isinstance(leaf, Ref):
        return leaf
    meta, shape = tape.metas[leaf.slot], list(tape.metas[leaf.slot].shape)
    if samples in shape:
        shape[shape.index(samples)] = 1
    return torch.rand(shape, generator=draw).to(meta.dtype)


def _doubled(leaf: Any) -> Any:
    alone = isinstance(leaf, Tensor) and 1 in leaf.shape
    return torch.cat([leaf, leaf], list(leaf.shape).index(1)) if alone else leaf


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
