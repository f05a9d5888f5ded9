"""Writes the tape of a rank of tensor parallelism, which has parts of the weights.

A value that every rank has whole and a sharded instruction reads is entered first: its gradient is added up
once for all that read it. Source: Megatron-LM, arXiv 1909.08053, the conjugate operators f (enter) and g
(reduce). Complexity: O(instructions). Oracle: tests/dist/test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import nn

from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.rank_tape import RankTapeWriter
from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.styles import Derived
from outsize.program.tape import Instruction, Ref, Tape


def local_tape(
    tape: Tape, derived: Derived, modules: Mapping[str, nn.Module], group: AxisGroup, *, gather: bool = True
) -> Tape:
    """Returns the tape of the rank at `group.place`; with `gather` the outputs of the model are whole."""
    return _TensorTapeWriter(derived, derived.gathered if gather else {}, tape, modules, group).write()


@final
class _TensorTapeWriter(RankTapeWriter):
    """Enters what is whole; gradients of whole values are whole on every rank."""

    def __init__(
        self,
        derived: Derived,
        gathered: Mapping[int, Share],
        tape: Tape,
        modules: Mapping[str, nn.Module],
        group: AxisGroup,
    ) -> None:
        super().__init__(tape, derived, modules, group)
        self._entered_weights, self._gathered = derived.entered, gathered

    def _entered(self, leaf: Ref, before: Instruction) -> Ref:
        meta = self._metas[leaf.slot]
        if not meta.requires_grad:
            return leaf
        return self._insert(("enter", leaf), self._group.call("enter"), leaf, meta, before)

    def _finished(self) -> Tape:
        output = self._with_whole(self._tape.output, self._gathered)
        through = dict.fromkeys(sorted(self._entered_weights), self._group.call("enter"))
        return self._written(output=output, through=through)
