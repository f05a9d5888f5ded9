"""Defines RunContext: what is known of a run before its first step, built once and passed down whole.

    make_engine(model, plan, group, options) ── RunContext ──┬── Crew            who runs the schedule here
                                                             ├── Ownership       who owns which weight
                                                             ├── Pipelined ───── StageFactory
                                                             └── Engine          step, evaluate, update

Whoever needs a fact of the run asks it here. What happens in a run (weights that find owners, programs that
are recorded, the steps that were taken) has its own objects, which change by their own methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
import torch.distributed as dist
from torch import nn

from outsize.device.accelerators import CPU, current_device, is_accelerator
from outsize.ir.plan import Plan
from outsize.program.weights.of_loss import with_loss
from outsize.run.interpreter.in_process import InProcessRanks, SingleDevice
from outsize.run.moves.activations import ActivationOffload
from outsize.run.moves.base import Moves, PassedValues, Resident
from outsize.run.moves.boundary_values import BoundaryValues
from outsize.run.progress import Progress
from outsize.train.context.options import DEFAULTS, EngineOptions
from outsize.train.ranks.gradient_allreduce import OverlappedAllReduce
from outsize.train.ranks.mesh import Mesh
from outsize.train.ranks.replicas import ReplicaGroup, Replicas, SingleReplica


@final
@dataclass(frozen=True, slots=True)
class RunContext:
    """The model, its plan and options, and the place of this process in the run.

    `whole` is the model with its loss. `mesh` has all processes of the run; None: this is the only one, which
    has `local_replicas` pipelines whose ranks `together` places. `rank` of `world_size` is this process's in
    its pipeline, and runs `stages`. `device` is where its weights and batches belong; None: they stay on the
    device that they have. `moves` brings the weights of stages to where they compute, `values` is how
    stages of one rank pass on what others take, and `activations` go to the host until the backward.
    """

    model: nn.Module
    whole: nn.Module
    plan: Plan
    options: EngineOptions
    stages: tuple[int, ...]
    progress: Progress
    activations: ActivationOffload
    rank: int = 0
    world_size: int = 1  # ranks of the pipeline that are processes
    mesh: Mesh | None = None
    device: torch.device | None = None
    together: InProcessRanks = field(default_factory=SingleDevice)
    local_replicas: int = 1
    replicas: Replicas = field(default_factory=SingleReplica)
    moves: Moves = field(default_factory=Resident)
    values: PassedValues = field(default_factory=BoundaryValues)

    @classmethod
    def of_one_process(
        cls,
        model: nn.Module,
        plan: Plan,
        options: EngineOptions = DEFAULTS,
        together: InProcessRanks | None = None,
        local_replicas: int = 1,
    ) -> Self:
        """Returns the context of a process that has all ranks, each where `together` places it."""
        stages = tuple(range(len(plan.stages)))
        return cls(
            model,
            with_loss(model, options.loss_fn),
            plan,
            options,
            stages,
            _progress(plan, stages, (0,)),
            ActivationOffload.of(plan),
            together=together or SingleDevice(),
            local_replicas=local_replicas,
        )

    @classmethod
    def of_process(
        cls,
        model: nn.Module,
        plan: Plan,
        group: dist.ProcessGroup,
        options: EngineOptions = DEFAULTS,
        *,
        own_batches: bool = False,
    ) -> Self:
        """Returns the context of one process of `group`, which has all processes of the run; a collective.

        With `own_batches` each replica is given its own samples alone. Raises WorldMismatch.
        """
        device = device_of(plan)
        mesh = Mesh.of(plan.axes, group, device)
        rank, stages = mesh.pipeline.rank(), stages_on(plan, mesh.pipeline.rank())
        replicas: Replicas = SingleReplica()
        moves: Moves = Resident()
        if mesh.replicas is not None and mesh.holders is not None:
            replicas = ReplicaGroup(mesh.replicas, mesh.holders, mesh.expert_holders, own_batches=own_batches)
            moves = OverlappedAllReduce(replicas.gradients)
        return cls(
            model,
            with_loss(model, options.loss_fn),
            plan,
            options,
            stages,
            _progress(plan, stages, dist.get_process_group_ranks(mesh.pipeline.host)),
            ActivationOffload.of(plan),
            rank=rank,
            world_size=mesh.pipeline.size(),
            mesh=mesh,
            device=device,
            replicas=replicas,
            moves=moves,
        )

    @property
    def global_rank(self) -> int:
        """Returns the rank among all processes of the run."""
        return 0 if self.mesh is None else self.mesh.rank

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """Returns the group of all processes of the run, for messages of hosts; None in one process."""
        return None if self.mesh is None else self.mesh.group.host


def device_of(plan: Plan) -> torch.device:
    """Returns this process's device: the accelerator's current one when the plan is for accelerators, else
    the CPU.
    """
    return current_device() if is_accelerator(plan.stages[0].device) else torch.device(CPU)


def stages_on(plan: Plan, rank: int) -> tuple[int, ...]:
    """Returns the stages that a rank of the pipeline runs, in order."""
    return tuple(stage for stage, at in enumerate(plan.ranks) if at == rank)


def _progress(plan: Plan, stages: Sequence[int], ranks: Sequence[int]) -> Progress:
    """Returns what says what this rank does; `ranks` are the numbers in the run of its pipeline's ranks."""
    expected_s = plan.expected.step_s if plan.expected is not None else 0.0
    return Progress(ranks, expected_s, stages, _planned_s(plan, stages))


def _planned_s(plan: Plan, stages: Sequence[int]) -> float:
    """Returns the seconds in which a rank of these stages computes in a step, as planned; 0: nobody knows."""
    if plan.expected is None or len(plan.expected.stages) != len(plan.stages):
        return 0.0
    expected = (plan.expected.stages[stage] for stage in stages)
    return plan.microbatches * sum(one.forward_s + one.backward_s for one in expected)
