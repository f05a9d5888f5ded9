"""Runs a stage part by part, so that one part's work alone can be shown and repeated.

    whole stage     received ------------------------------------------> sent, the loss
    in parts        received --> part 0 --> part 1 (shown) --> part 2 --> sent, the loss
    gradients       sink     <-- part 0 <-- part 1         <-- part 2 <-- arrived

The parts are programs of a finer cut of the same tape (train/verify/division.py), so they have the bits of
the whole stage as stages have those of the whole model: values enter as aliases, and partial gradients are
threaded from the last user to the first (run/stage/boundary.py). One microbatch of a verified step runs this
way; to the interpreter it is the stage with its own boundaries.

Oracles: tests/unit/run/verified/test_stage_in_parts.py, and tests/dist/test_verified_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor, nn

from outsize.run.stage.base import Gradients, Result, RunnableStage
from outsize.run.stage.boundary import Boundary
from outsize.run.stage.rng import Seed
from outsize.run.verified.shown_work import ShownStage, WorkRecord

_Backward = Callable[[RunnableStage], Callable[[int, float, Gradients], Gradients]]


@final
class StageInParts(RunnableStage):
    """Runs the parts of a stage, of which one notes its work in a record: the one that the record names."""

    def __init__(
        self,
        whole: RunnableStage,
        parts: Sequence[RunnableStage],
        first: int,
        model: nn.Module,
        record: WorkRecord,
    ) -> None:
        """`first` is the number of the first part in the finer cut, whose boundaries count parts."""
        self.program, self._whole = whole.program, whole
        self._parts, self._first, self._model, self._record = [*parts], first, model, record
        self._running = self._parts
        numbers = range(first, first + len(parts))
        each = {b.key: b for part in parts for b in (*part.program.received, *part.program.sent)}
        inner = {_identity(b): b.key for b in each.values()}
        program = self.program
        self._inner = {b.key: inner[_identity(b)] for b in (*program.received, *program.sent)}
        self._outer = {fine: key for key, fine in self._inner.items()}
        self._arriving = [_arriving(part, number) for number, part in enumerate(parts, first)]
        # The first part that takes a value has the sum of its gradients over all parts.
        back = (b for b in program.received if b.requires_grad)
        chains = {b.key: each[self._inner[b.key]].consumers for b in back}
        self._returning = {key: next(n for n in chain if n in numbers) for key, chain in chains.items()}

    def begin(self, grad_scale: Tensor | None = None) -> None:
        shown = self._record.part - self._first
        self._running = [
            ShownStage(part, self._model, self._record) if at == shown else part
            for at, part in enumerate(self._parts)
        ]
        for part in self._running:
            part.begin(grad_scale)

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        boundaries = self.program.received
        values = {self._inner[b.key]: value for b, value in zip(boundaries, received, strict=True)}
        sent: dict[int, Tensor] = {}
        loss: Tensor | None = None
        outputs: tuple[Any, ...] = ()
        for part in self._running:
            of_part = [values[b.key] for b in part.program.received]
            result = part.forward(microbatch, inputs, of_part, seed)
            for key, value in result.sent.items():
                # Each part has a graph of its own, as stages have.
                values[key] = value.detach()
                if key in self._outer:
                    sent[self._outer[key]] = value
            for boundary in part.program.sent:
                if boundary.weight is not None:
                    values[boundary.key] = part.tied_parameter(boundary.key).detach()
            loss = loss if result.loss is None else result.loss
            outputs = result.outputs or outputs
        return Result(sent, loss, outputs)

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        return self._through(microbatch, weight, gradients, lambda part: part.backward)

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        return self._through(microbatch, weight, gradients, lambda part: part.backward_input)

    def backward_weight(self, microbatch: int) -> None:
        for part in reversed(self._running):
            part.backward_weight(microbatch)

    def _through(self, microbatch: int, weight: float, gradients: Gradients, of: _Backward) -> Gradients:
        sinks: dict[int, Gradients] = {}
        for at in reversed(range(len(self._running))):
            coming = {
                key: sinks[far].get(key) if far in sinks else gradients.get(self._outer[key])
                for key, far in self._arriving[at]
            }
            sinks[self._first + at] = of(self._running[at])(microbatch, weight, coming)
        return {key: sinks[part].get(self._inner[key]) for key, part in self._returning.items()}

    def tied_parameter(self, key: int) -> Tensor:
        return self._whole.tied_parameter(key)

    def forget_casts(self) -> None:
        for part in self._parts:
            part.forget_casts()

    def forget(self) -> None:
        for part in self._parts:
            part.forget()


def _identity(boundary: Boundary) -> tuple[int, str | None]:
    """Returns what a value is in each cut of its tape."""
    return boundary.slot, boundary.weight


def _arriving(part: RunnableStage, number: int) -> list[tuple[int, int]]:
    """Returns the keys of values whose gradients come to a part, each with the part that has them before."""
    program = part.program
    ours = [(b.key, b.following(number)) for b in (*program.sent, *program.received) if b.requires_grad]
    return [(key, far) for key, far in ours if far is not None]
