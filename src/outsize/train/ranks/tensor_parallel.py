"""Defines TensorRanks: the ranks that share a model's layers, and this process's parts of its weights.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other

The first tape decides which weights are divided (program/sharding/tensor_parallel/styles.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.axes.axis import Axis
from outsize.axes.registry import DIVIDING, LISTED
from outsize.axes.tensor import TENSOR
from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.explain_styles import explain
from outsize.program.sharding.tensor_parallel.local_tape import Collectives, local_tape
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import Role, derive
from outsize.program.tape import Tape
from outsize.run.collectives.tensor_parallel import TensorParallelGroup
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.ranks.mesh import Mesh


@final
class TensorRanks(DividedWeights):
    """The ranks of a mesh of one dim, which share every stage of a pipeline."""

    axis: ClassVar[Axis] = TENSOR

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, compiled: bool = False
    ) -> None:
        """Joins the ranks of `mesh`.

        `sequence`: activations between divided layers are divided along the sequence. `compiled`: stages are
        compiled, and their graphs end at collectives.
        """
        super().__init__(model, TensorParallelGroup(mesh))
        self._sequence = sequence
        for name in Collectives.__abstractmethods__ if compiled else ():
            setattr(self.group, name, torch.compiler.disable(getattr(self.group, name)))
        self._roles: Mapping[str, Role] | None = None

    @property
    def first(self) -> bool:
        return self.group.place.rank == 0

    def local(self, tape: Tape, whole: Mapping[str, str] = MappingProxyType({})) -> Tape:
        """Returns the rank's own tape; `whole` are weights that tp leaves whole, with the reasons.

        Raises BadOption where the number of ranks does not divide a size.
        """
        derived = derive(tape, self._model, self._roles, whole)
        if self._roles is None:
            styles = explain(tape, self._model, derived)
            styles.insist_on_degree(self.group.place.ranks)
            self._roles = derived.roles
        derived = in_sequence(tape, derived, self._model) if self._sequence else derived
        return local_tape(tape, derived, dict(self._model.named_modules()), self.group)

    def share(self, name: str) -> Share | None:
        """Returns how a weight is divided, by its first name; None where every rank has all of it."""
        role = (self._roles or {}).get(name)
        return None if role is None else role.share


def insist_on_bits(plan: Plan) -> None:
    """Raises BadOption for a plan that one process cannot run as it is, to compare bits."""
    if plan.axes.divides_weights:
        sizes = ", ".join(f"{axis.name}={plan.axes.of(axis)}" for axis in LISTED if axis in DIVIDING)
        raise BadOption(
            "a check compares bits, and ranks that divide layers or experts add up in another order",
            numbers=f"{sizes}; float32 agrees to about 1e-6, float64 to 1e-15",
            next_step="outsize check MODEL --plan FILE --processes, which compares within that",
        )


def insist_on_whole(ranks: DividedWeights | None, what: str) -> None:
    """Raises BadOption where the model's own Python, which `what` runs, would meet parts of weights."""
    if ranks is not None:
        raise BadOption(
            f"{what} runs the model's own Python, which wants whole weights, and ranks have parts of them",
            numbers=f"{ranks.axis.name}={ranks.group.place.ranks}",
            next_step=f"engine.full_state_dict(to=FOLDER), and run from them with {ranks.axis.name}=1",
        )


def tensor_ranks(model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool) -> TensorRanks | None:
    """Returns the ranks that the plan asks for; None for tp 1.

    Raises BadOption and WorldMismatch.
    """
    degree = plan.axes.tp
    if degree == 1:
        return None
    if plan.form != "tape":
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, which has the sizes of one device in it",
            numbers=f"tp={degree}",
            next_step="tp=1; `why` of the plan says which line is not captured",
        )
    if mesh is None or mesh.device_mesh is None:
        raise WorldMismatch(
            "tensor parallelism is between processes, and this is one alone",
            numbers=f"the plan needs {plan.axes.world_size}, tp={degree}",
            next_step=f"outsize run --nproc-per-node {plan.axes.world_size} train.py",
        )
    return TensorRanks(model, mesh.along(TENSOR), sequence=plan.sequence_parallel, compiled=compiled)
