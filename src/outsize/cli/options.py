"""The options that several verbs have, each spelled and explained once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, final

import typer

from outsize.errors import BadOption

if TYPE_CHECKING:
    from outsize.ir.plan import ScheduleName
    from outsize.ir.schedule import Schedule as Rows

# The samples of a batch when neither --batch nor a plan says.
BATCH: Final = 8
JSON: Final = "--json"


@final
class ScheduleOption(StrEnum):
    """The schedules that can be asked for by name; tests/unit/cli holds this against ir.plan.ScheduleName."""

    naive = "naive"
    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero-bubble"
    zero_bubble_v = "zero-bubble-v"
    auto = "auto"


@final
class RecomputeOption(StrEnum):
    """As ir.plan.Recompute."""

    none = "none"
    selective = "selective"
    full = "full"
    offload = "offload"


@final
class BatchNormOption(StrEnum):
    """As ir.plan.BatchNormMode."""

    micro = "micro"
    deferred = "deferred"
    sync = "sync"


@final
class SpaceOption(StrEnum):
    """As planner.request.Space."""

    pp = "pp"
    all = "all"


@final
class WhereOption(StrEnum):
    """As ir.plan.Weights."""

    resident = "resident"
    sharded = "sharded"
    host_optimizer = "host-optimizer"
    host = "host"
    host_activations = "host-activations"


@final
class PrecisionOption(StrEnum):
    """As ir.plan.Precision; tests/unit/cli holds this against it."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_mixed = "bf16-mixed"
    fp16_mixed = "fp16-mixed"


def _remember(ctx: typer.Context, value: bool) -> bool:
    """Leave --json where the error handler finds it (app.py)."""
    ctx.meta[JSON] = value
    return value


def _argument(help: str, metavar: str) -> Any:
    return typer.Argument(help=help, metavar=metavar, show_default=False)


Model = Annotated[
    str,
    _argument(
        "torchvision:resnet50, transformers:GPT2Config?n_layer=4, transformers:./config.json "
        "or package.module:builder",
        "MODEL",
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Shape of one sample, 3x224x224; a sequence length, 128, for transformers.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", min=1, help=f"Samples in the global batch (default: the plan's, else {BATCH})."),
]
Cluster = Annotated[
    str,
    typer.Option("--cluster", help="Devices: 2xcpu, 8xh100-80gb, 2x8xa100-80gb, 2x12GB, or local."),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="Whose state has to fit: adamw, adam, sgd, momentum, adafactor, adam8bit.",
    ),
]
Precision = Annotated[
    PrecisionOption,
    typer.Option("--precision", help="Of training: all fp32, all bf16, or autocast with weights in fp32."),
]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="Parts that a batch is split into.")
]
Stages = Annotated[
    int | None,
    typer.Option("--stages", min=1, help="Stages of the pipeline (default: one per device)."),
]
Schedule = Annotated[
    ScheduleOption | None, typer.Option("--schedule", help="Order of forwards and backwards.")
]
AnySchedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar=f"[{'|'.join(ScheduleOption)}|FILE.csv]",
        help="Order of forwards and backwards; a file has one rank a line, 0F0,0F1,0B0,0B1.",
    ),
]
Recompute = Annotated[
    RecomputeOption | None,
    typer.Option(
        "--recompute",
        help="full: all activations are computed anew in the backward; selective: those of some units, where "
        "memory wants it (plan: that, if not given); offload: they are on the host until their backward.",
    ),
]
BatchNorm = Annotated[
    BatchNormOption | None,
    typer.Option(
        "--bn", help="BatchNorm's statistics: by microbatch, running ones once per batch, whole batch."
    ),
]
Space = Annotated[
    SpaceOption | None,
    typer.Option(
        "--axes",
        help="all: also replicas, FSDP and tp, as far as they run; pp: a pipeline alone (default: all where "
        "no pipeline fits).",
    ),
]
Replicas = Annotated[
    int | None, typer.Option("--dp-replicate", min=1, help="Replicas, each with its part of the batch.")
]
Shards = Annotated[
    int | None, typer.Option("--dp-shard", min=1, help="Replicas that share weights and states (FSDP).")
]
Tensor = Annotated[int | None, typer.Option("--tp", min=1, help="Devices that share the work of each layer.")]
Sequence = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="Whether --tp divides what lies between layers, too (default: what is faster, or smaller).",
    ),
]
Where = Annotated[
    WhereOption | None,
    typer.Option(
        "--weights",
        help="With --dp-shard: sharded, whole block by block (default), or resident, whole during a step. "
        "One device: host-optimizer, the optimizer's states are in the host's memory; host, all is, "
        "and stage after stage comes; host-activations, and what stages hand to each other "
        "(default: the fastest of the three where it is too small).",
    ),
]
WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="As --axes all, with what this version only plans: sequences shared by devices (cp).",
    ),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan instead of making one.")
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="PATH",
        help="safetensors to load, a file, an index or a folder (default: random weights).",
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Time the units on this machine instead of estimating them.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the weights and of the random batch.")]
Json = Annotated[
    bool,
    typer.Option(JSON, callback=_remember, is_eager=True, help="One JSON document on stdout, nothing else."),
]


def schedule_name(schedule: ScheduleOption | None) -> ScheduleName | None:
    """The option as a plan spells it."""
    return schedule.value if schedule is not None else None


def any_schedule(text: str | None) -> ScheduleName | Rows | None:
    """A schedule by its name, or the rows of the file of this name. Raises BadOption, InvalidSchedule."""
    from outsize.schedules.planned import read

    if text is None or text in set(ScheduleOption):
        return cast("ScheduleName | None", text)
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadOption(
            f"--schedule {text!r} is neither a schedule nor a file that can be read",
            numbers=f"schedules: {', '.join(ScheduleOption)}; {error}",
            next_step="--schedule auto, or a file with a line like 0F0,0F1,0B0,0B1 for each rank",
        ) from None
    found: Rows = read(tuple(line for line in lines if line.strip()))
    return found


def ordered(schedule: str | None, stages: int | None, microbatches: int | None) -> dict[str, Any]:
    """The fields of a Job that say how it runs; a file has the last word on stages and microbatches."""
    from outsize.schedules.planned import written

    order = any_schedule(schedule)
    if order is None or isinstance(order, str):
        return {"stages": stages, "microbatches": microbatches, "schedule": order}
    return {"stages": stages or order.ranks, "microbatches": microbatches, "actions": written(order)}


def refuse_beside(plan: object | None, source: str, **wishes: object | None) -> None:
    """Raise BadOption for an option that the plan (given by the option `source`) has already decided."""
    given = [name for name, value in wishes.items() if value is not None]
    if plan is not None and given:
        option = f"--{given[0].replace('_', '-')}"
        raise BadOption(
            f"{option} beside {source}: the plan has decided that",
            next_step=f"leave {option} away, or edit the plan",
        )


def given(wishes: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were, without the enums that typer wants."""
    plain = {name: value.value if isinstance(value, StrEnum) else value for name, value in wishes.items()}
    return {name: value for name, value in plain.items() if value is not None}
