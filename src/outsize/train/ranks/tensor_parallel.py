"""Defines TensorRanks: the ranks that share a model's layers, and this process's parts of its weights.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other

The first tape decides which weights are divided (program/sharding/tensor_parallel/styles.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from torch import nn

from outsize.axes.axis import Axis
from outsize.axes.tensor import TENSOR
from outsize.ir.plan import Plan
from outsize.program.sharding.scaled_linear import insist_on_scales_of_tensors
from outsize.program.sharding.share import Share
from outsize.program.sharding.stored_weight import CodesPart, insist_on_divided_codes, stored_weights
from outsize.program.sharding.tensor_parallel.explain_styles import explain
from outsize.program.sharding.tensor_parallel.local_tape import local_tape
from outsize.program.sharding.tensor_parallel.roles import Role
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import derive
from outsize.program.tape import Tape
from outsize.run.collectives.tensor_parallel import TensorParallelGroup
from outsize.train.ranks.axis_ranks import AxisRanks
from outsize.train.ranks.mesh import Mesh


@final
class TensorRanks(AxisRanks):
    """The ranks of a mesh of one dim, which share every stage of a pipeline."""

    axis: ClassVar[Axis] = TENSOR

    def __init__(
        self, model: nn.Module, mesh: Mesh, plan: Plan, alike: TensorParallelGroup | None, *, compiled: bool
    ) -> None:
        self._model, self.group = model, TensorParallelGroup(mesh.along(self.axis), ends_graphs=compiled)
        self._sequence = plan.sequence_parallel  # Activations between divided layers are divided, too.
        self._roles: Mapping[str, Role] | None = None
        self._codes: Mapping[str, CodesPart] = {}

    @property
    def first(self) -> bool:
        return self.group.place.rank == 0

    def claimed(self, tape: Tape) -> Mapping[str, str]:
        return {}  # It divides what others leave.

    def local(self, tape: Tape, whole: Mapping[str, str]) -> Tape:
        """Returns the rank's own tape. Raises BadOption where the number of ranks does not divide a size."""
        insist_on_scales_of_tensors(self._model)
        insist_on_divided_codes(self._model, self.group.place.ranks)
        derived = derive(tape, self._model, self._roles, whole)
        if self._roles is None:
            styles = explain(tape, self._model, derived)
            styles.insist_on_degree(self.group.place.ranks)
            self._roles = derived.roles
            self._codes = self._divided_codes(derived.roles)
        derived = in_sequence(tape, derived, self._model) if self._sequence else derived
        return local_tape(tape, derived, dict(self._model.named_modules()), self.group)

    def share(self, name: str) -> Share | None:
        role = (self._roles or {}).get(name)
        codes = self._codes.get(name)
        return codes.of_codes if codes is not None else None if role is None else role.share

    def codes(self, name: str) -> CodesPart | None:
        return self._codes.get(name)

    def _divided_codes(self, roles: Mapping[str, Role]) -> dict[str, CodesPart]:
        stored, place = stored_weights(self._model), self.group.place
        return {n: CodesPart(stored[n], role.share, place) for n, role in roles.items() if n in stored}
