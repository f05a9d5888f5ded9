"""Recompute: what a backward needs is computed a second time instead of kept.

    forward    what a segment receives stays, what autograd would save in it does not
    backward   the segment runs again on that, and saves; then the backward goes on

A segment is a stage ("full"), or some of its units ("selective"; what lies between them runs as ever). The
second forward is the first to the bit: every random instruction seeds its generators (law 6), and the
buffers that the first one changed are as before it, so nothing is counted twice (law 5).
Chen et al. 2016, arXiv:1604.06174, by torch's non-reentrant `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.tape import Instruction, Modes, Ref, Weight
from outsize.run.rng import Seed
from outsize.run.statistics import Statistics


@final
class Recompute:
    """Runs a function so that its activations are computed anew in the backward."""

    def __init__(self, model: nn.Module, written: Iterable[str], statistics: Statistics | None) -> None:
        self._buffers = [model.get_buffer(name) for name in sorted(written)]
        self._statistics = statistics

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, with gradients."""
        # The generators are seeded inside the function, so torch need not keep their states.
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._again([b.clone() for b in self._buffers])

    @contextmanager
    def _again(self, before: list[Tensor]) -> Iterator[None]:
        now = [b.clone() for b in self._buffers]
        self._set(before)
        try:
            with nullcontext() if self._statistics is None else self._statistics.paused():
                yield
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


@final
class InSegments:
    """A stage's function, of which some runs of instructions are recomputed."""

    def __init__(
        self,
        spec: SliceSpec,
        runs: Iterable[tuple[int, int]],
        model: nn.Module,
        ambient: Modes,
        statistics: Statistics | None,
        through: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        """`runs` of instructions: (first origin, end) each, in order; between them autograd saves as ever.
        The function of a run goes `through` something, such as a compiler.
        """
        self._seed: Seed | None = None
        left = list(spec.instructions)
        for first, end in runs:
            own = [i for i in left if first <= i.origin < end]
            if own:
                part = _part_of(spec, own)
                again = Recompute(model, {w.name for i in own for w in i.written_weights}, statistics)
                segment = self._segment(through(compile_slice(part, model, ambient)), again)
                place = left.index(own[0])
                left[place : place + len(own)] = [_call(segment, part, ambient)]
        self._function = compile_slice(replace(spec, instructions=left), model, ambient)

    def __call__(self, *values: Any) -> Any:
        """As the stage's function, whose last argument is the seed."""
        self._seed = values[-1]
        return self._function(*values)

    def _segment(self, function: Callable[..., Any], again: Recompute) -> Callable[..., Any]:
        def segment(*args: Any) -> Any:
            return again.run(function, *args, self._seed)

        return segment


def _part_of(spec: SliceSpec, own: Sequence[Instruction]) -> SliceSpec:
    """Some instructions as a slice: what comes in, what others read of it."""
    made = {slot for i in own for slot in i.defines()}
    read = {slot for i in own for slot in i.reads()}
    inside = {i.index for i in own}
    wanted = {s for i in spec.instructions if i.index not in inside for s in i.reads()} | set(spec.exits)
    used = {w.name for i in own for w in i.weights}
    return replace(
        spec,
        name=f"{spec.name}_from_{own[0].index}",
        instructions=own,
        entries=sorted(read - made - spec.constants.keys()),
        exits=sorted(made & wanted),
        foreign=[name for name in spec.foreign if name in used],
        through={name: function for name, function in spec.through.items() if name in used},
        constants={slot: tensor for slot, tensor in spec.constants.items() if slot in read},
    )


def _call(segment: Callable[..., Any], part: SliceSpec, ambient: Modes) -> Instruction:
    """The segment as one instruction of its stage."""
    foreign = tuple(Weight(name, "parameter") for name in part.foreign)
    return replace(
        part.instructions[0],
        target=segment,
        args=(*map(Ref, part.entries), *foreign),
        kwargs={},
        out=tuple(map(Ref, part.exits)),
        modes=ambient,
        random=False,
        weights=foreign,
    )
