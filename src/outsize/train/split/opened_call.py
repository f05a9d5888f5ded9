"""Defines OpenedCall: the forwards of one call have run, and their graphs wait for the user's backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from outsize.run.stage.outer_graph import OuterGraph
from outsize.train.batch.loss_weights import Counted
from outsize.train.crew.open_pipeline import OpenPipeline
from outsize.train.ranks.replicas import Piece
from outsize.train.variants.variant import Variant


@final
@dataclass(frozen=True, slots=True)
class OpenedGroup:
    """Microbatches of one wiring, by their numbers in the call, and the pipeline that has their graphs."""

    numbers: Sequence[int]
    pipeline: OpenPipeline

    def outers(self, number: int) -> Iterator[tuple[int, OuterGraph]]:
        """Yields the stages of this process from the last to the first, each with its end in the user's
        graph.
        """
        place = self.numbers.index(number)
        for stage, microbatch in sorted(self.pipeline.stages, reverse=True):
            if microbatch == place:
                outer = self.pipeline.stages[stage, microbatch].outer
                assert outer is not None
                yield stage, outer


@final
@dataclass(frozen=True, slots=True)
class CallOutputs:
    """What the microbatches of a call have returned: the values of the last stage, where that runs here.

    `values[k]` are those of `pieces[k]`, in the order of `variants[number].cut.programs[-1].outputs`; a piece
    that does not count is a repetition. `counted` says by how much each microbatch counts in a loss, and
    `replicas` which replica has run it.
    """

    variants: Sequence[Variant]
    pieces: Sequence[Piece]
    values: Sequence[tuple[Tensor, ...]]
    counted: Sequence[Counted]
    replicas: Sequence[int]

    def of_parts(self, first: int, end: int) -> CallOutputs:
        """Returns the outputs of the microbatches from `first` to the one before `end`, as one call."""
        own = [at for at, piece in enumerate(self.pieces) if first <= piece.part < end]
        return CallOutputs(
            self.variants[first:end],
            [self.pieces[at]._replace(part=self.pieces[at].part - first) for at in own],
            [self.values[at] for at in own] if self.values else (),
            self.counted[first:end],
            self.replicas[first:end],
        )


@final
@dataclass(frozen=True, slots=True)
class OpenedCall:
    """One call of a split model, until the backward of its last microbatch.

    `groups` are in the order in which they have run; `close` gives back what the call has used, and `running`
    is the context of the backward of a microbatch.
    """

    outputs: CallOutputs
    groups: Sequence[OpenedGroup]
    close: Callable[[], None]
    running: Callable[[], AbstractContextManager[None]] = nullcontext

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the weights of this rank's stages that any of its microbatches has in the user's graph."""
        every = (outer for group in self.groups for n in group.numbers for _, outer in group.outers(n))
        return {name: weight for outer in every for name, weight in outer.weights.items()}

    def group_of(self, number: int) -> OpenedGroup:
        """Returns the group that has the microbatch."""
        return next(group for group in self.groups if number in group.numbers)

    def backward(self, piece: Piece, gradients: Sequence[Any]) -> None:
        """Runs the backward of a microbatch from the gradients of its outputs."""
        group = self.group_of(piece.number)
        stages = list(group.outers(piece.number))
        place = group.numbers.index(piece.number)
        last = len(self.outputs.variants[piece.part].cut.programs) - 1
        for stage, outer in stages:
            outer.output_gradients[place] = gradients if stage == last else ()
        with self.running():
            group.pipeline.backward(place)
