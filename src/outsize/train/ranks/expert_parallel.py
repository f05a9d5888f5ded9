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

from collections.abc import Mapping
from typing import ClassVar, final

from torch import nn

from outsize.axes.axis import Axis
from outsize.axes.expert import EXPERT
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.program.sharding.expert_parallel.expert_tape import expert_tape
from outsize.program.sharding.expert_parallel.experts import Experts, insist_on_experts
from outsize.program.sharding.share import Share
from outsize.program.tape import Tape
from outsize.run.collectives.expert_parallel import ExpertParallelGroup
from outsize.run.collectives.tensor_parallel import TensorParallelGroup
from outsize.train.ranks.axis_ranks import AxisRanks
from outsize.train.ranks.mesh import Mesh


@final
class ExpertRanks(AxisRanks):
    """The ranks of a mesh of one dim, each of which has some of the experts of every collection."""

    axis: ClassVar[Axis] = EXPERT

    def __init__(
        self, model: nn.Module, mesh: Mesh, plan: Plan, alike: TensorParallelGroup | None, *, compiled: bool
    ) -> None:
        self._model, self._calls = model, ExpertParallelGroup(mesh.experts(), alike, ends_graphs=compiled)
        self.group = self._calls.group
        self._shares: Mapping[str, Share] | None = None

    @property
    def first(self) -> bool:
        return True  # These ranks are replicas of what is not divided.

    @property
    def expert_calls(self) -> ExpertParallelGroup:
        return self._calls

    def claimed(self, tape: Tape) -> Mapping[str, str]:
        found = insist_on_experts(tape, self._model, self.group.place.ranks)
        names = (name for each in found.values() for name in each.parameters)
        return dict.fromkeys(names, "it is of experts, which ep divides")

    def local(self, tape: Tape, whole: Mapping[str, str]) -> Tape:
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
                next_step=f"{EXPERT.typed(1)}, or batches that call all experts as the first one does",
            )

    def share(self, name: str) -> Share | None:
        return (self._shares or {}).get(name)
