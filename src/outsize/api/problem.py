"""Builds the problem that the search solves: request, cluster, and the model's costs by microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torch import nn

from outsize.api.options import CaseOptions, FitOptions, request_of
from outsize.api.records import OF_A_SEARCH, Lora, Loss, Quantize, Recordings, Request
from outsize.axes.registry import PARTS
from outsize.capture.graph.build import Captured
from outsize.capture.graph.experts import with_experts
from outsize.capture.graph.row_parallel import longest_sequence, with_rows
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.kept.store import Folder, KeptModel
from outsize.capture.measure.local_cluster import find_cluster
from outsize.capture.measure.units import Progress
from outsize.capture.models.lora import with_adapters
from outsize.capture.models.quantized import insist_on_format, with_stored_layers
from outsize.errors import BadOption
from outsize.errors.arguments import shown
from outsize.ir.answers.request import NONE_SEARCHED, PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.ir.profile import Profile, ProfileSet
from outsize.ir.units.tensor_styles import TensorStyles
from outsize.planner.bounds.memory import exceeds_all_devices
from outsize.planner.costs.context_parallel import LEAST_TOKENS
from outsize.planner.costs.kernel_stacks import KernelStack, kernel_stack
from outsize.planner.costs.roofline import roofline
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.policies.slices import SLICES
from outsize.program.sharding.context_parallel.rows import by_rows
from outsize.program.sharding.context_parallel.slices import in_slices
from outsize.program.sharding.expert_parallel.experts import insist_on_experts
from outsize.program.sharding.scaled_linear import insist_on_scales_of_tensors
from outsize.program.sharding.stored_weight import insist_on_divided_codes, undivided_weights
from outsize.train.measure.training_case import TrainingCase, as_batch
from outsize.train.measure.units import how_on, measure_sizes

Model = tuple[ModelGraph, Profile]
# The microbatch counts that the search looks at when none is given, as multiples of the stages.
_MULTIPLES = (1, 2, 4, 8)


@final
@dataclass(frozen=True)
class Profiler:
    """Says what the units of a model cost: by the roofline, as timed on this machine, or by a profile."""

    measured: bool | ProfileSet = False
    progress: Progress | None = None

    @classmethod
    def of(cls, asked: Request) -> Profiler:
        """Returns the profiler that the request names."""
        return cls(asked.measured or False, asked.progress)

    def profile(self, case: TrainingCase, graph: ModelGraph, cluster: Cluster) -> Profile:
        """Returns the costs of the graph's units on the cluster's first device."""
        if isinstance(self.measured, ProfileSet):
            return self.measured.of_graph(graph, cluster.devices[0].kind, case.precision)
        if not self.measured or graph.form == "modules":
            return roofline(graph, cluster.devices[0])
        size = graph.batch_size
        sizes = measure_sizes(case, [size], how_on(cluster), self.progress, needed=size, cluster=cluster)
        return sizes.of_graph(graph, cluster.devices[0].kind, case.precision)

    def graphs(
        self,
        case: TrainingCase,
        stack: KernelStack,
        axes: Axes | None = None,
        always: bool = False,
        sizes: Sequence[int] = (),
    ) -> Callable[[int], ModelGraph]:
        """Returns the function that records the graph of a size, `styled`, with the works of a stack.

        `sizes` are those that will be asked for, as far as they are known. Where units are timed, each size
        is recorded whole for it anyhow.
        """

        def graph_of(captured: Captured) -> ModelGraph:
            return stack.of_graph(styled(case, captured, Axes() if axes is None else axes, always))

        if self.measured is True:
            return lambda samples: case.with_lasting(graph_of(case.captured(samples)))
        parts = (1, 1, 1) if axes is None else (axes.product_parts, axes.expert_parts, axes.token_parts)
        adds = always or case.slices != 1 or bool(axes is not None and axes.used_of(PARTS))
        recorded = functools.cache(lambda: case.sized_graphs(graph_of, sizes, adds=adds))
        question = "styled", stack.to_json(), *parts, always, case.slices

        def at(samples: int) -> ModelGraph:
            def found() -> ModelGraph:
                return case.with_lasting(recorded().at(samples))

            return case.answered(question, samples, ModelGraph, found)

        return at

    def counts(self, counts: Sequence[int], batch_size: int) -> Sequence[int]:
        """Returns those counts of microbatches whose costs can be had; a profile covers some sizes only."""
        if isinstance(self.measured, ProfileSet):
            return self.measured.counts(counts, batch_size)
        return counts

    def models(self, case: TrainingCase, request: PlanRequest, cluster: Cluster) -> dict[int, Model]:
        """Captures the model for each number of microbatches of the whole batch that is worth a look.

        What tensor and context parallelism divide is found out where a mesh of them may fit.
        """
        case, size, models = case.under(request.precision).on(cluster), request.batch_size, dict[int, Model]()
        counts = self.counts(_counts(request, cluster), size)
        needed = size // (request.total_microbatches or 1)
        opens_meshes = request.opens_axes(cluster) and not request.exact and bool(counts)
        whole = case.taken(-(-size // counts[0]), needed, case.recorded_whole) if opens_meshes else None
        if whole is not None:
            profile = roofline(whole, cluster.devices[0])
            optimizer = optimizer_bytes(request.optimizer)
            opens_meshes = not exceeds_all_devices(whole, profile, optimizer, cluster)
        sizes = [-(-size // count) for count in counts]
        stack = kernel_stack(request.kernels, cluster.devices[0].kind)
        graph_at = self.graphs(case, stack, request.mesh(1), opens_meshes, sizes)
        for count in counts:
            graph = case.taken(-(-size // count), needed, graph_at)
            if graph is not None:
                models[count] = graph, self.profile(case, graph, cluster)
        return models

    def add_smallest(
        self, models: dict[int, Model], case: TrainingCase, request: PlanRequest, cluster: Cluster
    ) -> dict[int, Model]:
        """Adds the smallest microbatches that the model takes, for a pipeline whose number of them is free.

        Returns what was added: nothing where that many were looked at already, or where times were given.
        """
        size = request.batch_size
        if request.microbatches or request.has_group_axes or isinstance(self.measured, ProfileSet):
            return {}
        counts = (d for d in range(size, max(models, default=0), -1) if size % d == 0)
        case = case.under(request.precision).on(cluster)
        graph_at = self.graphs(case, kernel_stack(request.kernels, cluster.devices[0].kind))
        for count in counts:
            if (graph := case.taken(size // count, size, graph_at)) is not None:
                added = {count: (graph, self.profile(case, graph, cluster))}
                models.update(added)
                return added
        return {}


@final
@dataclass(frozen=True, eq=False)
class SearchedPlan:
    """Is a plan with what it was searched in: the request, whose loss may be in pieces by now, and the model
    by microbatches of the whole batch.
    """

    plan: Plan
    request: PlanRequest
    models: dict[int, Model]

    @property
    def model(self) -> Model:
        """Returns the graph of the plan's microbatches, with its costs."""
        return self.models[self.plan.microbatches * self.plan.axes.replicas]


def case_of(model: nn.Module, args: Any, kwargs: Any, options: CaseOptions) -> TrainingCase:
    """Returns the model with its example batch and its loss. Raises BadOption."""
    batch = as_batch(args, kwargs, options.get("target"))
    return TrainingCase.of(
        model, batch, Loss.of(options.get("loss_fn"), "loss_fn").function, options.get("batch_dims")
    )


def asked_in(options: FitOptions, function: str = "plan") -> Request:
    """Returns the request with the keywords that are fields of it.

    Raises BadOption for what is no request, for a field that is given twice, and for times in an answer
    that estimates.
    """
    request: Any = options.get("request")
    if not isinstance(request, Request | None):
        raise BadOption(
            f"request is a {type(request).__name__}, no outsize.Request",
            numbers=shown(request),
            next_step="request=outsize.Request(stages=2, precision='bf16')",
        )
    asked = (request or Request()).joined(dict(options))
    if function == "fit":
        asked.insist_on_none(
            "fit", ("measured", "progress"), "leave it out: what a device holds is not timed"
        )
        asked.insist_on_none("fit", OF_A_SEARCH, "leave it out: outsize.plan follows it")
    return asked


def asked_cluster(asked: Request) -> Cluster:
    """Returns the cluster of a request; this machine where it names none. Raises BadOption."""
    return cluster_of("local" if asked.cluster is None else asked.cluster)


def adapted(model: nn.Module, asked: Request) -> nn.Module:
    """Returns the model with its weights in the format, and with the adapters, that the request asks for.

    Raises BadOption, and ModelNotImportable without peft.
    """
    lora, quantize = Lora.of(asked.lora, "lora"), Quantize.of(asked.quantize, "quantize")
    quantize.insist_on_format()
    if quantize.format is not None:
        stored = insist_on_format(quantize.format).of_blocks(quantize.block, nests=quantize.nested)
        model = with_stored_layers(model, stored, quantize.skip or (), experts=quantize.experts or False)
    return with_lora(model, lora)


def with_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Returns the model with the adapters of a record, or itself. Raises as `with_adapters`."""
    return model if lora.rank is None else with_adapters(model, lora.rank, lora.targets)


def adapted_case(
    model: nn.Module, args: Any, kwargs: Any, options: CaseOptions, asked: Request
) -> TrainingCase:
    """Returns the case of the model with the formats of weights and the adapters that the request asks for.

    Raises BadOption, and ModelNotImportable without peft.
    """
    model = adapted(model, asked)
    if asked.inference:
        case = TrainingCase.for_inference(model, args, kwargs, options.get("batch_dims"))
    elif asked.loop:
        case = TrainingCase.for_loop(model, args, kwargs, options.get("batch_dims"))
    else:
        case = case_of(model, args, kwargs, options)
    return _keeping(case, Recordings.of(asked.recordings, "recordings"))


def _keeping(case: TrainingCase, recordings: Recordings) -> TrainingCase:
    """Returns the case with the folder in which answers about its recordings are kept, if there is one."""
    if recordings.folder is None:
        return case
    folder = Folder(Path(recordings.folder), recordings.most_bytes)
    return replace(case, kept=KeptModel(folder, (case.module, case.loss_fn, recordings.depends_on)))


def asked_of(case: TrainingCase, asked: Request) -> PlanRequest:
    """Returns the request for a case; a model that generates has its batch in one piece, on a pipeline.
    Raises BadOption.
    """
    request = request_of(asked.layout, case.batch.size)
    if not case.generates:
        return request
    if request.has_group_axes or (request.microbatches or 1) > 1:
        raise BadOption(
            "generate runs the whole batch through the stages of one pipeline, with whole weights",
            numbers=f"{request.mesh(1).beyond_pp or 'no other axis'}, microbatches={request.microbatches}",
            next_step="leave out microbatches and all axes but stages (--stages)",
        )
    return request.model_copy(update={"microbatches": 1, "axes": NONE_SEARCHED})


def styled(case: TrainingCase, captured: Captured, axes: Axes, always: bool = False) -> ModelGraph:
    """Returns the graph, with what tensor parallelism divides where tp > 1, or `always`.

    Raises BadOption where so many ranks cannot divide the model, its sequences (cp), or its experts (ep).
    """
    tp, experts, tokens = axes.product_parts, axes.expert_parts, axes.token_parts
    if captured.graph.form == "modules":
        _insist_on_whole_modules(captured.graph, axes, case.slices or 1)
        return captured.graph
    slices = case.slices or 1
    if slices > 1:
        in_slices(captured.tape, case.whole, slices)
        captured = replace(captured, graph=with_rows(captured, case.whole, 2))
    if experts > 1:
        insist_on_experts(captured.tape, case.whole, experts * tp)
    searched = always or case.slices is None
    if tokens > 1 or (searched and longest_sequence(captured.tape) >= 2 * LEAST_TOKENS):
        graph = with_rows(captured, case.whole, max(2, tokens))
        captured = replace(captured, graph=graph)
        if tokens > 1 and graph.rows is not None and graph.rows.refused:
            by_rows(captured.tape, case.whole, tokens)
    if tp == 1 and not always:
        return with_experts(captured, case.whole, captured.graph) if experts > 1 else captured.graph
    if tp > 1:
        insist_on_scales_of_tensors(case.whole)
        insist_on_divided_codes(case.whole, tp)
    if undivided_weights(case.whole):  # Nobody divides these codes, so a search finds no degree.
        none = TensorStyles(modules=(), divided=())
        with_tensor = captured.graph.model_copy(update={"tensor": none})
    else:
        with_tensor = with_styles(captured, case.whole)
    graph = with_experts(captured, case.whole, with_tensor)
    if graph.tensor is not None:
        graph.tensor.insist_on_degree(tp)
    return graph


def _insist_on_whole_modules(graph: ModelGraph, axes: Axes, slices: int) -> None:
    """Raises BadOption for axes that give a device a part of a module, and for slices of sequences, where the
    model runs by modules.
    """
    divided = axes.used_of(PARTS) | ({SLICES.name: slices} if slices > 1 else {})
    if divided:
        raise BadOption(
            f"{graph.model} runs by modules, in its own Python, which has the sizes of one device in it",
            numbers=", ".join(f"{axis}={degree}" for axis, degree in divided.items()),
            next_step="stages or replicas (`--stages`, `--axes dp_replicate=2`); `why` of such a plan says "
            "which line is not captured",
        )


def cluster_of(cluster: str | Cluster) -> Cluster:
    """Returns the cluster of a name, or the cluster itself. Raises BadOption for anything else."""
    if not isinstance(cluster, str | Cluster):
        raise BadOption(
            f"cluster={cluster!r} is a {type(cluster).__name__}, not the name of a cluster",
            numbers="a name gives how many devices there are and of which kind",
            next_step="cluster='2xcpu', '8xH100', 'local' or the path of a cluster file",
        )
    return find_cluster(cluster) if isinstance(cluster, str) else cluster


def _counts(request: PlanRequest, cluster: Cluster) -> list[int]:
    """Returns the microbatch counts of the whole batch that are worth a capture."""
    size, axes = request.batch_size, request.mesh(1)
    if request.opens_axes(cluster) and not request.exact:
        return all_counts(size, len(cluster.devices), request.microbatches)
    stages = request.stages or max(1, len(cluster.devices) // axes.group_size)
    counts = counts_of(size // axes.replicas, stages, request.microbatches)
    return [count * axes.replicas for count in counts]


def all_counts(batch_size: int, devices: int, microbatches: int | None) -> list[int]:
    """Returns the counts worth a capture where replicas share the batch."""
    if microbatches is None:
        return counts_of(batch_size, devices, None)
    shared = (microbatches * d for d in range(1, devices + 1) if devices % d == 0)
    return [count for count in shared if count <= batch_size]


def counts_of(batch_size: int, stages: int, microbatches: int | None) -> list[int]:
    """Returns the count that is given, or the divisors of the batch nearest to multiples of the stages, and
    powers of two below these: a microbatch whose ops are shorter than their launches had better be larger.
    """
    if microbatches is not None:
        return [microbatches] if 0 < microbatches <= batch_size else []
    wanted = [stages * factor for factor in _MULTIPLES]
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    near = {min(divisors, key=lambda d, w=w: abs(d - w)) for w in wanted}
    fewer = (2**k for k in range(1, stages.bit_length()) if batch_size % 2**k == 0)
    return sorted({1, *near, *fewer})
