"""Defines ExpertRanks: the ranks that each have some of the experts, and all other weights as replicas have.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other

Each rank computes its own part of the batch, and for its experts the rows of all of them. So the gradient of
an expert is added up over the ranks that have the same experts, that of all else over these ranks too
(ranks/mesh.py, `expert_holders` and `holders`). The first tape decides which modules are divided
(program/sharding/expert_parallel/experts.py).

With tp, experts are divided over the ranks of ep and of tp, and all else over those of tp alone: each rank of
tp sends its block of the tokens, which all of them have (as Megatron-Core with expert tensor parallelism 1).
So every weight is divided along one axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.axes.axis import Axis
from outsize.axes.expert import EXPERT
from outsize.axes.tensor import TENSOR
from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.program.sharding.expert_parallel.expert_tape import ExpertCollectives, expert_tape
from outsize.program.sharding.expert_parallel.experts import Experts, insist_on_experts
from outsize.program.sharding.share import Share
from outsize.program.tape import Tape
from outsize.run.collectives.expert_parallel import ExpertParallelGroup
from outsize.run.collectives.tensor_parallel import TensorParallelGroup
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.ranks.mesh import Mesh
from outsize.train.ranks.tensor_parallel import TensorRanks, tensor_ranks


@final
class ExpertRanks(DividedWeights):
    """The ranks of a mesh of one dim, each of which has some of the experts of every collection."""

    axis: ClassVar[Axis] = EXPERT

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        alike: TensorParallelGroup | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """Joins the ranks of `mesh`; `alike` are those of tp among them, which have the same tokens.

        `compiled`: stages are compiled, and their graphs end at collectives.
        """
        self._calls = ExpertParallelGroup(mesh, alike)
        super().__init__(model, self._calls.group)
        for name in ExpertCollectives.__abstractmethods__ if compiled else ():
            setattr(self._calls, name, torch.compiler.disable(getattr(self._calls, name)))
        self._shares: Mapping[str, Share] | None = None

    @property
    def first(self) -> bool:
        return True  # These ranks are replicas of what is not divided.

    @property
    def expert_calls(self) -> ExpertParallelGroup:
        return self._calls

    def local(self, tape: Tape) -> Tape:
        """Returns the rank's own tape.

        Raises BadOption where there are no experts, or fewer than ranks.
        """
        found = insist_on_experts(tape, self._model, self.group.place.ranks)
        if self._shares is None:
            self._shares = {name: each.share for each in found.values() for name in each.parameters}
        self._insist_on_first(found)
        return expert_tape(tape, found, dict(self._model.named_modules()), self._calls)

    def _insist_on_first(self, found: Mapping[int, Experts]) -> None:
        """Raises BadOption where another batch calls modules in a way in which they cannot be divided."""
        names = {name for each in found.values() for name in each.parameters}
        missing = sorted((self._shares or {}).keys() ^ names)
        if missing:
            raise BadOption(
                "experts that the first batch has divided are called in another way by this one",
                numbers=f"{len(missing)} weights: {', '.join(missing[:2])}",
                next_step="ep=1, or batches that call all experts as the first one does",
            )

    def share(self, name: str) -> Share | None:
        return (self._shares or {}).get(name)


@final
class TensorAndExpertRanks(DividedWeights):
    """The ranks of tp, which divide layers, and those of ep and tp, which divide experts."""

    axis: ClassVar[Axis] = TENSOR

    def __init__(self, model: nn.Module, layers: TensorRanks, experts: ExpertRanks) -> None:
        super().__init__(model, layers.group)
        self._layers, self._experts = layers, experts

    @property
    def first(self) -> bool:
        return self._layers.first

    @property
    def expert_calls(self) -> ExpertParallelGroup:
        return self._experts.expert_calls

    def group_of(self, name: str) -> TensorParallelGroup:
        return self._experts.group if self._experts.share(name) else self.group

    def axis_of(self, name: str) -> Axis:
        return (self._experts if self._experts.share(name) else self._layers).axis

    def local(self, tape: Tape) -> Tape:
        """Returns the rank's own tape, on which layers are divided but for experts, then these.

        Raises BadOption where the number of ranks does not divide a size, or there are too few experts.
        """
        found = insist_on_experts(tape, self._model, self._experts.group.place.ranks)
        names = (name for each in found.values() for name in each.parameters)
        whole = dict.fromkeys(names, "it is of experts, which ep divides")
        return self._experts.local(self._layers.local(tape, whole))

    def share(self, name: str) -> Share | None:
        return self._experts.share(name) or self._layers.share(name)

    def norms(self, norms: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        return self._experts.norms(self._layers.norms(norms, names), names)


def divided_ranks(
    model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool
) -> DividedWeights | None:
    """Returns the ranks that the plan asks for to divide weights; None for tp 1 and ep 1.

    Raises BadOption and WorldMismatch.
    """
    layers = tensor_ranks(model, plan, mesh, compiled=compiled)
    if plan.axes.ep == 1:
        return layers
    experts = _expert_ranks(model, plan, mesh, layers, compiled=compiled)
    return experts if layers is None else TensorAndExpertRanks(model, layers, experts)


def _expert_ranks(
    model: nn.Module, plan: Plan, mesh: Mesh | None, layers: TensorRanks | None, *, compiled: bool
) -> ExpertRanks:
    degree = plan.axes.ep
    if plan.form != "tape":
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, which calls all experts",
            numbers=f"ep={degree}",
            next_step="ep=1; `why` of the plan says which line is not captured",
        )
    if mesh is None or mesh.device_mesh is None:
        raise WorldMismatch(
            "expert parallelism is between processes, and this is one alone",
            numbers=f"the plan needs {plan.axes.world_size}, ep={degree}",
            next_step=f"outsize run --nproc-per-node {plan.axes.world_size} train.py",
        )
    alike = None if layers is None else layers.group
    return ExpertRanks(model, mesh.experts(), alike, compiled=compiled)
