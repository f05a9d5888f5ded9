"""Problem: a weight changes inside of a backward, while other microbatches of the step have yet to run.

    optimizers in hooks (LOMO, GaLore layer by layer)  B0 steps, B1 goes on with a graph of other weights
    the plain loop with one microbatch                 B0 steps, the step ends

In a pipeline the forward of the next microbatch has run or not, by the schedule, so the numbers follow from
the layout, and nothing says so. With one microbatch a step they are those of the plain loop. What is seen:

    a write through the weight      its version counter, around each backward
    a write through `weight.data`   the sum of its bits, around the first backward of a stage, and around the
                                    first of each step where a hook is on the weight

Whatever the writer is called, the next microbatch of the stage is refused. Cost: two reads of a counter per
weight and backward; the sums are one pass over the weights.

Oracle: tests/parity/test_optimizers_in_the_backward.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.program.values.tensor_bits import dense

_VERSION: Final = attrgetter("_version")
_HOOKS: Final = attrgetter("_backward_hooks")
_LATER_HOOKS: Final = attrgetter("_post_accumulate_grad_hooks")
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class UnchangedWeights:
    """Watches the trained weights of one stage over the microbatches of a step."""

    def __init__(self, model: nn.Module, stage: int = 0, summed: set[int] | None = None) -> None:
        """The names of weights are those in `model`. `summed` are the stages of which a backward was looked
        at by the bits of weights, whatever the shapes of their microbatches; the `stage` is one of them then.
        """
        self._model, self._stage = model, stage
        self._summed_stages = set[int]() if summed is None else summed
        self._weights: Sequence[Tensor] = ()
        self._summed: list[Tensor] = []  # Their bits are compared around the next backward.
        self._changed: list[Tensor] = []

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Begins a step."""
        self._weights, self._changed = weights, []
        is_first = self._stage not in self._summed_stages
        summed = weights if is_first else _hooked(weights)
        self._summed = [w for w in summed if type(w) in (Tensor, nn.Parameter) and not w.is_meta]

    def insist(self) -> None:
        """Raises BadOption where the backward of a microbatch before this one has changed a weight."""
        if not self._changed:
            return
        names = {id(p): name for name, p in self._model.named_parameters()}
        first, count = names.get(id(self._changed[0]), "a weight"), len(self._changed)
        raise BadOption(
            f"the backward of a microbatch has changed {first}, and others of the same step have yet to run: "
            "an optimizer steps inside of the backward",
            numbers=f"{count} of {len(self._weights)} weights of the stage changed, "
            f"{sum(map(_is_hooked, self._changed))} have hooks",
            next_step="microbatches=1, or no step in hooks: outsize.parallelize(..., "
            "optimizer=make_optimizer); load the weights again, since some have been stepped",
        )

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Compares the weights before and after a backward."""
        summed, self._summed = self._summed, []
        versions, bits = _versions(self._weights), _bits(summed)
        yield
        if not self._weights:
            return
        after, bits_after = _versions(self._weights), _bits(summed)
        if after != versions:
            self._changed += [w for w, a, b in zip(self._weights, versions, after, strict=True) if a != b]
        elif bits_after != bits:
            self._changed += [w for w, a, b in zip(summed, bits, bits_after, strict=True) if a != b]
        self._summed_stages.add(self._stage)


def _versions(weights: Sequence[Tensor]) -> list[int]:
    return list(map(_VERSION, weights))


def _bits(weights: Sequence[Tensor]) -> list[int]:
    """Returns the sum of the bits of each weight, read as integers; another value has another sum."""
    sums = [_integers(weight.detach()).sum(dtype=torch.int64) for weight in weights]
    by_device: dict[torch.device, list[int]] = {}
    for place, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(place)
    found = [0] * len(sums)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([sums[p] for p in places]).tolist(), strict=True):
            found[place] = value
    return found


def _integers(values: Tensor) -> Tensor:
    values = dense(values)
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.itemsize])


def _hooked(weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the weights with hooks on their gradients; a step asks for all of them, and few have any."""
    if not (any(map(_HOOKS, weights)) or any(map(_LATER_HOOKS, weights))):
        return []
    return list(filter(_is_hooked, weights))


def _is_hooked(weight: Tensor) -> bool:
    return bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))
