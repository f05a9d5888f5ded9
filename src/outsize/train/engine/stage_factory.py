"""Makes the stages of a rank from the programs of a variant: on their devices, with the plan's recompute
policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from outsize.device.accelerators import device_count, is_accelerator
from outsize.errors import UnsupportedPlan
from outsize.ir.schedule import Kind, parse_row
from outsize.ir.units.recompute_segments import blocks, segments
from outsize.policies.activations import ActivationPolicy
from outsize.program.generate import Compiler, compile_slice
from outsize.program.sharding.tensor_parallel.overlap import overlapped
from outsize.run.device_graphs.graphed_stage import DeviceGraphs, GraphedStage, reason_against
from outsize.run.moves.base import Moves
from outsize.run.moves.host_stages import HostStage
from outsize.run.moves.sliced_stages import SlicedStage
from outsize.run.moves.streamed_blocks import BlocksOnHost
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.batchnorm import DeferredStatistics
from outsize.run.stage.cast_weights import CastWeights
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.kept_casts import KeptCasts
from outsize.run.stage.outer_graph import OuterGraph, uses_behind
from outsize.run.stage.recompute import Recompute, SegmentedRecompute, SegmentSetting
from outsize.run.stage.stage import StageExecutor, StageSetting
from outsize.run.stage.to_device import device_of_model, program_on_device
from outsize.schedules.families import family_of
from outsize.train.context.run_context import RunContext
from outsize.train.variants.variant import Variant

StageCasts = dict[tuple[int, torch.device | None, bool], CastWeights]
"""By stage, its device, and whether calls that autocast casts by itself are kept, too."""


@final
@dataclass(frozen=True, slots=True)
class StageFactory:
    """Makes stages of one run; `graphs` records them, where that is asked for, `casts` keeps their casts.

    `summed` are the stages of which a backward was looked at by the bits of its weights.
    """

    run: RunContext
    statistics: DeferredStatistics | None = None
    graphs: DeviceGraphs | None = None
    casts: StageCasts = field(default_factory=dict)
    summed: set[int] = field(default_factory=set[int])

    @property
    def _backend(self) -> str | None:
        return self.run.options.compiled

    def make(
        self,
        variant: Variant,
        program: StageProgram,
        model: nn.Module,
        device: torch.device | None,
        *,
        is_copy: bool = False,
        of_call: Moves | None = None,
    ) -> RunnableStage:
        """Returns the stage of `program` on `device`, with the weights of `model`.

        `is_copy`: the model is another than the one for which the program was made. `of_call`: the user's
        backward goes through the stage, which is then a part of the user's graph; these move its weights.
        """
        if device is not None and variant.home is not None:
            program = program_on_device(program, variant.cut.tape, model, variant.home, device)
        casts = (
            self._casts_of(variant, program, model, device) if of_call is None else _casts_of_call(program)
        )
        policy, recompute, overlaps = self.run.plan.activation_policy(program.stage), None, self._overlaps()
        again = policy.recomputes
        outer = None
        if of_call is not None:
            self._insist_on_calls(program)
            behind = uses_behind(variant.cut, program.stage)
            outer = OuterGraph(model, program, behind, of_call.gathered, checks=again)
        told = {} if outer is None else outer.through(program.spec.through)
        if is_copy or overlaps or casts is not None or told or self._backend is not None:
            spec = replace(program.spec, cast=casts, through={**program.spec.through, **told})
            if overlaps:
                joined = overlapped(spec.instructions, spec.exits, variant.cut.tape, model)
                spec = replace(spec, instructions=joined)
            function = compile_slice(spec, model, variant.tape.modes, self._compiler())
            program = replace(program, spec=spec, function=function)
        save_context = self.run.values.saving
        is_bare = save_context is not None
        if policy.recomputes_all:
            whole = Recompute(model, program.written, self.statistics)
            recompute = partial(whole.run, program.function)
        elif policy.in_blocks:
            runs, modes = self._segments(variant, program.stage), variant.tape.modes
            away = None
            # Compiled code runs without the modes that catch attention's kernels.
            if policy.streams_blocks and self._backend is None:
                at_device = device_of_model(model) if device is None else device
                away = partial(BlocksOnHost, self.run.activations.lane, at_device)
            second = SegmentSetting(
                model=model,
                ambient=modes,
                statistics=self.statistics,
                compiler=self._compiler(),
                away=away,
            )
            recompute = SegmentedRecompute(program.spec, runs, second)
        elif policy.offloads:
            save_context = partial(self.run.activations.begin, program.stage)
        at = device_of_model(model) if device is None else device
        seeded = at if is_accelerator(at) and device_count() > 1 else None
        exchanges = self.run.plan.axes.exchanges_values and self._backend is None and self.statistics is None
        # Where devices take stages in turns, outputs of all microbatches would wait for their backwards.
        drops_sent = policy.recomputes_all and self.run.plan.streams and outer is None
        setting = StageSetting(
            recompute, save_context, is_bare, seeded, outer, self.summed, exchanges, drops_sent
        )
        stage = self._at(at, StageExecutor(program, model, setting), policy, of_call)
        return stage if variant.slice is None else SlicedStage(stage, variant.slice, model)

    def _at(
        self, at: torch.device, stage: StageExecutor, policy: ActivationPolicy, of_call: Moves | None
    ) -> RunnableStage:
        """Returns the stage as it runs on its device: on the host beside it, or as a graph, where it can."""
        program = stage.program
        if program.stage in self.run.plan.host_stages:
            return HostStage(stage)
        if self.graphs is not None and of_call is None:
            reason = self._reason(policy) or reason_against(program, stage.model, at)
            if reason is None:
                return GraphedStage(stage, at, self.graphs)
            self.graphs.refuse(program.stage, reason)
        return stage

    def _insist_on_calls(self, program: StageProgram) -> None:
        """Raises UnsupportedPlan for a compiled stage of a split model that shares a weight with other ranks.

        Dynamo fails on what is received for it.
        """
        tied = [b.weight for b in (*program.received, *program.sent) if b.weight is not None]
        mesh = self.run.mesh
        if tied and self._backend is not None and mesh is not None and mesh.pipeline.size() > 1:
            raise UnsupportedPlan(
                "compiled stages of a split model share a weight within one process alone",
                numbers=f"stage {program.stage} shares {', '.join(sorted(tied))} with another stage",
                next_step="leave compiled out, or outsize.parallelize(..., loss_fn=loss_fn) and engine.step",
            )

    def _reason(self, policy: ActivationPolicy) -> str | None:
        """Returns what in the plan no graph can repeat; None where there is nothing."""
        axes = self.run.plan.axes
        reasons = {
            "the host keeps weights, values or activations": self.run.plan.streams
            or self.run.values.saving is not None
            or policy.uses_host,
            "its ranks exchange values within it": axes.exchanges_values,
            "weights are sharded over replicas": self.run.plan.shards,
            "sequences go through it in slices": self.run.plan.slices > 1,
            f'bn="{self.run.plan.bn}" collects statistics in Python': self.statistics is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _casts_of(
        self, variant: Variant, program: StageProgram, model: nn.Module, device: torch.device | None
    ) -> CastWeights | None:
        """Returns what keeps the stage's weights as autocast casts them; None where it casts by itself.

        The stages of all variants share it. Autocast's cache is one for all stages, so all of them keep it
        where one does. A compiled stage has casts that are not given to it in its graph.
        """
        keeps = self._backend is None and any(None in _dtypes(each) for each in variant.cut.programs)
        if not keeps and not any(_dtypes(program)):
            return None
        key = program.stage, device, keeps
        casts = self.casts.setdefault(key, CastWeights(KeptCasts() if keeps else None))
        unknown = {name for i in program.spec.instructions for name, dtype in i.casts if dtype is None}
        if casts.kept is not None:
            for name in sorted(unknown & program.weights):
                casts.kept.add((id(model), name), partial(_parameter, model, name))
        return casts

    def _overlaps(self) -> bool:
        """Returns whether collectives of the backward overlap with weight gradients.

        A schedule that splits the backward computes those later, and a compiled graph ends at collectives.
        """
        written = (action.kind for row in self.run.plan.actions for action in parse_row(row))
        splits = family_of(self.run.plan.schedule).splits_backward or Kind.I in written
        return self.run.plan.axes.product_parts > 1 and self._backend is None and not splits

    def _compiler(self) -> Compiler | None:
        if self._backend is None:
            return None
        # torch's compiler takes seconds to import, and most runs never use it.
        from outsize.run.stage.stage_compiler import StageCompiler

        # What was chosen by itself may fail; what was asked for may not.
        return StageCompiler(self._backend, forgiving=self.run.options.compilation is not None)

    def _segments(self, variant: Variant, stage: int) -> list[tuple[int, int]]:
        """Returns the runs of instructions that the stage recomputes."""
        names, starts = [u.name for u in variant.captured.graph.units], variant.captured.starts
        chosen = self.run.plan.recomputed(stage, names)
        return [(starts[a], starts[b]) for a, b in segments(blocks(names), chosen)]


def _casts_of_call(program: StageProgram) -> CastWeights | None:
    """Returns what casts the weights of a stage within the user's graph; None where autocast does.

    A weight that several stages read as one cast has one in the plain model, at which gradients are added up.
    """
    is_shared = any(boundary.cast is not None for boundary in (*program.received, *program.sent))
    return CastWeights() if is_shared else None


def _dtypes(program: StageProgram) -> set[torch.dtype | None]:
    return {dtype for instruction in program.spec.instructions for _, dtype in instruction.casts}


def _parameter(model: nn.Module, name: str) -> list[Tensor]:
    return [model.get_parameter(name)]
