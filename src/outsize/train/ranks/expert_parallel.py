"""Defines ExpertRanks: the ranks that each have some of the experts, and all other weights as replicas have.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other

Each rank computes its own part of the batch, and for its experts the rows of all of them. So the gradient of
an expert is added up over the ranks that have the same experts, that of all else over these ranks too
(ranks/mesh.py, `expert_holders` and `holders`). The first tape decides which modules are divided
(program/expert_parallel/experts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.program.expert_parallel.expert_tape import ExpertCollectives, expert_tape
from outsize.program.expert_parallel.experts import Experts, insist_on_experts
from outsize.program.tape import Tape
from outsize.program.tensor_parallel.share import Share
from outsize.run.expert_parallel.collectives import ExpertParallelGroup, RowCounts
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.ranks.mesh import Mesh


@final
class ExpertRanks(DividedWeights):
    """The ranks of a mesh of one dim, each of which has some of the experts of every collection."""

    axis: ClassVar[Literal["tp", "ep"]] = "ep"

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, compiled: bool = False) -> None:
        """Joins the ranks of `mesh`. `compiled`: stages are compiled, and their graphs end at collectives."""
        self._calls = ExpertParallelGroup(mesh)
        super().__init__(model, self._calls.group)
        for name in ExpertCollectives.__abstractmethods__ if compiled else ():
            setattr(self._calls, name, torch.compiler.disable(getattr(self._calls, name)))
        self._shares: Mapping[str, Share] | None = None

    @property
    def first(self) -> bool:
        return True  # These ranks are replicas of what is not divided.

    @property
    def counts(self) -> Mapping[str, RowCounts]:
        """Returns the rows that this rank has computed, by module."""
        return self._calls.counts

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


def expert_ranks(model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool) -> ExpertRanks | None:
    """Returns the ranks that the plan asks for; None for ep 1.

    Raises BadOption and WorldMismatch.
    """
    degree = plan.axes.ep
    if degree == 1:
        return None
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
    return ExpertRanks(model, mesh.device_mesh["ep"], compiled=compiled)
