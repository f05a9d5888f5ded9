"""Defines AxisRanks: the ranks along an axis of the mesh that divide weights while a stage computes.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other

Each axis of this kind has a file here. What several of them do to a model together is
`DividedWeights` (divided_weights.py), and no class knows two axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.axes.axis import Axis
from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.program.sharding.share import Share
from outsize.program.sharding.stored_weight import CodesPart
from outsize.program.tape import Tape
from outsize.run.collectives.expert_parallel import ExpertParallelGroup
from outsize.run.collectives.tensor_parallel import TensorParallelGroup
from outsize.train.ranks.mesh import Mesh


class AxisRanks(ABC):
    """The ranks of `group`, each of which has its parts of the weights that `axis` divides."""

    axis: ClassVar[Axis]
    group: TensorParallelGroup

    @abstractmethod
    def __init__(
        self, model: nn.Module, mesh: Mesh, plan: Plan, alike: TensorParallelGroup | None, *, compiled: bool
    ) -> None:
        """Joins the ranks of `mesh`; `alike` are those that divide products, which have the same tokens.

        `compiled`: stages are compiled, and their graphs end at collectives.
        """

    @property
    @abstractmethod
    def first(self) -> bool:
        """Tells whether this rank hands out what these ranks have whole, where it is the first holder."""

    @abstractmethod
    def claimed(self, tape: Tape) -> Mapping[str, str]:
        """Returns the weights that only this axis may divide, with the reason, which others are told."""

    @abstractmethod
    def local(self, tape: Tape, whole: Mapping[str, str]) -> Tape:
        """Returns the rank's own tape; the first one decides which weights are divided, without those of
        `whole`. Raises BadOption where they cannot be.
        """

    @abstractmethod
    def share(self, name: str) -> Share | None:
        """Returns how a weight is divided, by its first name; None where each of these ranks has it all."""

    def codes(self, name: str) -> CodesPart | None:
        """Returns what this rank has of a weight of codes; None for a weight that is divided as it is."""
        return None

    @property
    def expert_calls(self) -> ExpertParallelGroup | None:
        """Returns what runs calls of experts over ranks; None where these divide none."""
        return None


def ranks_along(axis: Axis, plan: Plan, mesh: Mesh | None) -> DeviceMesh:
    """Returns the ranks of a plan along an axis that computes within stages.

    Raises BadOption where the model runs by modules, WorldMismatch where this process is alone.
    """
    degree, world_size = plan.axes.of(axis), plan.axes.world_size
    if plan.form != "tape":
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, {axis.reads_whole}",
            numbers=f"{axis.name}={degree}",
            next_step=f"{axis.name}=1; `why` of the plan says which line is not captured",
        )
    if mesh is None or mesh.device_mesh is None:
        raise WorldMismatch(
            f"{axis.title} is between processes, and this is one alone",
            numbers=f"the plan needs {world_size}, {axis.name}={degree}",
            next_step=f"outsize run --nproc-per-node {world_size} train.py",
        )
    return mesh.along(axis)
