"""Handles regions of torch.utils.checkpoint, which are recorded flat: their activations are kept.

A plain backward runs the forward of a region again, so what the region writes is written twice. A replay
writes it once, or twice in the forward where that is the same: running statistics of a batch, which the
region does not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from outsize.capture.recording.calls.failures import FrameFailed
from outsize.program.source_line import calling_line
from outsize.program.tape import Instruction


@final
class CheckpointRegions:
    """The regions of one recording; `lines` are those of the user's code that open them."""

    def __init__(self, instructions: list[Instruction], modules: Mapping[str, nn.Module]) -> None:
        self.lines: dict[str, None] = {}
        self._instructions, self._modules = instructions, modules
        self._open: list[int] = []  # The first instructions of open regions.
        self._leaves: set[str] = set()  # These leaves have regions of their own.

    def begin(self, leaf: str | None) -> None:
        """Notes that a region begins, in a leaf or in recorded code."""
        self.lines[calling_line()] = None
        self._open.append(len(self._instructions))
        if leaf is not None:
            self._leaves.add(leaf)

    def end(self, *, runs_again: bool) -> None:
        """Notes that the last region ends. Raises FrameFailed for what cannot be written twice."""
        first = self._open.pop()
        for place in range(first, len(self._instructions)) if runs_again else ():
            instruction = self._instructions[place]
            if instruction.written_weights:
                self._insist_on_statistics(instruction)
                self._instructions[place] = replace(instruction, writes_twice=True)

    def _insist_on_statistics(self, instruction: Instruction) -> None:
        """Checks that a call of a region only writes what it does not read: running statistics of the
        batch. Raises FrameFailed.
        """
        module = self._modules[instruction.target] if isinstance(instruction.target, str) else None
        is_norm = isinstance(module, _NormBase) and not hasattr(module, "parametrizations")
        if not is_norm or instruction.writes_twice:
            reason = f"{instruction.name} writes a buffer in a checkpoint region, and the backward again"
            raise FrameFailed("", reason, instruction.where)

    def insist_on_own_statistics(self) -> None:
        """Checks that what the backward writes again can be written in the forward: no other call writes it,
        and no leaf has a region of its own. Raises FrameFailed.
        """
        writers = Counter(w for i in self._instructions for w in i.written_weights)
        for instruction in self._instructions:
            is_shared = instruction.writes_twice and any(writers[w] > 1 for w in instruction.written_weights)
            has_region = instruction.target in self._leaves and instruction.written_weights
            if is_shared or (has_region and instruction.modes.grad):
                reason = f"the backward writes the buffers of {instruction.name} again, in its own order"
                raise FrameFailed("", reason, instruction.where)
