"""Computes what a backward needs a second time instead of storing it.

    forward    what a segment receives is stored, what autograd would save in it is not
    backward   the segment runs again on that, and saves; then the backward proceeds

A segment is a stage ("full"), or some of its units ("selective"; what lies between them runs as usual). The
second forward equals the first to the bit: every random instruction seeds its generators (law 6), and buffers
are reset to their values before the first one, so nothing is counted twice (law 5). Chen et al. 2016,
arXiv:1604.06174, by torch's non-reentrant `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.program.generate import Compiler, SliceSpec, compile_slice
from outsize.program.tape import Instruction, Modes, Ref, Weight
from outsize.run.stage.batchnorm import DeferredStatistics
from outsize.run.stage.rng import Seed


@final
class Recompute:
    """Runs a function so that its activations are recomputed in the backward."""

    def __init__(
        self, model: nn.Module, written: Iterable[str], statistics: DeferredStatistics | None
    ) -> None:
        self._buffers = [model.get_buffer(name) for name in sorted(written)]
        self._statistics = statistics

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, with gradients."""
        # The generators are seeded inside the function, so torch need not store their states.
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
class SegmentedRecompute:
    """Runs a stage's function, of which some runs of instructions are recomputed."""

    def __init__(
        self,
        spec: SliceSpec,
        runs: Iterable[tuple[int, int]],
        model: nn.Module,
        ambient: Modes,
        statistics: DeferredStatistics | None,
        compiler: Compiler | None = None,
    ) -> None:
        """Generates the function; `runs` are (first origin, end) of instructions to recompute, in order.

        Between the runs autograd saves as usual. The function of a run is passed to `compiler`.
        """
        self._seed: Seed | None = None
        left = list(spec.instructions)
        for first, end in runs:
            segment_instructions = [i for i in left if first <= i.origin < end]
            if segment_instructions:
                part = _part_of(spec, segment_instructions)
                again = Recompute(
                    model, {w.name for i in segment_instructions for w in i.written_weights}, statistics
                )
                segment = self._segment(compile_slice(part, model, ambient, compiler), again)
                place = left.index(segment_instructions[0])
                left[place : place + len(segment_instructions)] = [_call(segment, part, ambient)]
        self._function = compile_slice(replace(spec, instructions=left), model, ambient)

    def __call__(self, *values: Any) -> Any:
        """Calls the stage's function, whose last argument is the seed."""
        self._seed = values[-1]
        return self._function(*values)

    def _segment(self, function: Callable[..., Any], again: Recompute) -> Callable[..., Any]:
        def segment(*args: Any) -> Any:
            return again.run(function, *args, self._seed)

        return segment


def _part_of(spec: SliceSpec, instructions: Sequence[Instruction]) -> SliceSpec:
    """Returns some instructions as a slice, with the values that come in and those that others read."""
    made = {slot for i in instructions for slot in i.defines()}
    read = {slot for i in instructions for slot in i.reads()}
    inside = {i.index for i in instructions}
    wanted = {s for i in spec.instructions if i.index not in inside for s in i.reads()} | set(spec.exits)
    used = {w.name for i in instructions for w in i.weights}
    return replace(
        spec,
        name=f"{spec.name}_from_{instructions[0].index}",
        instructions=instructions,
        entries=sorted(read - made - spec.constants.keys()),
        exits=sorted(made & wanted),
        foreign=[name for name in spec.foreign if name in used],
        through={name: function for name, function in spec.through.items() if name in used},
        constants={slot: tensor for slot, tensor in spec.constants.items() if slot in read},
    )


def _call(segment: Callable[..., Any], part: SliceSpec, ambient: Modes) -> Instruction:
    """Returns the segment as one instruction of its stage."""
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
