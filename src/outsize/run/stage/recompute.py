"""Computes what a backward needs a second time instead of storing it.

    forward    what a segment receives is stored, what autograd would save in it is not
    backward   the segment runs again on that, and saves; then the backward proceeds

A segment is a stage ("full"), or some of its units ("selective"; what lies between them runs as usual). With
`BlocksAway` what a segment receives is on the host meanwhile, and so is what attention has returned in it,
which is not computed again (run/collectives/kept_attention.py). The
second forward equals the first to the bit: every random instruction seeds its generators (law 6), and buffers
are reset to their values before the first one, so nothing is counted twice (law 5). Chen et al. 2016,
arXiv:1604.06174, by torch's non-reentrant `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from outsize.program.generate import Compiler, SliceSpec, compile_slice
from outsize.program.tape import Instruction, Modes, Ref, Weight
from outsize.run.collectives.kept_attention import KeptAttention
from outsize.run.stage.batchnorm import DeferredStatistics
from outsize.run.stage.rng import Seed


class BlockAway(Protocol):
    """Holds what one segment of a microbatch keeps until its backward, where it is not on the device."""

    def pack(self, tensor: Tensor, /) -> Any:
        """Returns what stands for the tensor, which may be the tensor itself."""
        ...

    def unpack(self, packed: Any, /) -> Tensor:
        """Returns the tensor for what `pack` returned."""
        ...

    def leave(self) -> None:
        """Ends the segment's forward: what was packed leaves the device."""
        ...


class BlocksAway(Protocol):
    """Holds the same of all segments of a microbatch, which come back in the order opposite to theirs."""

    def begin(self, staying: Sequence[Tensor], /) -> BlockAway:
        """Begins a segment's forward; the tensors of `staying` remain on the device."""
        ...


@final
class Recompute:
    """Runs a function so that its activations are recomputed in the backward."""

    def __init__(
        self, model: nn.Module, written: Iterable[str], statistics: DeferredStatistics | None
    ) -> None:
        self._buffers = [model.get_buffer(name) for name in sorted(written)]
        self._statistics = statistics

    def run(self, function: Callable[..., Any], *args: Any, kept: KeptAttention | None = None) -> Any:
        """Returns `function(*args)`, with gradients; `kept` has what attention returns for the backward."""
        # The generators are seeded inside the function, so torch need not store their states.
        contexts = partial(self._contexts, kept)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def _contexts(
        self, kept: KeptAttention | None
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[None]]:
        first = nullcontext() if kept is None else kept.first()
        return first, self._again([b.clone() for b in self._buffers], kept)

    @contextmanager
    def _again(self, before: list[Tensor], kept: KeptAttention | None) -> Iterator[None]:
        now = [b.clone() for b in self._buffers]
        self._set(before)
        try:
            with (
                nullcontext() if self._statistics is None else self._statistics.paused(),
                nullcontext() if kept is None else kept.second(),
            ):
                yield
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


@final
@dataclass(frozen=True, kw_only=True)
class SegmentSetting:
    """Says how the segments of a stage of `model` run again; `ambient` are the modes around them. The
    function of a segment is passed to `compiler`. `away` returns where a microbatch has what its segments
    keep; without it that stays on the device.
    """

    model: nn.Module
    ambient: Modes
    statistics: DeferredStatistics | None
    compiler: Compiler | None = None
    away: Callable[[], BlocksAway] | None = None


@final
class SegmentedRecompute:
    """Runs a stage's function, of which some runs of instructions are recomputed."""

    def __init__(
        self,
        spec: SliceSpec,
        runs: Iterable[tuple[int, int]],
        again: SegmentSetting,
    ) -> None:
        """Generates the function; `runs` are (first origin, end) of instructions to recompute, in order.

        Between the runs autograd saves as usual.
        """
        model, ambient = again.model, again.ambient
        self._seed: Seed | None = None
        self._away = again.away
        self._blocks: BlocksAway | None = None
        left = list(spec.instructions)
        for first, end in runs:
            segment_instructions = [i for i in left if first <= i.origin < end]
            if segment_instructions:
                part = _part_of(spec, segment_instructions)
                written = {w.name for i in segment_instructions for w in i.written_weights}
                function = compile_slice(part, model, ambient, again.compiler)
                recompute = Recompute(model, written, again.statistics)
                segment = self._segment(function, recompute, _own_entries(spec, part))
                place = left.index(segment_instructions[0])
                left[place : place + len(segment_instructions)] = [_call(segment, part, ambient)]
        self._function = compile_slice(replace(spec, instructions=left), model, ambient)

    def __call__(self, *values: Any) -> Any:
        """Calls the stage's function, whose last argument is the seed."""
        self._seed = values[-1]
        self._blocks = None if self._away is None else self._away()
        return self._function(*values)

    def _segment(
        self, function: Callable[..., Any], again: Recompute, own: Collection[int] | None
    ) -> Callable[..., Any]:
        """Returns the segment's function; of its arguments those at the places `own` are read nowhere else,
        and None says that what it keeps stays as it is.
        """

        def segment(*args: Any) -> Any:
            if self._blocks is None or own is None or not torch.is_grad_enabled():
                return again.run(function, *args, self._seed)
            others = [x for at, x in enumerate(args) if at not in own and isinstance(x, Tensor)]
            block = self._blocks.begin(others)
            # Inside, torch's checkpoint has hooks of its own: these get what the segment receives.
            with saved_tensors_hooks(block.pack, block.unpack):
                made = again.run(function, *args, self._seed, kept=KeptAttention(block.pack, block.unpack))
            block.leave()
            return made

        return segment


def _own_entries(spec: SliceSpec, part: SliceSpec) -> frozenset[int] | None:
    """Returns the places of the values among a segment's arguments that nothing else in its stage reads, and
    that the stage has not received; None where something is written in place, which a copy would miss.
    """
    inside = {i.index for i in part.instructions}
    outside = [i for i in spec.instructions if i.index not in inside]
    if any(i.writes for i in spec.instructions):
        return None
    others = {slot for i in outside for slot in i.reads()} | {*spec.exits, *spec.entries}
    return frozenset(at for at, slot in enumerate(part.entries) if slot not in others)


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
