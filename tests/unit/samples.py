"""A small transformer's plan, timelines and verdict as the other modules would make them, all by hand."""

from __future__ import annotations

from collections.abc import Iterable

from outsize.ir.answers.runs.recorded_run import MeasuredMemory, RecordedRun, RunStep, TimedStep
from outsize.ir.answers.verdict import Verdict
from outsize.ir.cluster import Link
from outsize.ir.findings import ComputeBound, FullestDevice, NotChosen, SlowestStage, UnitsRecomputed
from outsize.ir.graph import ModelGraph, Parameter, Unit
from outsize.ir.plan import Alternative, Axes, Expected, Plan, Stage, StageFigures
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.timeline import Sample, Span, Timeline
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

GIB, MIB = 1024**3, 1024**2
STAGES, MICROBATCHES = 3, 6
EDGES = frozenset({(0, 1), (1, 2), (0, 2)})
BACK = frozenset({(1, 0), (2, 1)})
COSTS = (StageCost(0.021, 0.043), StageCost(0.024, 0.049), StageCost(0.022, 0.046))

LOSSES = tuple(2.6 + 2.94 * 0.93**step + 0.07 * ((step * 7) % 5 - 2) for step in range(60))


def predicted() -> Timeline:
    """1F1B over three ranks with a skip edge 0 -> 2, simulated."""
    schedule = lower(build("1f1b", STAGES, MICROBATCHES), EDGES, BACK, frozenset())
    link = Link(name="wire", latency_s=1e-4, bytes_per_s=1e9)
    sizes = dict.fromkeys(EDGES | BACK, 2_000_000)
    return simulate(schedule, COSTS, sizes, sizes, lambda a, b: link)


def measured() -> Timeline:
    """The predicted step, a little slower and less even, with waits and memory."""
    spans: list[Span] = []
    for number, span in enumerate(predicted().spans):
        late = 1.06 + 0.004 * (number % 3)
        start_s = span.start_s * 1.08
        end_s = start_s + span.duration_s * (late if span.lane == "compute" else 0.1)
        spans.append(span.model_copy(update={"start_s": start_s, "end_s": end_s}))
        if span.lane == "compute" and number % 5 == 4:
            wait = {"lane": "wait", "start_s": start_s - 0.0004, "end_s": start_s}
            spans.append(span.model_copy(update=wait))
    memory = tuple(
        Sample(rank=s.rank, time_s=s.end_s, alive_bytes=(200 + 90 * (i % 4)) * MIB)
        for i, s in enumerate(spans)
        if s.lane == "compute"
    )
    return Timeline(source="measured", ranks=STAGES, spans=tuple(spans), samples=memory)


def history() -> RecordedRun:
    """Sixty steps whose first one is slow, the last three timelines, and the memory of three processes."""
    steps = tuple(
        RunStep(
            step=number,
            loss=loss,
            step_s=2.1 if number == 1 else 0.6 + 0.01 * (number % 4),
            learning_rate=1e-3 * min(1.0, number / 10),
            grad_norm=1.5 / number,
        )
        for number, loss in enumerate(LOSSES, 1)
    )
    timelines = tuple(TimedStep(step=number, timeline=measured()) for number in (58, 59, 60))
    memory = tuple(measured_memory(stage) for stage in range(STAGES))
    return RecordedRun(steps=steps, timelines=timelines, memory=memory)


def losses_alone(losses: Iterable[float | None]) -> RecordedRun:
    """A run of which nothing but losses and seconds is known."""
    return RecordedRun(
        steps=tuple(RunStep(step=n, loss=loss, step_s=0.6) for n, loss in enumerate(losses, 1))
    )


def measured_memory(stage: int) -> MeasuredMemory:
    """A tenth more than planned, all of it in activations."""
    figures = _figures(stage)
    return MeasuredMemory(
        device="cpu",
        stages=(stage,),
        peak_bytes=round(1.1 * figures.peak_bytes),
        weights_bytes=figures.weights_bytes,
        gradients_bytes=figures.gradients_bytes,
        optimizer_bytes=figures.optimizer_bytes,
    )


def _figures(stage: int) -> StageFigures:
    cost = COSTS[stage]
    weights = (19 - stage) * MIB + 457_216
    return StageFigures(
        units=(40, 38, 36)[stage],
        parameters=weights // 4,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        weights_bytes=weights,
        gradients_bytes=weights,
        optimizer_bytes=2 * weights,
        activations_bytes=(249 - 80 * stage) * MIB,
        boundary_bytes=(6, 4, 3)[stage] * MIB,
        busy=predicted().utilisation(stage),
        device_bytes=12 * GIB,
    )


def expected() -> Expected:
    """What the simulated step amounts to."""
    step = predicted()
    return Expected(
        step_s=step.duration_s,
        bubble=step.bubble,
        samples_per_s=24 / step.duration_s,
        stages=tuple(_figures(stage) for stage in range(STAGES)),
        source="roofline",
    )


def not_chosen(schedule: str, *, step_s: float, as_fast: bool, more_bytes: int = 0) -> NotChosen:
    """Another schedule for the plan below."""
    return NotChosen(
        schedule=schedule,
        microbatches=MICROBATCHES,
        stages_per_device=1,
        axes={"pp": STAGES},
        weights="resident",
        sequence_parallel=False,
        differs=(),
        step_s=step_s,
        chosen_step_s=0.578,
        as_fast=as_fast,
        more_bytes=more_bytes,
    )


def plan() -> Plan:
    """Three stages on three processes."""
    return Plan(
        model="GPT2LMHeadModel",
        fingerprint="593aaeb85196",
        cluster="3xcpu",
        axes=Axes(pp=STAGES),
        batch_size=24,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        stages=(
            Stage(units=("wte", "wpe", "drop", "h.0-1", "h.2.ln_1"), device="cpu:0"),
            Stage(units=("h.2.attn", "h.2.ln_2", "h.2.mlp", "h.3-5", "h.6.ln_1", "h.6.attn"), device="cpu:1"),
            Stage(units=("h.6.ln_2", "h.6.mlp", "h.7", "ln_f", "lm_head"), device="cpu:2"),
        ),
        expected=expected(),
        why=(
            SlowestStage(
                stage=1,
                units=("h.2.attn", "h.2.ln_2", "h.2.mlp", "h.3-5", "h.6.ln_1", "h.6.attn"),
                compute_s=0.073,
                share=73 / 205,
                even_share=1 / 3,
            ),
            FullestDevice(
                device="cpu:0",
                used_bytes=round(332.7 * MIB),
                memory_bytes=12 * GIB,
                microbatches_in_flight=3,
                largest=(("h.0.attn:scaled_dot_product_attention", round(27.8 * MIB)),),
            ),
            not_chosen("gpipe", step_s=0.578, as_fast=True, more_bytes=249 * MIB),
            not_chosen("naive", step_s=1.24, as_fast=False),
        ),
    )


def interleaved_step() -> Timeline:
    """Four stages on two ranks, four microbatches."""
    chain = frozenset((s, s + 1) for s in range(3))
    back = frozenset((b, a) for a, b in chain)
    schedule = lower(build("interleaved", 4, 4, 2), chain, back, frozenset())
    link = Link(name="wire", latency_s=1e-4, bytes_per_s=1e9)
    sizes = dict.fromkeys(chain | back, 2_000_000)
    return simulate(schedule, [StageCost(0.02, 0.04)] * 4, sizes, sizes, lambda a, b: link)


def selective() -> Plan:
    """The first stage recomputes some of its units."""
    stages, figures = plan().stages, expected().stages
    some = {"recompute": "selective", "recomputed": ("wpe", "h.0.attn", "h.1.attn", "h.2.ln_1")}
    counted = figures[0].model_copy(update={"recomputed": 9})
    return plan().model_copy(
        update={
            "stages": (stages[0].model_copy(update=some), *stages[1:]),
            "expected": expected().model_copy(update={"stages": (counted, *figures[1:])}),
            "why": (
                UnitsRecomputed(stages=(0,), recomputed_units=9, units=40, again_s=0.0051, forward_s=0.021),
            ),
        }
    )


def interleaved() -> Plan:
    """Two stages on each of two devices; the later ones are recomputed."""
    step, names = interleaved_step(), ("wte", "h.0-2", "h.3-7", "ln_f")
    figures = [_figures(min(s, 2)).model_copy(update={"busy": step.utilisation(s % 2)}) for s in range(4)]
    return plan().model_copy(
        update={
            "cluster": "2xcpu",
            "axes": Axes(pp=2),
            "microbatches": 4,
            "schedule": "interleaved",
            "stages": tuple(
                Stage(units=(name,), device=f"cpu:{s % 2}", recompute="full" if s > 1 else None)
                for s, name in enumerate(names)
            ),
            "expected": expected().model_copy(
                update={
                    "step_s": step.duration_s,
                    "bubble": step.bubble,
                    "stages": tuple(figures),
                    "gap": 0.0223,
                    "limited_by": ComputeBound(stage=2, share=0.8),
                }
            ),
        }
    )


def unsupported() -> Plan:
    """Three stages of eight devices each, two replicas, weights sharded, of a model that runs by modules."""
    other = Alternative(
        schedule="zero-bubble",
        microbatches=6,
        axes=Axes(pp=12, cp=2),
        step_s=0.7,
        samples_per_s=34.3,
        peak_bytes=40 * GIB,
    )
    sharded = {"axes": Axes(pp=12, dp_shard=2), "schedule": "interleaved", "chunks": 4, "weights": "sharded"}
    runs = other.model_copy(update={"axes": Axes(pp=24), "schedule": "1f1b"})
    stages = tuple(s.model_copy(update={"device": f"cuda:{8 * n}"}) for n, s in enumerate(plan().stages))
    return plan().model_copy(
        update={
            "cluster": "3x8xh100-80gb",
            "form": "modules",
            "axes": Axes(pp=3, dp_shard=2, tp=2, cp=2),
            "batch_size": 48,
            "precision": "bf16-mixed",
            "weights": "sharded",
            "stages": stages,
            "expected": expected().model_copy(update={"gap": 0.0}),
            "alternatives": (other, other.model_copy(update=sharded), runs),
        }
    )


def graph() -> ModelGraph:
    """Four units, of which the last is tied to the first."""
    names = ("wte", "h.0.attn:scaled_dot_product_attention", "h.0.mlp.c_fc", "lm_head")
    parameters = (
        Parameter(
            names=("wte.weight", "lm_head.weight"),
            shape=(256, 320),
            dtype="float32",
            size_bytes=327_680,
            trainable=True,
        ),
        Parameter(
            names=("h.0.mlp.c_fc.weight",),
            shape=(320, 1280),
            dtype="float32",
            size_bytes=1_638_400,
            trainable=True,
        ),
    )
    held = (("wte.weight",), (), ("h.0.mlp.c_fc.weight",), ("lm_head.weight",))
    units = tuple(
        Unit(
            index=i,
            name=name,
            kind="module",
            parameters=held[i],
            buffer_bytes=0,
            flops=(0, 168_000_000, 419_430_400, 83_886_080)[i],
            moved_bytes=1_000_000,
            saved_bytes=(4096, 14_600_000, 2_621_440, 655_360)[i],
        )
        for i, name in enumerate(names)
    )
    return ModelGraph(
        model="GPT2LMHeadModel",
        fingerprint="593aaeb85196",
        batch_size=4,
        units=units,
        values=(),
        parameters=parameters,
    )


def profile() -> Profile:
    """Estimated costs of `graph`, but for one unit that was measured."""
    units = tuple(
        UnitCost(
            name=unit.name,
            forward_s=1e-4 * (unit.index + 1),
            backward_input_s=1e-4 * (unit.index + 1),
            backward_weight_s=5e-5,
            saved_bytes=unit.saved_bytes,
            workspace_bytes=0,
            flops=unit.flops,
            source="measured" if unit.index == 2 else "roofline",
        )
        for unit in graph().units
    )
    return Profile(fingerprint="593aaeb85196", device="cpu", microbatch_size=4, units=units)


def verdict(bit_equal: bool = True) -> Verdict:
    """All equal, or a gradient that differs from the second block on."""
    off = 0.0 if bit_equal else 3.8e-6
    return Verdict(
        model="GPT2LMHeadModel",
        bit_equal=bit_equal,
        loss_diff=0.0,
        grad_diff=off,
        buffer_diff=0.0,
        parameter_diff=off / 4,
        first_divergence=None if bit_equal else "h.2.attn (backward)",
        stages=tuple(stage.units for stage in plan().stages),
        schedule="1f1b",
        microbatches=MICROBATCHES,
        processes=3,
        capture_s=0.52,
        run_s=4.71,
        notes=() if bit_equal else ("a kernel chose another algorithm",),
    )
