"""What share of the batch's loss a microbatch has (exactness law 4).

A mean over the batch is the mean over microbatches weighted by what each mean was taken over: samples, or
the tokens that count (`ignore_index` takes padding out). The denominators are read off the tape: every
mean-reduced cross entropy that the loss depends on names its target, and where that follows from the
inputs alone it can be counted before the step. If they disagree, or none is found, samples are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.program.liveness import live, replicable
from outsize.program.replay import evaluate, resolve
from outsize.program.tape import Instruction, Ref, Tape, backward_slice
from outsize.train.batch import Batch

Counting = Literal["auto", "samples"]


def loss_weights(
    tape: Tape, parts: Sequence[Batch], buffers: Mapping[str, Tensor], counting: Counting = "auto"
) -> list[float]:
    """Weights that add up to 1; equal microbatches get equal ones."""
    by_sample = _shares([part.size for part in parts])
    if counting == "samples":
        return by_sample
    found = []
    for instruction in _mean_losses(tape):
        counts = [_count(tape, instruction, part, buffers) for part in parts]
        if all(c is not None for c in counts) and sum(c or 0 for c in counts):
            found.append(_shares([c or 0 for c in counts]))
    return found[0] if found and all(shares == found[0] for shares in found) else by_sample


def _shares(counts: Sequence[int]) -> list[float]:
    return [c / sum(counts) for c in counts]


def _mean_losses(tape: Tape) -> list[Instruction]:
    if tape.loss is None:
        return []
    alive = live(tape, [tape.loss.slot])
    return [i for i in tape.instructions if alive[i.index] and _is_mean_cross_entropy(i)]


def _is_mean_cross_entropy(instruction: Instruction) -> bool:
    if instruction.target not in (F.cross_entropy, F.nll_loss):
        return False
    given = _arguments(instruction)
    return given["reduction"] == "mean" and given["weight"] is None and isinstance(given["target"], Ref)


def _arguments(instruction: Instruction) -> dict[str, Any]:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    return {**defaults, **dict(zip(names, instruction.args, strict=False)), **instruction.kwargs}


def _count(tape: Tape, instruction: Instruction, part: Batch, buffers: Mapping[str, Tensor]) -> int | None:
    """How many targets the mean is taken over; None when that needs activations."""
    given = _arguments(instruction)
    needs = backward_slice(tape.instructions, tape.metas, [given["target"].slot])
    free = replicable(tape)
    if not all(free[i] for i in needs):
        return None
    env: dict[int, Any] = {**tape.constants, **dict(zip(tape.inputs, part.tensors(), strict=True))}
    evaluate([tape.instructions[i] for i in needs], env, buffers)
    target = resolve(given["target"], env, buffers)
    if target.is_floating_point():
        return None
    return int(torch.count_nonzero(target != given["ignore_index"]))
