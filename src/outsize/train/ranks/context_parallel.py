"""Defines ContextRanks: the ranks that share the sequences of a microbatch, each with its rows.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other

Weights are whole on each of them. The gradient of a weight is the sum of theirs, which is added up together
with that of replicas (ranks/mesh.py, `holders`), once per step.
"""

from __future__ import annotations

from typing import final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.axes.context import CONTEXT
from outsize.ir.plan import Plan
from outsize.program.sharding.context_parallel.row_tape import row_tape
from outsize.program.sharding.context_parallel.rows import by_rows
from outsize.program.tape import Tape
from outsize.run.collectives.context_parallel import ContextParallelGroup
from outsize.train.ranks.axis_ranks import ranks_along
from outsize.train.ranks.mesh import Mesh


@final
class ContextRanks:
    """The ranks of a mesh of one dim, each of which has its rows of every sequence."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, compiled: bool = False) -> None:
        """Joins the ranks of `mesh`. `compiled`: stages are compiled, and their graphs end at collectives."""
        self.group, self._model = ContextParallelGroup(mesh, ends_graphs=compiled), model

    def local(self, tape: Tape) -> Tape:
        """Returns the rank's own tape.

        Raises BadOption where something cannot be computed by rows.
        """
        rows = by_rows(tape, self._model, self.group.place.ranks)
        return row_tape(tape, rows, dict(self._model.named_modules()), self.group)


def context_ranks(model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool) -> ContextRanks | None:
    """Returns the ranks that the plan asks for; None for cp 1.

    Raises BadOption and WorldMismatch.
    """
    if plan.axes.cp == 1:
        return None
    return ContextRanks(model, ranks_along(CONTEXT, plan, mesh), compiled=compiled)
