"""Writes the sentence of every finding: one function for each code, from its figures.

Tables, pages and the command line call `sentence`, and for advice `next_step`. No other file of the package
words what the planner says, and nothing reads a sentence back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, Final

from outsize.axes.registry import GROUP, STAGES, axes_typed
from outsize.axes.replicate import REPLICATE
from outsize.axes.shard import SHARD
from outsize.ir.answers.advice import (
    Advice,
    BranchOrder,
    DoubledMicrobatches,
    FatBoundary,
    HeavyUnit,
    IdleDevices,
    Lever,
    MemoryLeft,
    OptimizerStates,
    OtherKernels,
    ReplicasFaster,
    SecondForward,
    SlowLinks,
    SmallStage,
    UnevenStages,
    UnusedDevices,
)
from outsize.ir.answers.fit import (
    BatchReduced,
    CountedBytes,
    DevicesAdded,
    LeastFullCut,
    MicrobatchesAdded,
    OneAtATime,
    OptimizerChanged,
    PlanSearched,
    PrecisionChanged,
    RecomputeAdded,
    ScheduleChanged,
)
from outsize.ir.answers.utilisation import Idle
from outsize.ir.answers.verdict import LossCounts
from outsize.ir.findings import (
    ActivationsOffloaded,
    AllRecomputed,
    BubbleBound,
    CaptureNote,
    CheapestDevices,
    CollectiveBound,
    ComposedSchedule,
    ComputeBound,
    ContextParallel,
    CutsBetweenBlocks,
    DeviceKindUse,
    DeviceOrder,
    DevicesInTurns,
    DoesNotFit,
    Finding,
    FirstReplicaStatistics,
    Foresight,
    FullestDevice,
    HiddenExchanges,
    HostBound,
    HostMemoryEnough,
    HostMemoryShort,
    HostRoofline,
    HostStages,
    HostStates,
    LinkBound,
    Measured,
    MemoryBound,
    MemoryShortage,
    ModelTensorPlan,
    NarrowSum,
    NoContextParallel,
    NoPipelineFits,
    NotChosen,
    PeakMargin,
    PiecesOfLoss,
    Refusal,
    SequenceParallel,
    SingleUnit,
    SlowestStage,
    StagesRecomputed,
    StageValuesOnHost,
    StepMemory,
    SumOrder,
    TensorParallel,
    TimeLimitEnded,
    TuningEnd,
    UnitsRecomputed,
    UntrainedStages,
    WeightsOnHost,
    WholeBatchStatistics,
    WholeTensorUpdate,
)
from outsize.ir.formatting import (
    axes_text,
    bytes_text,
    microbatches_text,
    needs_text,
    percent_text,
    price_text,
    rate_text,
    seconds_text,
    stages_text,
)
from outsize.policies.weights import Weights, weight_policy

if TYPE_CHECKING:
    from outsize.planner.search.incumbents import Incumbent  # `--help` loads this file, and no planner

UNITS_NAMED: Final = 3
HINTS_SHOWN: Final = 2
# More stages of one kind of device are counted, not named.
STAGES_NAMED: Final = 8


_DIVIDED_BY: Final = {
    "targets": "counted targets",
    "class weights": "(class weights of targets)",
    "samples": "samples",
    "values": "(a count or sum that the loss takes of the batch)",
}


@singledispatch
def sentence(finding: Finding) -> str:
    """Returns the finding as one plain sentence, without a capital letter and a full stop, as in a list."""
    raise NotImplementedError(f"{type(finding).__name__} has no wording")


@singledispatch
def next_step(advice: Finding) -> str:
    """Returns what to type or to change, for advice and levers."""
    raise NotImplementedError(f"{type(advice).__name__} is no advice")


def sentences(findings: Iterable[Finding]) -> list[str]:
    """Returns the sentence of each finding."""
    return [sentence(finding) for finding in findings]


def advised(advice: Advice | Lever) -> str:
    """Returns the sentence and the next step."""
    return f"{sentence(advice)}. Next: {next_step(advice)}"


def document(advice: Advice | Lever) -> dict[str, object]:
    """Returns what --json gives: the code and its figures, and the words for people."""
    return {**advice.model_dump(mode="json"), "sentence": sentence(advice), "next_step": next_step(advice)}


def refusal_text(refusal: Refusal) -> str:
    """Returns what an error said, with its numbers."""
    return "; ".join(filter(None, (refusal.what, refusal.numbers)))


def counts_text(counts: LossCounts) -> str:
    """Returns what the microbatches count, and what a loop of means would get."""
    by = [f"{', '.join(f'{n:.4g}' for n in t.counts)} {_DIVIDED_BY[t.divided_by]}" for t in counts.terms]
    weighs = "each microbatch weighs by its own" if len(by) == 1 else "each term weighs by its own"
    first = f"the loss divides by {' and by '.join(by)} in its microbatches, and {weighs}"
    plain = counts.plain
    if plain is None:
        return first
    loop = f"{first}. A loop over loss / {plain.steps}, a mean of means, would get"
    if plain.loss is None or plain.gradients is None:
        return f"{loop} NaN, since a microbatch has nothing that counts"
    off = abs(plain.loss - plain.batch_loss) / max(abs(plain.batch_loss), 1e-300)
    return (
        f"{loop} {plain.loss:.5g} for {plain.batch_loss:.5g} ({off:.2%} off), and gradients off by "
        f"{plain.gradients:.2g} of their largest element"
    )


def options_text(options: Mapping[str, int | str]) -> str:
    """Returns `--axes dp_shard=2 --microbatches 8`."""
    axes = {axis.name for axis in GROUP}
    mesh = axes_typed({name: value for name, value in options.items() if name in axes})
    flags = (f"--{name.replace('_', '-')} {value}" for name, value in options.items() if name not in axes)
    return " ".join(filter(None, (mesh, *flags)))


# Steps that differ by less are called as fast.
PERCENT: Final = 0.01


# -- how work and memory are shared out ------------------------------------------------------------------


@sentence.register
def _slowest_stage(f: SlowestStage) -> str:
    units = ", ".join(f.units[:UNITS_NAMED]) + (", ..." if len(f.units) > UNITS_NAMED else "")
    return (
        f"stage {f.stage} ({units}) sets the pace: its forward and backward take {seconds_text(f.compute_s)} "
        f"per microbatch, {percent_text(f.share)} of the work; an even share is {percent_text(f.even_share)}"
    )


@sentence.register
def _fullest_device(f: FullestDevice) -> str:
    others = f" (and {f.same_devices} like it)" if f.same_devices else ""
    return (
        f"{f.device}{others} is the fullest device: {bytes_text(f.used_bytes)} of "
        f"{bytes_text(f.memory_bytes)} with {microbatches_text(f.microbatches_in_flight)} in flight; its "
        f"largest units are {_sizes(f.largest)}"
    )


def _sizes(largest: Iterable[tuple[str, int]]) -> str:
    """Returns `wte 1.2 GiB, h.0.mlp 300.0 MiB`."""
    return ", ".join(f"{name} {bytes_text(size_bytes)}" for name, size_bytes in largest)


@sentence.register
def _cuts_between_blocks(f: CutsBetweenBlocks) -> str:
    longer = f"{(f.step_s / f.fastest_step_s - 1) * 100:.1f} %"
    return f"stages are cut between blocks; cuts inside of them would save {longer} of a step"


@sentence.register
def _time_limit_ended(f: TimeLimitEnded) -> str:
    ended = f"the search ended at its time limit of {seconds_text(f.limit_s)}, with its best plan so far"
    return ended if f.gap is None else f"{ended}, {f.gap * 100:.1f} % above the least bound"


def incumbent_text(found: Incumbent) -> str:
    """Returns the line of the best plan so far: `12.4 s  pp 4 x tp 4: 4.56 s a step, ...`."""
    line = f"{found.after_s:.1f} s  {axes_text(found.axes.used)}: {seconds_text(found.step_s)} a step"
    return line if found.gap is None else f"{line}, {found.gap * 100:.1f} % above the least bound"


@sentence.register
def _cheapest_devices(f: CheapestDevices) -> str:
    rented = (
        f"all {f.devices} devices" if f.devices == f.of_devices else f"{f.devices} of {f.of_devices} devices"
    )
    text = f"least money per sample: {price_text(f.price_per_million)} for a million samples on {rented}"
    if f.devices == f.fastest_devices:
        return text
    many = "device takes" if f.fastest_devices == 1 else "devices take"
    dear = price_text(f.fastest_price_per_million)
    return f"{text}; {f.fastest_devices} {many} {seconds_text(f.fastest_step_s)} a step, for {dear}"


@sentence.register
def _untrained_stages(f: UntrainedStages) -> str:
    few = f", fewer than the {f.stages_in_all} stages" if f.trained_units < f.stages_in_all else ""
    return (
        f"nothing is trained in {stages_text(f.stages)}: {f.trained_units} of the model's {f.units} units "
        f"have trainable weights{few}"
    )


@sentence.register
def _device_kind_use(f: DeviceKindUse) -> str:
    if not f.stages:
        return f"{f.kind}: all {f.devices} devices stay idle, since no order that uses them is faster"
    stages = stages_text(f.stages) if len(f.stages) <= STAGES_NAMED else f"{len(f.stages)} stages"
    idle = f"; {f.devices - f.busy_devices} idle" if f.devices > f.busy_devices else ""
    percent = percent_text(f.flops_share)
    return f"{f.kind}: {stages} on {f.busy_devices} of {f.devices} devices, {percent} of the FLOPs{idle}"


@sentence.register
def _memory_shortage(f: MemoryShortage) -> str:
    if f.stage is None:
        return needs_text(f.device, f.needs_bytes, "it", f.room_bytes)
    return needs_text(f"stage {f.stage}", f.needs_bytes, f.device, f.room_bytes)


@sentence.register
def _device_order(f: DeviceOrder) -> str:
    order = ", ".join(f.devices)
    return f"the devices differ and this order of them is the fastest: start the ranks as {order}"


@sentence.register
def _capture_note(f: CaptureNote) -> str:
    return f.note


# -- recomputation and activations -----------------------------------------------------------------------


@sentence.register
def _all_recomputed(f: AllRecomputed) -> str:
    who = "blocks" if f.blocks else "stages"
    return f"all activations are recomputed: {who} save only their inputs, and compute each forward twice"


@sentence.register
def _stages_recomputed(f: StagesRecomputed) -> str:
    verb = "recomputes its" if len(f.stages) == 1 else "recompute their"
    return (
        f"{stages_text(f.stages)} {verb} activations, since memory is short: each forward is computed twice"
    )


@sentence.register
def _units_recomputed(f: UnitsRecomputed) -> str:
    one = len(f.stages) == 1
    count = f"{f.recomputed_units} of {f.units} units"
    if not one or f.recomputed_units == f.units:
        count += ", block by block,"
    whose = "its forward's" if one else "their forwards'"
    return (
        f"{stages_text(f.stages)} recompute{'s' * one} {count} to save memory: {seconds_text(f.again_s)} of "
        f"{whose} {seconds_text(f.forward_s)} per microbatch are computed twice"
    )


@sentence.register
def _activations_offloaded(f: ActivationsOffloaded) -> str:
    return (
        f"activations go to the host: {stages_text(f.stages)}; on stage {f.stage} "
        f"{bytes_text(f.moved_bytes)} leave in the forward of a microbatch and come back in its backward, "
        f"over {f.link}"
    )


# -- other axes ------------------------------------------------------------------------------------------


@sentence.register
def _step_memory(f: StepMemory) -> str:
    return (
        "in a loop of your own backwards follow all forwards, and devices have the outputs of the whole "
        f"batch: the fullest holds {bytes_text(f.loop_bytes)}. Where the loss adds up over samples, "
        f"engine.step ({f.schedule}) holds {bytes_text(f.step_bytes)} with the same stages"
    )


@sentence.register
def _sum_order(f: SumOrder) -> str:
    sizes = {"replicas": f.replicas, "ranks (tp)": f.tp, "ranks (cp)": f.cp}
    who = " and ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    return f"{who} add up in another order than one device: results agree within rounding, not bit by bit"


@sentence.register
def _narrow_sum(f: NarrowSum) -> str:
    errors = ", ".join(f"{error * 100:.2f} % of {terms:,} terms" for terms, error in f.errors)
    return (
        f"products are added up in {f.dtype}, as was asked for: errors of a product are {errors} (root mean "
        f"square, random signs), and sums beyond {f.largest:,.0f} are infinite"
    )


@sentence.register
def _first_replica_statistics(f: FirstReplicaStatistics) -> str:
    return (
        f"BatchNorm ({f.layers} layer{'s' * (f.layers > 1)}) keeps the running statistics of the first "
        f"replica's microbatches, 1 / {f.replicas} of the batch; --bn deferred uses those of all replicas"
    )


@sentence.register
def _whole_batch_statistics(f: WholeBatchStatistics) -> str:
    return "BatchNorm normalises over the whole batch, which is one microbatch, so the stages do not overlap"


@sentence.register
def _sequence_parallel(f: SequenceParallel) -> str:
    return (
        f"sequence parallel: a rank saves {bytes_text(f.saved_bytes)} of a microbatch for its backward "
        f"instead of {bytes_text(f.undivided_saved_bytes)}"
    )


@sentence.register
def _loss_in_pieces(f: PiecesOfLoss) -> str:
    return (
        f"the loss is computed in {f.pieces} pieces of rows: logits and what is made of them take "
        f"{bytes_text(f.piece_bytes)} at a time instead of {bytes_text(f.whole_bytes)}, and are computed "
        "once more in the backward; sums over pieces round otherwise than one sum"
    ) + (
        f"; modules that are wide inside, such as MLPs, are computed in {f.module_pieces} pieces of rows"
        if f.module_pieces > 1
        else ""
    )


@sentence.register
def _tensor_parallel(f: TensorParallel) -> str:
    gathers = f" and gather {bytes_text(f.gathered_bytes)}" if f.gathered_bytes else ""
    return (
        f"tp {f.tp}: {f.divided_modules} of {f.modules} modules with weights are divided, and a rank has "
        f"{percent_text(f.weights_share)} of the weights; for a microbatch the ranks add up "
        f"{bytes_text(f.reduced_bytes)}{gathers}"
    )


@sentence.register
def _model_tensor_plan(f: ModelTensorPlan) -> str:
    hints = "; ".join(f.hints[:HINTS_SHOWN])
    return f"the model's own tensor-parallel plan is compared and not followed: {hints}"


@sentence.register
def _context_parallel(f: ContextParallel) -> str:
    return (
        f"each of {f.cp} devices (cp) has 1 / {f.cp} of the tokens of every sequence; keys and values of all "
        "tokens are gathered for attention, some heads at a time where they are much"
    )


@sentence.register
def _no_context_parallel(f: NoContextParallel) -> str:
    return f"cp: {f.refused}"


# -- weights, states and values on the host --------------------------------------------------------------


@sentence.register
def _whole_tensor_update(f: WholeTensorUpdate) -> str:
    done = []
    if f.flops:
        done.append(f"{f.flops / 1e12:.3g} TFLOP of matrix products")
    if f.exchanged_bytes:
        done.append(
            f"{bytes_text(f.exchanged_bytes)} of gradients and weights to the owners of tensors and back"
        )
    return (
        f"{f.optimizer} needs whole tensors: its step takes {seconds_text(f.update_s)}, "
        f"with {' and '.join(done)} on a device"
    )


@sentence.register
def _hidden_exchanges(f: HiddenExchanges) -> str:
    return (
        f"forwards run inside of other microbatches' backwards ({f.schedule}): a device exchanges values for "
        f"{seconds_text(f.exchanged_s)} of a step, of which {seconds_text(f.hidden_s)} hide"
    )


@sentence.register
def _weights_on_host(f: WeightsOnHost) -> str:
    room = "" if f.host_memory_known else ", and the cluster does not say whether it has as much"
    moved = f"{bytes_text(f.moved_bytes)} of weights"
    if f.cast_bytes:
        moved += f", {bytes_text(f.cast_bytes)} of them as the host casts them once a step,"
    moves = f"{moved} come for the forwards and again for the backwards"
    policy = weight_policy(f.weights)
    if policy.stays_loaded:
        moves = f"{moved} come once a step and stay on the device"
    if policy.values_on_host:
        moves += ", and values between stages come and go with each microbatch"
    speed = f"{f.host_bytes_per_s / 1e9:.0f} GB/s of the host's memory are"
    return (
        f"weights, gradients and states live on the host: {bytes_text(f.host_bytes)} at most{room}. {moves}, "
        f"over {f.link}; {speed} {'assumed for' if f.is_assumed else 'the share of'} each device"
    )


@sentence.register
def _host_states(f: HostStates) -> str:
    holds = f"the host holds {bytes_text(f.host_bytes)}, {f.bytes_per_parameter:.1f} bytes a parameter"
    if not f.in_parts:
        return f"{holds}: all gradients stay there, since {f.optimizer} steps once, at the end"
    exceptions = "clip_norm, a GradScaler, update=False"
    return (
        f"{holds}, if the optimizer steps as gradients arrive; more if gradients have to stay ({exceptions})"
    )


@sentence.register
def _host_stages(f: HostStages) -> str:
    room = f" of {bytes_text(f.host_memory_bytes)}" if f.host_memory_bytes is not None else ""
    speed = f"{f.flops_per_s / 1e12:.1f} TFLOP/s and {f.bytes_per_s / 1e9:.0f} GB/s of its memory"
    whose = ", which are assumed (host_flops_per_s, host_bytes_per_s)" if f.is_assumed else ""
    some = ", ".join(f.units) if len(f.units) <= UNITS_NAMED else f"{f.units[0]} to {f.units[-1]}"
    return (
        f"the host computes {len(f.units)} units ({some}), whose weights stay there: "
        f"{bytes_text(f.lasting_bytes)} with adapters and states, and {bytes_text(f.saved_bytes)} saved{room}"
        f"; it takes {seconds_text(f.host_s)} of a step, at {speed}{whose}"
    )


@sentence.register
def _host_roofline(f: HostRoofline) -> str:
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in f.bound.parts.items())
    return f"no step is shorter than its longest part, {f.bound.longest}: {parts}"


@sentence.register
def _stage_values_on_host(f: StageValuesOnHost) -> str:
    return f"values between stages take {bytes_text(f.host_bytes)} more on the host"


@sentence.register
def _host_memory_enough(f: HostMemoryEnough) -> str:
    return f"the host has room for it: {bytes_text(f.host_memory_bytes)}"


@sentence.register
def _host_memory_short(f: HostMemoryShort) -> str:
    how = "whose speed the cluster does not say (disk_bytes_per_s)"
    if f.disk_bytes_per_s is not None and f.disk_s is not None:
        speed = f"{rate_text(f.disk_bytes_per_s / 1e9)} GB/s"
        how = f"which reads and writes it once a step at {speed}, in {seconds_text(f.disk_s)} at least"
    return (
        f"the host has {bytes_text(f.host_memory_bytes)}, {bytes_text(f.missing_bytes)} too little: "
        f"outsize.Ranks(offload_folder=FOLDER) puts the rest on a disk, {how}"
    )


@sentence.register
def _devices_in_turns(f: DevicesInTurns) -> str:
    one, several = seconds_text(f.one_device_step_s), seconds_text(f.step_s)
    least = "at least " if f.is_bound else ""
    return f"a step would take {least}{one} on one device, and {several} on {f.devices} devices in turns"


# -- schedules and tuning --------------------------------------------------------------------------------


@sentence.register
def _composed_schedule(f: ComposedSchedule) -> str:
    what = "branches run at the same time" if f.branches else "a schedule composed for these stages"
    split = ", with gradients of weights computed in its gaps" if f.split_backward else ""
    schedule_text = f"{what}{split}: {f.stages} stages on {f.devices} devices"
    if f.named_step_s < f.step_s:
        return schedule_text
    return (
        f"{schedule_text}, {seconds_text(f.step_s)} a step; in the model's own order {f.named_schedule} with "
        f"{microbatches_text(f.microbatches)} takes {seconds_text(f.named_step_s)}, "
        f"{percent_text(f.named_step_s / f.step_s - 1)} more"
    )


@sentence.register
def _measured(f: Measured) -> str:
    return f"tuned: {seconds_text(f.step_s)} by a real step, the fastest of {f.trials} that ran"


@sentence.register
def _tuning_end(f: TuningEnd) -> str:
    if f.reason == "all-trials":
        return f"tuning ended after {f.trials} steps"
    if f.reason == "no-faster-point":
        return "no other choice is predicted to be faster"
    return f"the best other choice would take {percent_text(f.gain)} less at best, by prediction"


# -- what was not chosen ---------------------------------------------------------------------------------


@sentence.register
def _not_chosen(f: NotChosen) -> str:
    where = f" on {axes_text(f.axes)}" if "axes" in f.differs else ""
    where += f", {weight_policy(f.weights).text or 'weights resident'}" if "weights" in f.differs else ""
    if "sequence_parallel" in f.differs:
        where += ", sequence parallel" if f.sequence_parallel else ", not sequence parallel"
    if "slices" in f.differs:
        where += f", {f.slices} slices of sequences" if f.slices > 1 else ", not in slices of sequences"
    name = _schedule_text((f.schedule,), f.stages_per_device, f.microbatches) + where
    bits = "; its results are bit-identical to one device's" if f.bit_identical else ""
    gain = f.chosen_step_s / f.step_s - 1 if f.step_s else 0.0
    if gain > PERCENT:
        faster = f"{percent_text(gain)} faster, which is less than predictions err"
        return f"{name}: {seconds_text(f.step_s)} a step, {faster}{bits}"
    if not f.as_fast:
        slower = percent_text(f.step_s / f.chosen_step_s - 1)
        times = f"{seconds_text(f.step_s)} a step instead of {seconds_text(f.chosen_step_s)}"
        return f"{name}: {times}, {slower} slower{bits}"
    more = f"{bytes_text(f.more_bytes)} more on its fullest device" if f.more_bytes > 0 else "no less memory"
    return f"{name}: as fast within a percent, with {more}{bits}"


@sentence.register
def _does_not_fit(f: DoesNotFit) -> str:
    where = f" on {axes_text(f.axes)}" if not {axis.name for axis in STAGES}.issuperset(f.axes) else ""
    where += _weights_named(f.weights)
    name = _schedule_text(f.schedules, f.stages_per_device, f.microbatches) + where
    if f.shortage is None:
        return f"{name}: no balanced cut fits"
    return f"{name}: at best {sentence(f.shortage)}"


def _schedule_text(schedules: Iterable[str], stages_per_device: int, microbatches: int) -> str:
    """Returns `gpipe, 1f1b with 8 microbatches`, `interleaved (2 stages a device) with 4 microbatches`."""
    several = f" ({stages_per_device} stages a device)" if stages_per_device > 1 else ""
    return f"{', '.join(schedules)}{several} with {microbatches_text(microbatches)}"


def _weights_named(weights: Weights) -> str:
    text = weight_policy(weights).text
    return f", {text}" if text else ""


@sentence.register
def _no_pipeline_fits(f: NoPipelineFits) -> str:
    return f"no pipeline fits: {refusal_text(f.refusal)}"


# -- what a step is limited by: the sentence follows the words "limited by" ------------------------------


@sentence.register
def _single_unit(f: SingleUnit) -> str:
    return f"{f.unit}, a single unit, alone on stage {f.stage}"


@sentence.register
def _host_bound(f: HostBound) -> str:
    optimizer = percent_text(f.optimizer_share)
    return (
        f"the host: devices compute for {percent_text(f.compute_share)} of the step, the host's optimizer "
        f"takes {optimizer}"
    )


@sentence.register
def _memory_bound(f: MemoryBound) -> str:
    return f"memory: with more of it a step could be {seconds_text(f.shorter_s)} shorter"


@sentence.register
def _collective_bound(f: CollectiveBound) -> str:
    percent = percent_text(f.share)
    return f"collectives of {f.replicas} replicas: {percent} of the step, which no computation hides"


@sentence.register
def _link_bound(f: LinkBound) -> str:
    return f"links: {percent_text(f.share)} of the step are transfers that no computation hides"


@sentence.register
def _bubble_bound(f: BubbleBound) -> str:
    return f"the bubble: devices wait for {percent_text(f.share)} of the step"


@sentence.register
def _compute_bound(f: ComputeBound) -> str:
    if f.stage is None:
        return f"compute, for {percent_text(f.share)} of the step"
    return f"compute on stage {f.stage}, which is busy for {percent_text(f.share)} of the step"


@sentence.register
def _peak_margin(f: PeakMargin) -> str:
    unseen = f"P95 adds {100 * f.unseen_share:.3g} % for what is not counted"
    if not f.segments_bytes:
        return unseen
    least = (
        f"{unseen}, {100 * f.fragmented_share:.3g} % and {bytes_text(f.segments_bytes)} for the segments of "
        f"the allocator, and {bytes_text(f.context_bytes)} for the context"
    )
    if not f.kept_tensors:  # written by an earlier version
        return least
    code = f"{bytes_text(f.cudnn_bytes)} for cuDNN and " if f.cudnn_bytes else ""
    without = f"{100 * f.kept_share:.3g} % in place of the {100 * f.fragmented_share:.3g} %, or "
    return (
        f"{least} and cuBLAS; where there is room, {without if f.kept_share else ''}with convolutions {code}"
        f"free segments of {f.kept_tensors:g} times the largest tensor"
    )


_MODELS: Final = {
    "dense": "dense models",
    "experts": "mixtures of experts",
    "adapters": "adapters of frozen models (LoRA)",
    "images": "image models",
}
_WHERE: Final = {"device": "one device", "node": "one node", "nodes": "several nodes"}


@sentence.register
def _foresight(f: Foresight) -> str:
    what = f"{_MODELS[f.kind]} in {f.precision} on {_WHERE[f.nodes]}"
    sheet = "" if f.compared else "; of these devices no step was compared: their data sheet speaks"
    if f.mean_error is None and f.worst_error is None:
        return f"no plan for {what} was compared with a measured step{sheet}"
    mean = f"{percent_text(f.mean_error)} in the mean" if f.mean_error is not None else ""
    worst = f"{percent_text(f.worst_error)} at worst" if f.worst_error is not None else ""
    rows = f" ({f.rows} steps)" if f.rows is not None else ""
    return f"plans for {what} missed measured steps by {', '.join(filter(None, (mean, worst)))}{rows}{sheet}"


# -- advice on a plan ------------------------------------------------------------------------------------


@sentence.register
def _replicas_faster(f: ReplicasFaster) -> str:
    who = f"the model fits on one device: {f.replicas} replicas"
    if f.sharded:
        who = f"{f.replicas} replicas that share weights and states"
    but = ", with results equal within rounding instead of bit by bit" if f.sharded else ""
    return (
        f"{who} would do {rate_text(f.samples_per_s)} samples/s, {f.ratio:.2f} x this pipeline's "
        f"{rate_text(f.pipeline_samples_per_s)}{but}"
    )


@next_step.register
def _take_replicas(f: ReplicasFaster) -> str:
    option = axes_typed({(SHARD if f.sharded else REPLICATE).name: f.replicas})
    return f"outsize plan MODEL --cluster {f.cluster} {option}"


@sentence.register
def _slow_links(f: SlowLinks) -> str:
    return (
        f"{f.link} is {f.ratio:.1f} x too slow for tensor parallelism over {f.devices} devices: "
        f"{seconds_text(f.sent_s)} of all-reduces per microbatch would save {seconds_text(f.saved_s)} of "
        "matrix products"
    )


@next_step.register
def _keep_tp_one(f: SlowLinks) -> str:
    return f"keep tp=1, or use links of {bytes_text(f.enough_bytes_per_s)}/s"


@sentence.register
def _other_kernels(f: OtherKernels) -> str:
    seen = "casts take kernels of their own"
    if f.waiting:
        seen = f"devices wait for their host's launches {percent_text(f.waiting)} of their time"
    return (
        f"{seen}: with the kernels {f.kernels} a step would take {seconds_text(f.other_step_s)}, "
        f"not {seconds_text(f.step_s)}"
    )


@next_step.register
def _run_other_kernels(f: OtherKernels) -> str:
    run = f"compiled=outsize.Compile({f.compiled}, device_graphs={f.device_graphs})"
    return f"--kernels {f.kernels} to plan for them; parallelize(..., {run}) to run them"


@sentence.register
def _heavy_unit(f: HeavyUnit) -> str:
    amount = {"compute": "compute", "memory": "bytes of weights and states"}[f.amount]
    return (
        f"{f.unit} alone has {percent_text(f.share)} of the {amount}, an even share is "
        f"{percent_text(f.even_share)}: no cut into {f.stages} stages is balanced"
    )


@next_step.register
def _take_fewer_stages(f: HeavyUnit) -> str:
    return f"--stages {max(1, int(1 / f.share))}, or a smaller {f.unit}"


@sentence.register
def _branch_order(f: BranchOrder) -> str:
    return (
        "with its branches in another order the model has cuts whose slowest stage takes "
        f"{seconds_text(f.stages_s)} per microbatch; in its own order no cut takes less than "
        f"{seconds_text(f.runs_s)}"
    )


@next_step.register
def _take_auto(f: BranchOrder) -> str:
    moved = f": {f.moved} and what it needs in an earlier stage" if f.moved else ""
    return f"--schedule auto, where branches may be stages of their own{moved}"


@sentence.register
def _small_stage(f: SmallStage) -> str:
    why = "its memory is full" if f.memory_full else "its neighbours have nothing more to give"
    return (
        f"stage {f.stage} has {percent_text(f.share)} of the compute, an even share is "
        f"{percent_text(f.even_share)}: {why}"
    )


@next_step.register
def _take_one_stage_less(f: SmallStage) -> str:
    return f"--stages {f.stages - 1}"


@sentence.register
def _fat_boundary(f: FatBoundary) -> str:
    more = f" and {f.more_values} more" if f.more_values else ""
    return (
        f"the cut before {f.unit} moves {bytes_text(f.moved_bytes)} per microbatch in both directions, "
        f"{seconds_text(f.moved_s)} on {f.link}, while the slowest stage computes for "
        f"{seconds_text(f.slowest_stage_s)}: {_sizes(f.largest)}{more}"
    )


@next_step.register
def _cut_elsewhere(f: FatBoundary) -> str:
    return "a cut elsewhere by hand (outsize plan MODEL --check FILE), or a faster link"


@sentence.register
def _optimizer_states(f: OptimizerStates) -> str:
    return (
        f"{f.device} is {percent_text(f.full_share)} full and {percent_text(f.states_share)} of that is "
        f"optimizer state; another device has {bytes_text(f.room_bytes)} to spare"
    )


@next_step.register
def _shrink_states(f: OptimizerStates) -> str:
    return "--optimizer adam8bit, or no --exact: --axes dp_shard=2 shares states between several devices"


@sentence.register
def _unused_devices(f: UnusedDevices) -> str:
    return f"{f.unused} of {f.devices} devices have no stage"


@next_step.register
def _use_all_devices(f: UnusedDevices) -> str:
    return f"--stages {f.devices}"


@sentence.register
def _idle_devices(f: IdleDevices) -> str:
    return (
        f"devices are idle for {percent_text(f.bubble)} of the step with "
        f"{microbatches_text(f.microbatches)} on {f.devices} devices in a row"
    )


@next_step.register
def _fill_the_bubble(f: IdleDevices) -> str:
    if f.try_microbatches is None:
        return "a larger --batch, or fewer --stages"
    return f"--microbatches {f.try_microbatches}"


@sentence.register
def _uneven_stages(f: UnevenStages) -> str:
    return (
        f"stage {f.stage} takes {seconds_text(f.slowest_s)} per microbatch, the mean is "
        f"{seconds_text(f.mean_s)}: equal stages would save up to {percent_text(f.gain)} of the step"
    )


@next_step.register
def _move_units(f: UnevenStages) -> str:
    return f"other --stages, or move units of stage {f.stage} by hand and price the plan with --check"


@sentence.register
def _doubled_microbatches(f: DoubledMicrobatches) -> str:
    return (
        f"{f.microbatches} microbatches instead of {f.now} would save up to {percent_text(f.gain)}: devices "
        f"are idle for {percent_text(f.bubble)} of the step"
    )


@next_step.register
def _double_microbatches(f: DoubledMicrobatches) -> str:
    return f"--microbatches {f.microbatches}"


@sentence.register
def _second_forward(f: SecondForward) -> str:
    return f"recomputation is {percent_text(f.gain)} of the compute"


@next_step.register
def _recompute_nothing(f: SecondForward) -> str:
    return "--recompute none, with more or larger devices"


@sentence.register
def _memory_left(f: MemoryLeft) -> str:
    verb = "are free on" if f.room_bytes >= 0 else "are missing on"
    return f"{bytes_text(abs(f.room_bytes))} {verb} {f.device}, the fullest device"


@next_step.register
def _use_memory(f: MemoryLeft) -> str:
    return "a larger --batch" if f.room_bytes >= 0 else "outsize fit MODEL says what to change"


# -- a measured step -----------------------------------------------------------------------------------


def idle_sentence(idle: Idle) -> str:
    """Returns `devices idle 74 % of the step: the schedule is sequential; ... -> predicted 3.1x` (W210)."""
    gain = f" -> predicted {idle.gain:.1f}x" if idle.gain > 1 else ""
    return f"devices idle {percent_text(idle.share)} of the step: {_why_idle(idle)}; {_remedy(idle)}{gain}"


def _why_idle(idle: Idle) -> str:
    match idle.cause:
        case "modules":
            return "the model runs by modules, which wait for each other"
        case "sequential":
            return "the schedule is sequential"
        case "few-microbatches":
            return f"{idle.microbatches} microbatches are few for {idle.stages} stages"
        case "uneven-stages":
            percent = percent_text(idle.slowest_share)
            return f"stages are uneven, stage {idle.slowest_stage} computes {percent} of the step's work"
        case "transfers":
            return f"{percent_text(idle.part)} of it are messages and what happens between the actions"


def _remedy(idle: Idle) -> str:
    change = dict(idle.change)
    if change:
        count = microbatches_text(int(change["microbatches"]))
        batch = f"a batch of {change['batch']} as " if "batch" in change else ""
        return f"{batch}{count} with {change['schedule']}"
    if idle.cause == "modules":
        return "a forward that can be captured would be pipelined"
    if idle.cause == "uneven-stages":
        return "even stages by measured times"
    return "larger batches, or cuts where less crosses"


def idle_next_step(idle: Idle, command: str | None = None) -> str:
    """Returns what to type: the command of this run with other options, or the call of the library."""
    if not idle.change:
        return "outsize tune MODEL" if idle.cause == "uneven-stages" else "outsize explain W210"
    if command is not None:
        return " ".join([command, *(f"--{name} {value}" for name, value in idle.change)])
    pairs = (f"{name}={value if value.isdigit() else repr(value)}" for name, value in idle.change)
    return f"outsize.plan(..., {', '.join(pairs)})"


# -- whether a training fits -----------------------------------------------------------------------------


@sentence.register
def _microbatches_added(f: MicrobatchesAdded) -> str:
    samples = f"{f.samples} sample{'s' * (f.samples > 1)}"
    return f"{microbatches_text(f.microbatches)} of at most {samples}"


@sentence.register
def _devices_added(f: DevicesAdded) -> str:
    return f"a stage on each of {f.devices} devices"


@sentence.register
def _schedule_changed(f: ScheduleChanged) -> str:
    return f"{f.schedule} keeps fewer microbatches in flight than {f.asked}"


@sentence.register
def _one_at_a_time(f: OneAtATime) -> str:
    return f"one microbatch at a time: devices wait for each other, about {f.stages} x slower"


@sentence.register
def _recompute_added(f: RecomputeAdded) -> str:
    more = percent_text(f.more_compute_share)
    return f"activations are recomputed in the backward, {more} more compute"


@sentence.register
def _optimizer_changed(f: OptimizerChanged) -> str:
    return f"{f.optimizer} has less state than {f.asked}: it trains differently"


@sentence.register
def _precision_changed(f: PrecisionChanged) -> str:
    return f"{f.precision} instead of {f.asked}: results are other numbers, in fewer bytes"


@sentence.register
def _batch_reduced(f: BatchReduced) -> str:
    return f"a batch of {f.batch_size} instead of {f.asked}: it trains differently"


@sentence.register
def _plan_searched(f: PlanSearched) -> str:
    step = f"{seconds_text(f.step_s)} a step predicted"
    if f.fits_by == "offload":
        return f"nothing else fits; {axes_text(f.axes)}, {weight_policy(f.weights).text}: {step}"
    if f.fits_by == "mesh":
        return f"no pipeline fits as asked; {axes_text(f.axes)}, results equal within rounding: {step}"
    return f"activations that memory has no room for are recomputed in the backward: {step}"


@sentence.register
def _counted_bytes(f: CountedBytes) -> str:
    if f.by_op:
        return "bytes are counted from the model's own forward, op by op, and the actions of the schedule"
    return "bytes are counted from the model's modules alone: without weights activations are unknown"


@sentence.register
def _least_full_cut(f: LeastFullCut) -> str:
    return (
        "the cut above fills its fullest device least; `outsize plan` takes the fastest cut that fits, which "
        "may be another one"
    )
