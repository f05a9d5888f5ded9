"""Notes what one stage computes of one microbatch, so that another rank can repeat it and compare bits.

    forward    inputs, values that were received, buffers before it    ->    values to send, the loss
    backward   gradients that were received, the share of the loss     ->    gradients to send, and of weights

`ShownStage` stands in the place of the stage for this microbatch alone; other steps, microbatches and stages
do not know of it. What goes in is copied, since received memory is lent and a stage may write to its inputs;
of what comes out digests are enough. Gradients of weights are noted as they come to their `.grad`, before
they are added to those of other microbatches, so the order of the schedule does not matter. They are caught
at the node that adds them (AccumulateGrad): a hook on the weight itself would change what a split backward
may postpone (run/stage/split_backward.py).

Oracles: tests/unit/run/verified/test_repeated_work.py, and tests/dist/test_verified_steps.py: steps with and
without are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from outsize.program.weights.lookup import weight_named
from outsize.run.stage.base import Gradients, Result, RunnableStage, StageAround
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.rng import MicrobatchSeed, Seed
from outsize.run.verified.digests import Noted

WENT_IN: Final = "what went in"
WEIGHTS: Final = "the weights"
LOSS: Final = "the loss"


@final
@dataclass
class StageWork:
    """Holds what goes into the forward and the backward of a microbatch on a part of a stage.

    `part` is its number in the cut that has a program for each part, `shapes` are those of all inputs of the
    microbatch's program, `inputs` those that the part reads, `buffers` the values of those that its forward
    writes, before it. `seed` is (seed, step, microbatch), `share` that of the loss. A backward that is
    `split` computes gradients of weights after those of inputs.
    """

    part: int
    microbatch: int
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    seed: tuple[int, int, int] = (0, 0, 0)
    share: float = 1.0
    gradients: Gradients = field(default_factory=dict)
    grad_scale: Tensor | None = None
    split: bool = False


@final
@dataclass(slots=True)
class WorkRecord:
    """Names the part that is shown next, and holds what was noted last: its work, and digests of what came
    out.
    """

    part: int = -1
    work: StageWork = field(default_factory=lambda: StageWork(-1, -1))
    noted: Noted = field(default_factory=Noted)

    def name(self, part: int) -> None:
        """Names the part that is shown next."""
        self.part = part


@final
class ShownStage(StageAround[RunnableStage]):
    """Runs a stage as it is, and notes in a record what it is given and what it computes."""

    def __init__(self, stage: RunnableStage, model: nn.Module, record: WorkRecord) -> None:
        super().__init__(stage)
        self._model, self._record = model, record
        self._grad_scale: Tensor | None = None

    @property
    def alternates(self) -> bool:
        return self._stage.alternates

    def begin(self, grad_scale: Tensor | None = None) -> None:
        self._grad_scale = grad_scale
        self._stage.begin(grad_scale)

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        program, record = self.program, self._record
        assert isinstance(seed, MicrobatchSeed)
        own = [inputs[position] for position in program.inputs]
        record.noted = Noted()
        record.work = StageWork(
            record.part,
            microbatch,
            shapes=[tuple(x.shape) for x in inputs],
            inputs=[*map(_copied, own)],
            received=[*map(_copied, received)],
            buffers={name: _copied(weight_named(self._model, name)) for name in sorted(program.written)},
            seed=seed.parts,
            grad_scale=self._grad_scale,
        )
        result = self._stage.forward(microbatch, inputs, received, seed)
        note_forward(record.noted, result)
        return result

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        self._note_arrival(weight, gradients, split=False)
        with noting_gradients(self._record.noted, self.program, self._model):
            sink = self._stage.backward(microbatch, weight, gradients)
        note_gradients(self._record.noted, sink)
        return sink

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        self._note_arrival(weight, gradients, split=True)
        with noting_gradients(self._record.noted, self.program, self._model):
            sink = self._stage.backward_input(microbatch, weight, gradients)
        note_gradients(self._record.noted, sink)
        return sink

    def backward_weight(self, microbatch: int) -> None:
        with noting_gradients(self._record.noted, self.program, self._model):
            self._stage.backward_weight(microbatch)

    def _note_arrival(self, weight: float, gradients: Gradients, *, split: bool) -> None:
        work = self._record.work
        work.share, work.split = weight, split
        work.gradients = {key: None if g is None else _copied(g) for key, g in gradients.items()}


def note_forward(noted: Noted, result: Result) -> None:
    """Notes what a forward has computed."""
    for key, value in result.sent.items():
        noted.add(f"value {key}", value)
    if result.loss is not None:
        noted.add(LOSS, result.loss)


def note_gradients(noted: Noted, sink: Gradients) -> None:
    """Notes the gradients of what a stage has received."""
    for key, gradient in sink.items():
        noted.add(f"the gradient of value {key}", gradient)


def note_work(noted: Noted, work: StageWork) -> None:
    """Notes what went in, so that what arrived otherwise is not taken for what was computed."""
    gradients = [work.gradients[key] for key in sorted(work.gradients)]
    for tensor in (*work.inputs, *work.received, *work.buffers.values(), *gradients):
        noted.add(WENT_IN, tensor)


def note_weights(noted: Noted, tensors: Mapping[str, Tensor]) -> None:
    """Notes the weights with which a stage computes."""
    for name in sorted(tensors):
        noted.add(WEIGHTS, tensors[name])


def weights_of(program: StageProgram, model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights that the stage's own modules hold by name, but buffers that its forwards write."""
    return {name: weight_named(model, name) for name in sorted(program.weights - program.written)}


@contextmanager
def noting_gradients(noted: Noted, program: StageProgram, model: nn.Module) -> Iterator[None]:
    """Notes the gradients of the stage's weights that come to their `.grad` within the context."""
    named = {id(weight): (name, weight) for name, weight in weights_of(program, model).items()}
    trained = [(name, w) for name, w in named.values() if w.requires_grad and w.is_leaf]
    edges = [(name, get_gradient_edge(weight)) for name, weight in trained]
    hooks = [edge.node.register_prehook(_noting(noted, name)) for name, edge in edges]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _noting(noted: Noted, name: str) -> Callable[[Sequence[Tensor | None]], None]:
    return partial(_note, noted, f"the gradient of {name}")


def _note(noted: Noted, name: str, gradients: Sequence[Tensor | None]) -> None:
    noted.add(name, gradients[0])


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def sendable_weights(program: StageProgram, model: nn.Module) -> dict[str, Tensor]:
    """Returns the stage's weights for another rank: one that has two names is one tensor there, too."""
    alone: dict[int, Tensor] = {}
    return {
        name: alone.setdefault(id(weight), weight.detach())
        for name, weight in weights_of(program, model).items()
    }
