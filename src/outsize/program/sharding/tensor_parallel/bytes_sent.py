"""Counts the bytes that ranks send on a rank's tape: of whole tensors, by instruction of the whole tape.

Bytes are counted as in ir/hardware/collectives.py: the input of an all-reduce, the output of an all-gather,
and the input of a reduce-scatter, which is a reversed all-gather and counts as one. What products by columns
have gathered is gathered again in their backward, if that computes gradients of weights. The collective of a
joined call's backward only begins before those gradients (overlap.py). A layer whose scales are of whole
tensors asks the other ranks for their largest elements, in reductions of a few numbers, counted one by one
(`forward_maxima`, `backward_maxima`). Deviations: a backward inside the
forward (`torch.autograd.grad`) sends as well, and is not counted; of an nn.MultiheadAttention the gradient of
the output's projection counts as computed beside the collective, too. Complexity: O(instructions). Oracles:
the bytes that were sent, tests/dist/test_tensor_parallel.py, and by hand
tests/unit/program/sharding/tensor_parallel/test_bytes_sent.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, final

import torch
from torch import Tensor, nn

from outsize.program.liveness import live
from outsize.program.sharding.axis_group import CountedGroup, collective_of
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.sharding.tensor_parallel.local_tape import local_tape
from outsize.program.sharding.tensor_parallel.overlap import overlapped
from outsize.program.sharding.tensor_parallel.styles import Derived
from outsize.program.tape import Instruction, Ref, Tape, Weight

Sent = Literal[
    "forward_sum",
    "forward_gather",
    "backward_sum",
    "backward_gather",
    "again_bytes",
    "begun_sum",
    "begun_gather",
    "forward_maxima",
    "backward_maxima",
]


@final
@dataclass(slots=True)
class Traffic:
    """Holds the bytes that an instruction sends, and the names of the parameters whose gradients are computed
    while what has `begun` is sent.
    """

    sizes: Counter[Sent] = field(default_factory=Counter[Sent])
    beside: tuple[str, ...] = ()


def sent_bytes(tape: Tape, derived: Derived, model: nn.Module) -> dict[int, Traffic]:
    """Counts by instruction of `tape`, for one step of its batch; only what the loss needs is counted."""
    local = local_tape(tape, derived, dict(model.named_modules()), CountedGroup(RankPosition(0, 1)))
    wanted = (tape.loss.slot,) if tape.loss is not None else tape.output_slots()
    alive, weights = live(local, wanted), dict(model.named_parameters(remove_duplicate=False))
    counts: dict[int, Traffic] = {}
    for instruction in overlapped(local.instructions, local.output_slots(), local, model):
        if alive[instruction.index]:
            sent = _of(instruction, local, weights)
            sent["backward_sum"] += sum(
                _size(weights[name])
                for name in derived.entered.intersection(instruction.parameters())
                if weights[name].requires_grad
            )
            traffic = counts.setdefault(instruction.origin, Traffic())
            traffic.sizes.update(sent)
            if sent["begun_sum"] or sent["begun_gather"]:
                traffic.beside = _trained(instruction, weights)
    return counts


def _trained(instruction: Instruction, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the parameters of an instruction whose gradients its backward computes."""
    names = dict.fromkeys(instruction.parameters())
    return tuple(name for name in names if name in weights and weights[name].requires_grad)


def _of(instruction: Instruction, tape: Tape, weights: Mapping[str, Tensor]) -> Counter[Sent]:
    call, slot = collective_of(instruction), next(iter(instruction.defines()), None)
    if call is None or slot is None:
        return Counter()
    name = call.name
    first = instruction.args[0] if instruction.args else None
    if name == "columns" and isinstance(first, Ref):
        return _entering(first, instruction.args[1], instruction, tape, weights)
    out = _bytes(tape.metas[slot].shape, tape.metas[slot].dtype)
    back = out if tape.metas[slot].requires_grad else 0
    if name == "attend" and "share" in instruction.kwargs:
        apart = replace(instruction, kwargs={k: v for k, v in instruction.kwargs.items() if k != "share"})
        ((x,), share) = instruction.args[1], instruction.kwargs["share"]
        return _of(apart, tape, weights) + _entering(x, share, instruction, tape, weights)
    if name in ("scaled_columns", "scaled_row"):
        return _of_scaled(instruction, out, back)
    if name in ("scatter", "collect") or instruction.kwargs.get("scatter") is not None:
        return Counter[Sent](_scattered(out, back))
    if name in ("reduce", "row", "stored_row", "lookup", "attend"):
        return Counter[Sent]({"forward_sum": out})
    if name == "gather":
        return Counter[Sent]({"forward_gather": out})
    if name == "cross_entropy" and isinstance(first, Ref):
        rows, dtype = tape.metas[first.slot].shape[:1], tape.metas[slot].dtype
        # The collective sends 3 numbers for each row.
        return Counter[Sent]({"forward_sum": 3 * _bytes(rows, dtype)})
    weight = weights[first.name] if isinstance(first, Weight) and first.name in weights else None
    if isinstance(first, Ref):
        meta = tape.metas[first.slot]
        size = _bytes(meta.shape, meta.dtype) if meta.requires_grad else 0
    else:
        size = _size(weight) if weight is not None and weight.requires_grad else 0
    kinds: dict[str, Sent] = {"enter": "backward_sum", "cut": "backward_gather"}
    return Counter({kinds[name]: size}) if name in kinds else Counter()


def _entering(
    x: Ref, share: Share | None, joined: Instruction, tape: Tape, weights: Mapping[str, Tensor]
) -> Counter[Sent]:
    """Returns what products send of the value that they read, of which ranks have shares; None for all."""
    meta = tape.metas[x.slot]
    size = _bytes(meta.shape, meta.dtype)
    back = size if meta.requires_grad else 0
    if share is None:
        return Counter[Sent]({"backward_sum": back, "begun_sum": back})
    again = size if _trained(joined, weights) else 0
    gathered: dict[Sent, int] = {"forward_gather": size, "backward_gather": back + again}
    gathered |= {"again_bytes": again, "begun_gather": back}
    return Counter(gathered)


def _of_scaled(instruction: Instruction, out: int, back: int) -> Counter[Sent]:
    """Returns what a layer sends whose scales are of whole tensors: by columns ranks ask for the largest
    elements of the weight and of the result's gradient, by rows for those of input and weight together.
    """
    call = collective_of(instruction)
    if call is not None and call.name == "scaled_columns":
        return Counter[Sent]({"forward_maxima": 1, "backward_maxima": 1 if back else 0})
    scatters = instruction.kwargs.get("scatter") is not None
    sums: dict[Sent, int] = _scattered(out, back) if scatters else {"forward_sum": out}
    return Counter[Sent]({**sums, "forward_maxima": 1})


def _scattered(out: int, back: int) -> dict[Sent, int]:
    return {"forward_gather": out, "backward_gather": back}


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
