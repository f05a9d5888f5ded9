"""Defines the options that several verbs have, each spelled and explained once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, final, get_args

import typer
from pydantic import Field

from outsize.axes.registry import LISTED
from outsize.cli.flags import Key, KeyFlag
from outsize.errors import BadOption
from outsize.errors.words import nearest, spoken, value_here
from outsize.files.strict_json import BadJson, read_text
from outsize.ir import plan as plans
from outsize.ir.answers.request import NONE_SEARCHED, AxisSearch, LayoutOptions, Objective
from outsize.ir.formatting import whole_number
from outsize.ir.plan import Plan, ScheduleName
from outsize.ir.schedule import Schedule
from outsize.policies import activations, weights
from outsize.policies.storage_formats import storage_formats
from outsize.schedules.families import DEFAULT, offered

if TYPE_CHECKING:
    from outsize.api.records import AxisSizes, Lora, Quantize

# The number of samples of a batch when neither --batch nor a plan says it.
BATCH: Final = 8
JSON: Final = "--json"
# peft's word for every linear layer of a transformers model but its head.
ALL_LINEAR: Final = "all-linear"
_MOST_SCHEDULE_BYTES: Final = 16 << 20
AXES: Final = tuple(axis.name for axis in LISTED if not axis.cuts_stages)
OTHERS: Final = "others"


def _offered_schedule(name: str | None) -> str | None:
    """Returns the name if a schedule has it; raises typer's error for a wrong choice otherwise."""
    if name is None or name in offered():
        return name
    raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, offered()))}.")


def _remember(ctx: typer.Context, value: bool) -> bool:
    """Stores --json where the error handler finds it (app.py)."""
    ctx.meta[JSON] = value
    return value


def _helped(policy: weights.WeightPolicy) -> str:
    """Returns a policy with what it means: `resident, gathered once per step`."""
    return f"{policy.name}, {policy.help}"


def _argument(help: str, metavar: str) -> Any:
    return typer.Argument(help=help, metavar=metavar, show_default=False)


_MODEL: Final = _argument(
    "torchvision:resnet50, transformers:GPT2Config?n_layer=4, transformers:./config.json "
    "or package.module:builder",
    "MODEL",
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
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
        help="Optimizer whose states have to fit: adamw, adam, sgd, momentum, adafactor, adam8bit, muon, "
        "soap.",
    ),
]
Precision = Annotated[
    plans.Precision,
    typer.Option(
        "--precision",
        help="Precision of training: all fp32 or tf32, all bf16, autocast with fp32 weights (mixed), "
        "or linear layers in 8 or 4 bits.",
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", min=1, help="Number of parts that a batch is split into."),
]
Stages = Annotated[
    int | None,
    typer.Option("--stages", min=1, help="Number of pipeline stages (default: one per device)."),
]
Chunks = Annotated[
    int | None,
    typer.Option(
        "--chunks", min=1, help="Number of stages on each rank of the pipeline (default: what is faster)."
    ),
]
ScheduleByName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar=f"[{'|'.join(offered())}]",
        callback=_offered_schedule,
        help="Order of forwards and backwards.",
    ),
]
ScheduleOrFile = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar=f"[{'|'.join(offered())}|FILE.csv]",
        help="Order of forwards and backwards; a file has one line per rank: 0F0,0F1,0B0,0B1.",
    ),
]
Recompute = Annotated[
    activations.Recompute | None,
    typer.Option(
        "--recompute",
        help="What happens to activations until the backward. "
        + "; ".join(f"{policy.name}: {policy.help}" for policy in activations.activation_policies())
        + ".",
    ),
]
Kernels = Annotated[
    plans.Kernels | None,
    typer.Option(
        "--kernels",
        help="Stack of kernels whose seconds are told: one for each op (eager, the default), replayed as "
        "graphs, compiled, or both; flash-3: with FlashAttention-3, which torch is told to take; fused: "
        "those of a transformer engine, which outsize does not run.",
    ),
]
BatchNorm = Annotated[
    plans.BatchNormMode | None,
    typer.Option(
        "--bn",
        help="BatchNorm's statistics. micro: by microbatch; deferred: running statistics once per batch; "
        "sync: of the whole batch.",
    ),
]
Axes = Annotated[
    str | None,
    typer.Option(
        "--axes",
        metavar="AXIS=N,...",
        help="Devices of each stage along axes: tp=2,dp_shard=4. "
        + "; ".join(f"{axis.name}: {axis.help.rstrip('.')}" for axis in LISTED if not axis.cuts_stages)
        + ". Axes that are not named are searched, but with others=1; pp searches none (default: all).",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        envvar="OUTSIZE_EXACT",
        help="Keep to layouts whose results are bit-identical to one device's: pipelines, or weights on the "
        "host.",
    ),
]
SequenceParallel = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="Whether tp also divides the activations between layers (default: the faster or smaller).",
    ),
]
LossPieces = Annotated[
    int | None,
    typer.Option(
        "--loss-pieces",
        min=1,
        help="Pieces of rows in which the loss is computed, so that logits of all rows never exist at once "
        "(default: where that makes room).",
    ),
]
ModulePieces = Annotated[
    int | None,
    typer.Option(
        "--module-pieces",
        min=1,
        help="Pieces of rows in which wide modules such as MLPs are computed "
        "(default: where nothing else fits).",
    ),
]
Slices = Annotated[
    int | None,
    typer.Option(
        "--slices",
        min=1,
        help="Slices in which the sequences of a microbatch go through the stages (causal attention).",
    ),
]
WeightPlace = Annotated[
    weights.Weights | None,
    typer.Option(
        "--weights",
        help=f"Where weights are stored. With dp_shard: {_helped(weights.SHARDED)} (default), or "
        f"{_helped(weights.RESIDENT)}. On one device, the host's memory holds: "
        + "; ".join(_helped(policy) for policy in weights.weight_policies() if policy.on_host)
        + f". {_helped(weights.HOST_COMPUTED)}"
        + " (default: the fastest that fits, where the device is too small).",
    ),
]
Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="Only run forwards: no gradients and no optimizer; a language model generates, and caches "
        "--batch sequences of --input tokens.",
    ),
]
Loop = Annotated[
    bool,
    typer.Option(
        "--loop",
        help="For a loop of your own (outsize.split): all forwards, then the loss, then all backwards, with "
        "the outputs of the whole batch on every device.",
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        "--lora-rank",
        min=1,
        metavar="R",
        help="Train LoRA adapters of this rank, as peft makes them, and freeze the model's own weights.",
    ),
]
LoraTargets = Annotated[
    str | None,
    typer.Option(
        "--lora-targets",
        metavar="NAME,...|all-linear",
        help="Layers that have an adapter: q_proj,v_proj (default: what peft knows for the architecture).",
    ),
]


@final
@dataclass(frozen=True)
class LoraKeys:
    """Adapters by the keys of peft's LoraConfig."""

    r: Annotated[int | None, Field(ge=1), Key("16", "The rank of the adapters.")] = None
    targets: Annotated[
        str | None, Key("q_proj+v_proj", "Layers that have one; all-linear: every linear layer but the head.")
    ] = None


@final
@dataclass(frozen=True)
class QuantizeKeys:
    """In which few bits frozen weights are stored."""

    format: Annotated[
        str | None,
        Key("nf4", "; ".join(f"{each.name}: {each.help}" for each in storage_formats()) + "."),
    ] = None
    block: Annotated[
        int | None, Field(ge=1), Key("128", "So many elements share a scale (default: the format's).")
    ] = None
    nested: Annotated[
        bool | None, Key("false", "false: scales are not quantized themselves (no double quantization).")
    ] = None
    skip: Annotated[
        str | None,
        Key("mlp+head", "Layers that stay as they are, beside those that transformers leaves out."),
    ] = None
    experts: Annotated[bool | None, Key("true", "true: stacks of experts are stored so, too (nf4, fp4).")] = (
        None
    )


LoraOption = Annotated[
    LoraKeys,
    KeyFlag(
        "--lora", LoraKeys, "Train LoRA adapters as peft makes them: r=16, ... (--lora help).", plain="R"
    ),
]
QuantizeOption = Annotated[
    QuantizeKeys,
    KeyFlag(
        "--quantize",
        QuantizeKeys,
        "Freeze the weights of linear layers in few bits, for the plan alone: nf4, ... (--quantize help).",
        plain="FORMAT",
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="What the plan has least of. time: seconds of a step; cost: money per sample, by the prices of "
        "a cluster file, on the devices that are to be rented for it.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="End the search after so long with the best plan so far, or else with the first it finds.",
    ),
]
Recordings = Annotated[
    str | None,
    typer.Option(
        "--recordings",
        metavar="FOLDER|off",
        envvar="OUTSIZE_RECORDINGS",
        help="Where answers about recordings of MODEL are kept for the next question; by default in the "
        "user's cache folder.",
    ),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan instead of making one.")
]
WeightFiles = Annotated[
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
Seed = Annotated[int, typer.Option("--seed", help="Seed of the weights and of the random batch.")]
Json = Annotated[
    bool,
    typer.Option(JSON, callback=_remember, is_eager=True, help="One JSON document on stdout, nothing else."),
]


@final
@dataclass(frozen=True)
class MeshFlags:
    """The axes of a plan: their sizes, which others are searched, and whether bits are kept."""

    axes: Axes = None
    exact: Exact = False

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the sizes that are given. Raises BadOption."""
        return {name: size for name, size in self._parts if name in AXES}

    @property
    def asked(self) -> AxisSizes | None:
        """Returns the axes as `plan` and `fit` take them. Raises BadOption."""
        from outsize.api.records import mesh_asked

        searched = [name for name, _ in self._parts if name in get_args(AxisSearch)]
        return mesh_asked(self.sizes, cast("AxisSearch", searched[-1]) if searched else None)

    @property
    def layout(self) -> LayoutOptions:
        """Returns the axes as options of a PlanRequest. Raises BadOption."""
        from outsize.api.records import axes_options

        return cast("LayoutOptions", axes_options(self.asked))

    @property
    def _parts(self) -> list[tuple[str, int]]:
        return [self._part(part.strip()) for part in (self.axes or "").split(",") if part.strip()]

    def _part(self, part: str) -> tuple[str, int]:
        """Returns an axis with its size, or with 0 the word for which other axes are searched."""
        if part in get_args(AxisSearch):
            return part, 0
        name, _, text = part.partition("=")
        name, size = name.strip().replace("-", "_"), whole_number(text.strip()) or 0
        if name == OTHERS and size == 1:
            return NONE_SEARCHED, 0
        if name not in AXES:
            raise BadOption(
                f"--axes {self.axes}: {name!r} is no axis of a mesh",
                numbers=f"axes: {', '.join(AXES)}",
                next_step=_axis_instead(name, size or 2),
            )
        if not size:
            raise BadOption(
                f"--axes {self.axes}: {part!r} says no size",
                numbers="a size is a number of devices",
                next_step=f"--axes {name}=2",
            )
        return name, size


def _axis_instead(name: str, size: int) -> str:
    """Returns what to type for an axis as other tools call it, or for the nearest one."""
    row = spoken(name)
    if row is not None and row.flag and row.option in ("stages", "axes"):
        return f"{re.sub(r'[0-9]+$', str(size), row.flag)}"
    return f"--axes {nearest(name, AXES) or AXES[0]}={size}"


NO_MESH: Final = MeshFlags()
NO_LORA: Final = LoraKeys()
NO_QUANTIZE: Final = QuantizeKeys()


def schedule_or_file(text: str | None) -> ScheduleName | Schedule | None:
    """Returns the schedule of this name, or the rows of the file of this name.

    Raises BadOption and InvalidSchedule.
    """
    from outsize.schedules.builders import read

    if text is None or text in offered():
        return text
    try:
        lines = read_text(text, _MOST_SCHEDULE_BYTES).splitlines()
    except (OSError, BadJson) as error:
        raise BadOption(
            f"--schedule {text!r} is neither a schedule nor a file that can be read",
            numbers=f"schedules: {', '.join(offered())}; {error}",
            next_step=f"--schedule {value_here('schedule', text) or DEFAULT.name}, or a file with a line "
            "like 0F0,0F1,0B0,0B1 for each rank",
        ) from None
    return read(tuple(line for line in lines if line.strip()))


def check_not_planned(plan: Plan | None, source: str, options: Mapping[str, Any]) -> None:
    """Raises BadOption for an option that the plan, which the option `source` names, has already decided."""
    given_names = [name for name, value in options.items() if value is not None]
    if plan is not None and given_names:
        name = given_names[0]
        option = "--axes" if name in AXES else f"--{name.replace('_', '-')}"
        raise BadOption(
            f"{option} cannot be used together with {source}: the plan has decided it",
            next_step=f"leave {option} away, or edit the plan",
        )


def sizes_in(text: str, option: str, allowed: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns the sizes of a list like `1,3,6`, in order and each once.

    Raises BadOption that names the first part which is no positive number, or none of `allowed`.
    """
    sizes = set[int]()
    for part in text.split(","):
        size = whole_number(part.strip()) or 0
        if size < 1 or (allowed is not None and size not in allowed):
            values = "positive numbers" if allowed is None else ", ".join(map(str, allowed))
            example = ",".join(map(str, (allowed or (1, 2, 4))[:3]))
            raise BadOption(
                f"{option} {text}: {part.strip()!r} is not a possible size",
                numbers=f"possible: {values}",
                next_step=f"{option} {example}",
            )
        sizes.add(size)
    return tuple(sorted(sizes))


def targets_in(text: str | None) -> tuple[str, ...] | str | None:
    """Returns the layers of `--lora-targets q_proj,v_proj`; "all-linear" is a word and no list."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    return names[0] if len(names) == 1 and names[0] == ALL_LINEAR else names or None


def lora_asked(keys: LoraKeys, rank: int | None, targets: str | None) -> Lora:
    """Returns the adapters of `--lora`, or of `--lora-rank` and `--lora-targets`. Raises BadOption for
    both.
    """
    from outsize.api.records import Lora

    if keys == NO_LORA:
        return Lora(rank, targets_in(targets))
    if rank is not None or targets is not None:
        raise BadOption(
            "--lora and --lora-rank both say which adapters there are",
            numbers=f"--lora r={keys.r}, --lora-rank {rank}",
            next_step=f"--lora r={keys.r or rank or 16}",
        )
    return Lora(keys.r, targets_in(None if keys.targets is None else keys.targets.replace("+", ",")))


def quantize_asked(keys: QuantizeKeys) -> Quantize:
    """Returns the format of `--quantize`. Raises BadOption."""
    from outsize.api.records import Quantize

    skipped = None if keys.skip is None else [name for name in keys.skip.split("+") if name]
    return Quantize(keys.format, keys.block, keys.nested, skipped, keys.experts)


def prices_in(text: str | None) -> dict[str, float]:
    """Returns the prices of a list like `l4=0.8,h100-80gb=2.5`. Raises BadOption."""
    prices = dict[str, float]()
    for part in filter(None, (text or "").split(",")):
        kind, equals, number = part.strip().partition("=")
        try:
            prices[kind] = float(number if equals and kind else "none")
        except ValueError:
            raise BadOption(
                f"--prices {text}: {part.strip()!r} is no price",
                numbers="a price is a kind of device, =, and a number per hour",
                next_step="--prices l4=0.8,h100-80gb=2.5",
            ) from None
    return prices
