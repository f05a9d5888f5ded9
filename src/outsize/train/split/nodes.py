"""Problem: the user's backward comes to a call microbatch by microbatch, from the last one to the first.

    x ── parts ─┬─ microbatch 0 ─┬─ join ── output ── loss.backward()
    W ──────────┼─ microbatch 1 ─┤
                └─ microbatch 2 ─┘       autograd runs the youngest node that is ready: 2, then 1, then 0

The nodes of microbatches are made in order behind the forwards, so autograd runs them as it runs the graphs
of a plain loop that calls the model once for each microbatch and joins what it returns. Each runs its part of
the schedule, and hands to W what it has got, where autograd adds it to all other gradients of W. A node has
an edge for each gradient that may arrive, in that order. What lies between a node and the join are tensors of
the outputs' shapes without memory; the values are in the joined output.

Where replicas have calls of their own among those that run together, a rank that has none of a call passes
its backward by. The gradients of all calls are added up over ranks once, in the backward of the last call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from outsize.errors import BadOption
from outsize.run.stage.outer_graph import OuterGraph, at_most
from outsize.run.transport.groups import RankGroup
from outsize.train.ranks.replicas import Piece
from outsize.train.split.gradient_sums import BackwardArrivals
from outsize.train.split.opened_call import OpenedCall

GradInputs = Sequence[tuple[int, Tensor]]
"""Inputs of a microbatch that want a gradient, by their positions among its tensors."""


class CallGradientSum(Protocol):
    """Adds up the gradients of weights that several ranks have, for several microbatches."""

    def stand_ins(self, names: Sequence[str], weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors of the shapes that gradients have before they are added up."""
        ...

    def add_up(
        self, names: Sequence[str], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the gradients of the weights; None where no rank has one. All ranks call it alike."""
        ...


SumsOf = Callable[[str], CallGradientSum | None]
"""Returns what adds up the gradient of a weight of this name over ranks; None where no other rank has it."""


@final
@dataclass(frozen=True, slots=True)
class JoinedOutput:
    """One output of the whole batch: along `dim` the microbatches' outputs of these sizes; without a dim the
    sum of them by `shares`, or what one of them returned where there are no shares.

    `shapes` are those of the microbatches; `requires_grad` says whether it is in the user's graph.
    """

    dtype: torch.dtype
    device: torch.device
    dim: int | None
    shapes: Sequence[torch.Size]
    shares: Sequence[float]
    requires_grad: bool

    def parts(self, gradient: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """Returns the gradients of the outputs of these microbatches, zeros for one that does not count."""
        if self.dim is None:
            return [gradient * self.shares[piece.part] if piece.counts else gradient * 0 for piece in pieces]
        parts = gradient.split([shape[self.dim] for shape in self.shapes], self.dim)
        return [parts[p.part] if p.counts else torch.zeros_like(parts[p.part]) for p in pieces]


@final
class SummedWeights:
    """Makes stand-ins for the weights of calls that run together, whose gradients are summed over ranks.

    A sum of a call's gradients waits for those of the calls behind it; `arrivals` knows which have come.
    """

    def __init__(self, weights: Mapping[str, Tensor], sums_of: SumsOf, arrivals: BackwardArrivals) -> None:
        self.arrivals = arrivals
        by_sum: dict[CallGradientSum, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            summing = sums_of(name)
            if summing is not None:
                by_sum.setdefault(summing, {})[name] = weight
        self._behind: dict[int, Tensor] = {}
        for summing, summed in by_sum.items():
            made = _Sum.apply(arrivals, summing, tuple(summed), *summed.values())
            made = made if isinstance(made, tuple) else (made,)
            self._behind |= dict(zip(map(id, summed.values()), made, strict=True))

    def of(self, weight: Tensor) -> Tensor:
        """Returns what gets the gradients of a weight."""
        return self._behind.get(id(weight), weight)

    def every(self) -> list[Tensor]:
        """Returns what stands for weights, all of them."""
        return list(self._behind.values())


@final
class CallNodes:
    """The nodes of one call, which is the one of this `place` among those that run together."""

    def __init__(
        self,
        call: OpenedCall,
        place: int,
        joined: Sequence[JoinedOutput],
        inputs: Sequence[GradInputs],
        stand_in: Tensor,
    ) -> None:
        self._call, self._place = call, place
        self._joined, self._inputs, self._stand_in = joined, inputs, stand_in
        # Those of this replica. One that has fewer than others repeats the last one without a share: ranks
        # that divide experts compute backwards together, and all of them add up gradients.
        self._pieces = {piece.number: piece for piece in call.outputs.pieces}
        self._numbers = list(self._pieces)
        self._left = len(self._numbers)
        self._summed: SummedWeights | None = None
        self._trained = [at for at, output in enumerate(joined) if output.requires_grad]

    def outputs(self, wholes: Sequence[Tensor], summed: SummedWeights) -> list[Tensor]:
        """Returns the outputs of the batch, with these values, in the user's graph."""
        outputs = list(wholes)
        if not self._trained:
            summed.arrivals.leave_out(self._place)
            self._call.close()
            return outputs
        self._summed = summed
        tokens: list[tuple[Tensor, ...]] = []
        for number in self._numbers:
            before = tokens[-1][-1] if tokens else None
            tokens.append(_Microbatch.apply(self, number, before, self._stand_in, *self._edges(number)))
        if not tokens:
            tokens.append(_OfOthers.apply(self, self._stand_in, *summed.every()))
        for place, at in enumerate(self._trained):
            outputs[at] = _Join.apply(
                self._joined[at], [*self._pieces.values()], [outputs[at]], *(t[place] for t in tokens)
            )
        return outputs

    def tokens(self, number: int | None) -> list[Tensor]:
        """Returns tensors that have the shapes of a microbatch's outputs, and the memory of one number; of
        None the shapes of the call's first one, which another replica has.
        """
        each = [self._joined[at] for at in self._trained]
        part = 0 if number is None else self._pieces[number].part
        shapes = [(output, output.shapes[part]) for output in each]
        return [
            torch.empty_strided(shape, [0] * len(shape), dtype=output.dtype, device=output.device)
            for output, shape in shapes
        ]

    def pass_by(self) -> None:
        """Ends the backward of a call none of whose microbatches are here."""
        self._end()

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """Runs the backward of a microbatch; yields the gradients of its edges.

        Raises BadOption where it has run, or gradients of gradients are asked for.
        """
        if torch.is_grad_enabled():
            raise BadOption(
                "a split model has no gradients of gradients (create_graph=True)",
                numbers=f"microbatch {number} of a call",
                next_step="compute what needs them on the plain model, model.module, in one process",
            )
        if not self._left or number != self._numbers[self._left - 1]:
            raise BadOption(
                "the backward of this call has run, and its activations are freed",
                numbers=f"microbatch {number}; {self._left} of {len(self._numbers)} are left",
                next_step="call the model again for a second backward, or add up the losses and call "
                "backward() once",
            )
        self._left -= 1
        every: list[Tensor | None] = [None] * len(self._joined)
        for at, gradient in zip(self._trained, gradients, strict=True):
            every[at] = gradient
        try:
            self._call.backward(self._pieces[number], every)
            yield from self._gradients(number)
        except BaseException:
            self._left = 0
            self._call.close()
            raise
        if not self._left:
            self._end()

    def _end(self) -> None:
        assert self._summed is not None
        self._summed.arrivals.arrive(self._place)
        self._call.close()

    def _outers(self, number: int) -> Iterator[tuple[int, OuterGraph]]:
        yield from self._call.group_of(number).outers(number)

    def _edges(self, number: int) -> Iterator[Tensor]:
        """Yields what gets gradients of a microbatch behind the stand-in, once for each that may arrive."""
        assert self._summed is not None
        for _, outer in self._outers(number):
            yield from (tensor for _, tensor in self._inputs[self._pieces[number].part])
            for name, weight in outer.weights.items():
                yield from [self._summed.of(weight)] * outer.most(name)

    def _gradients(self, number: int) -> Iterator[Tensor | None]:
        """Yields the gradients of the stand-in, where there are no others, and of `_edges`."""
        group = self._call.group_of(number)
        has_weights = any(outer.weights for _, outer in group.outers(number))
        yield None if has_weights else torch.zeros_like(self._stand_in)
        place = group.numbers.index(number)
        for _, outer in group.outers(number):
            found = outer.gradients.pop(place)
            for position, tensor in self._inputs[self._pieces[number].part]:
                gradient = found.inputs.get(position)
                yield None if gradient is None else gradient.to(tensor.device)
            for name in outer.weights:
                most = outer.most(name)
                arrived = at_most(found.weights.get(name, []), most)
                yield from arrived
                yield from [None] * (most - len(arrived))


@final
class _Microbatch(Function):
    """The node of one microbatch: its inputs get gradients, its outputs stand for the model's."""

    @staticmethod
    def forward(ctx: Any, nodes: CallNodes, number: int, before: Tensor | None, *edges: Tensor) -> Any:
        """Returns a tensor for each output, and one that the next microbatch takes as `before`.

        A thread of autograd that waits within a backward for another device takes up whatever else is ready;
        so the node of a microbatch is not ready before that of the next one has ended.
        """
        ctx.set_materialize_grads(False)
        ctx.nodes, ctx.number = nodes, number
        return (*nodes.tokens(number), torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Returns the gradients of the edges."""
        return (None, None, None, *ctx.nodes.backward(ctx.number, grad_outputs[:-1]))


@final
class _OfOthers(Function):
    """The node of a call whose microbatches other replicas have: the sums over ranks come behind it."""

    @staticmethod
    def forward(ctx: Any, nodes: CallNodes, *edges: Tensor) -> Any:
        """Returns a tensor for each output."""
        ctx.set_materialize_grads(False)
        ctx.nodes, ctx.edges = nodes, len(edges)
        return tuple(nodes.tokens(None))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Returns no gradients."""
        ctx.nodes.pass_by()
        return (None,) * (1 + ctx.edges)


@final
class _Join(Function):
    """The node of one output of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, joined: JoinedOutput, pieces: Sequence[Piece], values: list[Tensor], *tokens: Tensor
    ) -> Tensor:
        """Returns the one tensor in `values`. A node that held it would be held by it, and never be freed."""
        ctx.joined, ctx.pieces, ctx.tokens = joined, pieces, len(tokens)
        return values.pop()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Returns the gradients of the microbatches' outputs."""
        parts = ctx.joined.parts(grad_outputs[0], ctx.pieces) if ctx.pieces else [None] * ctx.tokens
        return (None, None, None, *parts)


@final
class _Sum(Function):
    """Weights of calls that run together whose gradients are added up over ranks; each call's backward comes
    to it, or that of a loss over several calls.
    """

    @staticmethod
    def forward(
        ctx: Any, arrivals: BackwardArrivals, summing: CallGradientSum, names: Sequence[str], *weights: Tensor
    ) -> Any:
        """Returns what stands for the weights."""
        ctx.set_materialize_grads(False)
        ctx.summing, ctx.names, ctx.weights = summing, names, [weight.detach() for weight in weights]
        ctx.arrivals, ctx.held = arrivals, [None] * len(names)
        return tuple(summing.stand_ins(names, weights))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Returns the sums of all calls in the backward of the last one, and nothing before; None for a
        weight that has no gradient on any rank.
        """
        gradients = list(map(_plus, ctx.held, grad_outputs))
        if ctx.arrivals.more_come():
            ctx.held = gradients
            return (None, None, None, *(None for _ in gradients))
        ctx.held = [None] * len(gradients)
        return (None, None, None, *ctx.summing.add_up(ctx.names, ctx.weights, gradients))


def _plus(held: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if held is None or gradient is None:
        return gradient if held is None else held
    return held + gradient


@final
class SharedInput(Function):
    """An input of the whole batch: its gradient is added up over the ranks of each group in turn, from the
    last rank to the first, and the same on all of them.
    """

    @staticmethod
    def forward(ctx: Any, groups: Sequence[RankGroup], value: Tensor) -> Tensor:
        """Returns the input."""
        ctx.groups = groups
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Returns the sum of all ranks' gradients."""
        total = grad_outputs[0]
        for group in ctx.groups:
            own = total.contiguous()
            every = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(every, own, group=group.of_tensor(own))
            total = every[-1]
            for other in reversed(every[:-1]):
                total = total + other
        return None, total
