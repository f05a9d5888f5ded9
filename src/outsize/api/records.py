"""The records of options, one for each subject: what a keyword argument takes where a plain value says
too little.

    clip_norm=1.0                 clip_norm=outsize.Clip(1.0, clipping="speculative")
    resume="run"                  resume=outsize.Checkpoint("run", saves_in="elsewhere")
    axes={"tp": 2}                plan=outsize.Request(axes={"tp": 2}, precision="bf16-mixed")

A field that is not given has its default; None never hides one. A misspelt field is refused with the
nearest one. Nothing here imports torch, so that the command line reads the same records.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, cast, final, get_args

from outsize.api.field_types import FieldHelp, FieldType
from outsize.axes.registry import LISTED
from outsize.errors import BadOption
from outsize.errors.arguments import shown
from outsize.errors.words import nearest, spoken
from outsize.ir.answers.request import NONE_SEARCHED, AxisSearch, Objective, RequestOptions
from outsize.ir.formatting import whole_number

if TYPE_CHECKING:
    import torch
    from torch.amp.grad_scaler import GradScaler

    from outsize.capture.measure.units import Progress
    from outsize.capture.recording.fallbacks import LossFn
    from outsize.ir.cluster import Cluster
    from outsize.ir.plan import BatchNormMode, Kernels, Precision, ScheduleName
    from outsize.ir.profile import ProfileSet
    from outsize.ir.schedule import Schedule
    from outsize.planner.search.incumbents import Listener
    from outsize.policies.activations import Recompute
    from outsize.policies.weights import Weights
    from outsize.train.batch.loss_weights import Counting
    from outsize.train.crew.grad_clip import Clipping

# Where the names of annotations are that a type checker reads above.
_LATER: Final = {
    "torch": "torch",
    "GradScaler": "torch.amp.grad_scaler",
    "Progress": "outsize.capture.measure.units",
    "LossFn": "outsize.capture.recording.fallbacks",
    "Cluster": "outsize.ir.cluster",
    "BatchNormMode": "outsize.ir.plan",
    "Kernels": "outsize.ir.plan",
    "Precision": "outsize.ir.plan",
    "ScheduleName": "outsize.ir.plan",
    "ProfileSet": "outsize.ir.profile",
    "Schedule": "outsize.ir.schedule",
    "Listener": "outsize.planner.search.incumbents",
    "Recompute": "outsize.policies.activations",
    "Weights": "outsize.policies.weights",
    "Counting": "outsize.train.batch.loss_weights",
    "Clipping": "outsize.train.context.options",
}
OnOutOfMemory = Literal["raise", "replan"]
AXES: Final = tuple(axis.name for axis in LISTED if not axis.cuts_stages)
OTHERS: Final = "others"
AxisSizes = AxisSearch | Mapping[str, int | None]
"""Says the axes of a mesh: {"tp": 2, "dp_shard": 4}, where "others": 1 lets the search add none; "all" or
"pp"."""
# The fields of a Request that are about its search, which only `plan` follows.
OF_A_SEARCH: Final = ("time_limit_s", "on_better")
# How many shapes keep their recorded programs; train/variants/variant.py has the same number.
CAPTURES: Final = 32


class OptionRecord(ABC):
    """Is a frozen record of options, whose fields have defaults."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses a field that is not there with the nearest one. Raises BadOption."""
        known = fields_of(cls)
        for name in kwargs:
            if name not in known:
                near = nearest(name, known)
                example = f"{near or known[0]}=..., or help(outsize.{cls.__name__})"
                what = f"did you mean `{near}`?" if near else f"outsize.{cls.__name__} has {', '.join(known)}"
                raise BadOption(f"no option `{name}`; {what}", next_step=example)
        if len(args) > len(known):
            raise BadOption(
                f"outsize.{cls.__name__} has {len(known)} fields, and was given {len(args)} values",
                numbers=f"its fields: {', '.join(known)}",
                next_step=f"outsize.{cls.__name__}({known[0]}=..., ...)",
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raises BadOption for a value that is not of the type of its field."""
        for name, value in self.given().items():
            if not self.reads(name, value):
                field_type(type(self), name).insist(value, name, self.typed(name))

    def reads(self, name: str, value: Any) -> bool:
        """Tells whether whoever reads the field turns this value into one of its type."""
        return False

    @classmethod
    def typed(cls, name: str) -> str:
        """Returns what a user types for a field, with braces in the place of its value."""
        return f"outsize.{cls.__name__}({name}={{}})"

    @abstractmethod
    def __init__(self) -> None:
        """Takes the fields, which a dataclass sets."""

    @classmethod
    def of(cls, value: Any, keyword: str) -> Self:
        """Returns the record of a keyword: itself, the first field with a plain value, or the defaults
        for None. Raises BadOption."""
        if isinstance(value, cls):
            return value
        if isinstance(value, OptionRecord):
            raise BadOption(
                f"this keyword takes outsize.{cls.__name__}, and was given outsize.{type(value).__name__}",
                numbers=shown(value),
                next_step=f"outsize.{cls.__name__}({', '.join(f'{name}=...' for name in fields_of(cls))})",
            )
        made: Any = cls  # a dataclass, whose first field takes the plain value
        if value is None:
            return made()
        field_type(cls, fields_of(cls)[0]).insist(value, keyword, f"{keyword}={{}}")
        return made(value)

    def given(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults."""
        values = {one.name: (getattr(self, one.name), one.default) for one in fields(cast("Any", self))}
        return {name: value for name, (value, usual) in values.items() if value is not usual}


@cache
def field_type(record: type[OptionRecord], name: str) -> FieldType:
    """Returns what a field takes, as it is annotated, and an example of it."""
    annotation = record.__annotations__[name]
    kind: Any = eval(annotation, _Namespace(globals()))
    return FieldType(*get_args(kind))


@final
class _Namespace(dict[str, Any]):
    """The names of annotations, of which those below TYPE_CHECKING are imported when a value is checked:
    most of them import torch."""

    def __missing__(self, name: str) -> Any:
        return getattr(import_module(_LATER[name]), name) if name in _LATER else getattr(builtins, name)


def fields_of(record: type[OptionRecord]) -> tuple[str, ...]:
    """Returns the names of a record's fields."""
    return tuple(one.name for one in fields(cast("Any", record)))


def unknown_option(name: str, function: str, known: Any) -> BadOption:
    """Returns the error for a keyword that a function or a record does not have."""
    row, near = spoken(name), nearest(name, known)
    is_near = near is not None and (row is None or row.option == near)
    what = f"no option `{name}`; did you mean `{near}`?" if is_near else f"no option `{name}` of {function}"
    if row is not None:
        return BadOption(what, next_step=row.in_python(known))
    return BadOption(what, next_step=f"{near}=..., or help({function})" if is_near else f"help({function})")


@final
@dataclass(frozen=True)
class Loss(OptionRecord):
    """How the loss of a step is computed, weighed and scaled; `loss_fn=` takes a function or this record."""

    function: Annotated[LossFn | None, "torch.nn.functional.cross_entropy"] = None
    """`loss_fn(output, *target)`; without it the output holds the loss."""
    counting: Annotated[Counting, "'auto'"] = "auto"
    """By what a microbatch counts in the batch's loss: "auto" by what the loss is a mean over, "samples",
    or "sum" where losses of microbatches are added as they are (the loss has divided by a count of the
    whole batch)."""
    scaler: Annotated[GradScaler | None, 'torch.amp.GradScaler("cuda")'] = None
    """A GradScaler of torch, which scales the loss for fp16."""


@final
@dataclass(frozen=True)
class Clip(OptionRecord):
    """How gradients are clipped before the update; `clip_norm=` takes a number or this record."""

    norm: Annotated[float | None, "1.0"] = None
    """The largest norm of all gradients, for which an optimizer on the host waits; None clips nothing."""
    clipping: Annotated[Clipping, "'speculative'"] = "exact"
    """"speculative" does not wait, and undoes a step where the norm was too large: the same bits, for 12
    more bytes per parameter on the host (AdamW)."""


@final
@dataclass(frozen=True)
class Compile(OptionRecord):
    """How the functions of stages are compiled and kept; `compiled=` takes a backend, a flag or this
    record."""

    compiled: Annotated[bool | str, "True"] = False
    """A backend of torch.compile: "inductor" (or True) fuses kernels, "aot_eager" keeps every bit. "auto"
    compiles where devices are expected to wait for their host (`engine.compilation` says why), and runs a
    stage as it is where that fails. False: never."""
    device_graphs: Annotated[bool | str, "'auto'"] = False
    """True records each stage's forward and backward as graphs of its device (CUDA graphs) after two
    steps, and replays them, which keeps every bit; a stage that cannot be recorded runs as it is, with a
    warning. "auto" does so where devices are expected to wait for their host. `engine.device_graphs` says
    what was recorded, and its bytes."""
    captures: Annotated[int, "32"] = CAPTURES
    """How many shapes of a microbatch keep their recorded programs."""


@final
@dataclass(frozen=True)
class Checkpoint(OptionRecord):
    """Where a run goes on from, and where it saves itself; `resume=` takes a folder or this record."""

    folder: Annotated[str | Path | None, "'run'"] = None
    """A folder of `engine.save`: the run goes on from its newest complete checkpoint, which may be of
    another layout, and begins where there is none. Without a plan, that of the checkpoint is used if it
    fits."""
    saves_in: Annotated[str | Path | None, "'run'"] = None
    """The folder in which the run will save itself (`folder` by default): what could not go on from
    there, such as an optimizer whose `state_dict()` lacks something, is an error now."""


@final
@dataclass(frozen=True)
class Ranks(OptionRecord):
    """Says what the ranks of a run have: devices, their memory, how they talk, their batches and draws;
    `devices=` takes a list of devices or this record.
    """

    devices: Annotated[Sequence[str | torch.device] | None, '["cuda:0", "cuda:1"]'] = None
    """`["cuda:0", "cuda:1"]` runs in this process, with a rank on each device; name a device several
    times for several ranks on it. A plan made for such devices needs none. Batches may be on any."""
    memory_share: Annotated[float | None, "0.5"] = None
    """How much of each device's memory the run is planned for, and held to: 0.5."""
    on_oom: Annotated[OnOutOfMemory | None, "'replan'"] = None
    """"replan" plans again at the next start, for less memory, where a device of this run ran out of it,
    and goes on from the newest checkpoint in `resume`; "raise" (default) only raises."""
    offload_folder: Annotated[str | Path | None, "'/scratch'"] = None
    """The folder for the files of weights, gradients or states that a plan puts on the host."""
    backend: Annotated[str | None, "'nccl'"] = None
    """torch's name of the communication backend ("mpi", "nccl"); by default gloo for CPUs and the
    device's own. A process group that exists already is used as it is."""
    own_batches: Annotated[bool, "True"] = False
    """True: each replica passes its own samples alone (`engine.batch_sampler`)."""
    seed: Annotated[int, "0"] = 0
    """The seed of random numbers in the model."""


@final
@dataclass(frozen=True)
class Watch(OptionRecord):
    """How a run is watched and published; an entry of `callbacks=`, beside the user's own."""

    hang_timeout: Annotated[float | None, "60"] = None
    """After so many seconds without progress ranks find out whom they wait for (10, and five steps at
    least); 0: never."""
    on_hang: Annotated[Literal["end", "wait"] | None, "'wait'"] = None
    """"end" (default) ends a run that cannot go on, "wait" only says so."""
    verify: Annotated[int | None, "100"] = None
    """In every so many-th step ranks repeat each other's work while they idle, and compare bits, as under
    `engine.verify(every=100)`; 0 (default): never."""
    publish: Annotated[bool, "True"] = False
    """True lets `outsize top` see a run that `outsize run` has not started (it publishes each)."""
    total_steps: Annotated[int | None, "1000"] = None
    """How many steps the run will have, from which `outsize top` knows the time left."""


@final
@dataclass(frozen=True)
class Recordings(OptionRecord):
    """Where plans keep what they have found out by recordings, so that the next question about the same model
    needs none; `recordings=` takes a folder or this record.
    """

    folder: Annotated[str | Path | None, "'recordings'"] = None
    """The folder, which is made for you alone; None: nothing is kept. What a recording depends on (the model,
    its code and packages, the example batch, the loss) is compared each time; what cannot be compared with
    certainty is not kept."""
    depends_on: Annotated[str, "'variables'"] = ""
    """Recordings depend on this text, too: the variables of the environment that the model's code reads."""
    most_bytes: Annotated[int, "1 << 30"] = 256 << 20
    """How large the folder may grow; what was not used for longest goes first."""


@final
@dataclass(frozen=True)
class Lora(OptionRecord):
    """LoRA adapters that peft puts on the model before it is planned, as `peft.get_peft_model` makes
    them; the weights of the model itself are frozen. `lora=` takes a rank or this record.
    """

    rank: Annotated[int | None, "8"] = None
    """The rank of the adapters; None: none."""
    targets: Annotated[Sequence[str] | str | None, "['q_proj', 'v_proj']"] = None
    """The layers that have one, as peft's `target_modules`."""

    def __post_init__(self) -> None:
        """Raises BadOption for layers of adapters that have no rank, and for values of another type."""
        super().__post_init__()
        if self.targets is not None and self.rank is None:
            raise BadOption(
                "lora_targets says where adapters are, and there are none",
                numbers=f"lora_targets={self.targets!r}, lora_rank=None",
                next_step="outsize.Lora(rank=8, targets=...) (--lora-rank 8)",
            )


@final
@dataclass(frozen=True)
class Quantize(OptionRecord):
    """In which few bits a library stores the frozen weights of linear layers, for plans alone: nobody
    quantizes anything, and no library has to be installed. `quantize=` takes a name or this record.
    """

    format: Annotated[str | None, "'nf4'"] = None
    """The format: "nf4" or "fp4" (bitsandbytes, with double quantization), "int8" (bitsandbytes), "fp8" or
    "int4" (torchao), "hqq4", "hqq8"; None: none."""
    block: Annotated[int | None, "128"] = None
    """This many elements share a scale; by default as many as in the format (64 in "nf4")."""
    nested: Annotated[bool | None, "False"] = None
    """False: scales are not quantized themselves, as without bitsandbytes' double quantization."""
    skip: Annotated[Sequence[str] | None, "['lm_head']"] = None
    """Layers that stay as they are, by their names or the last parts of these, beside those that transformers
    leaves out by itself (the head)."""
    experts: Annotated[bool | None, "True"] = None
    """True: stacks of experts are stored so, too, as bitsandbytes' `replace_parameter_4bit` stores one
    ("nf4", "fp4")."""

    def __post_init__(self) -> None:
        """Raises BadOption for blocks that no weight has, and for values of another type."""
        super().__post_init__()
        if self.block is not None and self.block < 1:
            raise BadOption(
                f"block={self.block} makes no sense",
                numbers="it is how many elements share a scale",
                next_step="outsize.Quantize('nf4', block=64)",
            )

    def insist_on_format(self) -> None:
        """Raises BadOption for settings of no format."""
        if self.format is None and (given := self.given()):
            raise BadOption(
                f"quantize has {', '.join(given)} and no format",
                numbers="nothing is stored in few bits",
                next_step="outsize.Quantize('nf4', ...) (--quantize nf4)",
            )


@final
@dataclass(frozen=True)
class Request(OptionRecord):
    """Says what is asked of a plan; None leaves the choice to the planner.

    `outsize.plan`, `fit` and the like take it as `request=`, and `parallelize`, which may be given a plan
    as well, as `plan=`. The fields that are used daily are keywords of these functions, too; a field is
    given once.
    """

    cluster: Annotated[str | Cluster | None, "'2xcpu'"] = None
    """The devices, by name ("2xcpu", "8xh100-80gb") or as a Cluster; "local" by default."""
    batch_size: Annotated[int | None, "32"] = None
    """The samples of the global batch; by default those of the example."""
    microbatches: Annotated[int | None, "2"] = None
    """Into how many microbatches the batch is split, for each replica."""
    stages: Annotated[int | None, "2"] = None
    """Into how many stages the model is split; searched by default."""
    chunks: Annotated[int | None, "2"] = None
    """How many stages are on each rank of the pipeline (virtual stages of the schedule "interleaved"); by
    default one or several, whichever is faster. `stages` is then the number of ranks."""
    schedule: Annotated[ScheduleName | Schedule | None, "'1f1b'"] = None
    """A name, "auto", or one of your own (`outsize.Schedule.from_csv(text)`), which fixes stages and
    microbatches."""
    optimizer: Annotated[str | None, "'adamw'"] = None
    """The optimizer whose states have to fit; "adamw" by default."""
    precision: Annotated[Precision | None, "'bf16-mixed'"] = None
    """The precision of training ("bf16-mixed" is autocast); "fp32" by default, which leaves the weights
    unchanged, so a model that is bf16 by itself needs no other value."""
    recompute: Annotated[Recompute | None, "'full'"] = None
    """"full" recomputes all activations in the backward, stage by stage, or block by block where a stage
    does not fit; "selective" those of some units, "offload" stores them on the host until their backward,
    "streamed" so what blocks receive and attention returns, and recomputes the rest block by block, "none"
    leaves them on the device."""
    weights: Annotated[Weights | None, "'sharded'"] = None
    """"sharded" or "resident" (whole during a step) over `dp_shard`; "host-optimizer" keeps the optimizer
    and its states on the host, "host" weights and gradients as well, "host-activations" also what stages
    send to each other; with "host-computed" the host computes some stages of frozen weights itself. By
    default the host is used where nothing else fits."""
    axes: Annotated[AxisSizes | None, "{'tp': 2}"] = None
    """Sizes of axes that give every stage several devices: {"dp_replicate": 2}, "dp_shard" (FSDP), "tp",
    "cp" (each sequence shared by its tokens), "ep" (each has some of the experts). Axes that are not
    named are searched where the devices leave any, but with "others": 1. "all" (the default) searches
    every axis, "pp" none."""
    exact: Annotated[bool | None, "True"] = None
    """True keeps to layouts whose results are bit-identical to one device's: pipelines, and where none
    fits, weights on the host. By default sums over replicas or tp may be rounded in another order, where
    a step is shorter for it by more than a prediction's error."""
    kernels: Annotated[Kernels | None, "'compiled'"] = None
    """The kernels whose seconds the plan tells: "eager" (the default) launches one for each op; "flash-3" has
    the attention that `torch.nn.attention.activate_flash_attention_impl("FA3")` takes; "compiled" are
    inductor's (`compiled=True`), "graphs" are replayed as graphs of the device (`device_graphs=True`),
    "compiled-graphs" both; "fused" and "fused-graphs" are those of a transformer engine, which outsize does
    not run: for trainings of other systems."""
    bn: Annotated[BatchNormMode | None, "'sync'"] = None
    """How BatchNorm keeps its running statistics (see Plan); "micro" by default."""
    sequence_parallel: Annotated[bool | None, "True"] = None
    """Whether tp also divides the activations between layers."""
    loss_pieces: Annotated[int | None, "8"] = None
    """In so many pieces of rows the loss is computed from the last product on, so that logits of all rows
    never exist at once; by default where that makes room for a faster plan (1: never)."""
    module_pieces: Annotated[int | None, "8"] = None
    """In so many pieces of rows modules are computed that work on each row and are wide inside, such as an
    MLP; by default where nothing else fits (1: never)."""
    slices: Annotated[int | None, "8"] = None
    """In so many slices the sequences of each microbatch go through the stages of a pipeline, which keep keys
    and values for those that follow; for causal attention, and searched with the axes by default (1:
    never)."""
    objective: Annotated[Objective | None, "'cost'"] = None
    """"cost" takes the plan with the least money per sample, on as many devices as are to be rented for
    it, instead of the fastest one; each device needs a price (`price_per_hour`)."""
    inference: Annotated[bool | None, "True"] = None
    """True plans forwards alone: no gradients, no states, nothing saved for a backward. A model of
    transformers that generates has its whole batch at once, and the cache of all tokens of the
    example."""
    loop: Annotated[bool | None, "True"] = None
    """True plans for a loop of one's own, as `outsize.split` does: all forwards, then the loss over the
    batch, then all backwards, with the outputs of the whole batch and their gradients on every device."""
    lora: Annotated[int | Lora | None, "8"] = None
    """Plans for the model with LoRA adapters of this rank, or as `outsize.Lora` says."""
    quantize: Annotated[str | Quantize | None, "'nf4'"] = None
    """Plans for the model with the weights of its linear layers frozen in few bits, "nf4" for example, or as
    `outsize.Quantize` says; adapters are put on afterwards."""
    recordings: Annotated[str | Path | Recordings | None, "'recordings'"] = None
    """The folder that keeps what recordings of the model have told, for the next question about it; or as
    `outsize.Recordings` says. By default nothing is kept; the commands keep it in the user's cache folder."""
    measured: Annotated[bool | ProfileSet | None, "True"] = None
    """True times the units on this machine; the result of `measure` uses its times, and only the
    microbatch sizes that it covers are considered. By default units are estimated."""
    progress: Annotated[Progress | None, "print"] = None
    """`progress(done, total)` is called while units are timed."""
    time_limit_s: Annotated[float | None, "60"] = None
    """After so many seconds the search ends with the best plan so far, whose gap says how far it may be from
    the best, and whose `why` that the limit ended it; without a plan by then, with the first one that it
    finds."""
    on_better: Annotated[Listener | None, "print"] = None
    """`on_better(found)` is called with each plan of the search that is better than all before: its `axes`,
    `step_s`, `gap`, and `after_s`, the seconds of the search."""

    def __post_init__(self) -> None:
        """Raises BadOption for a time limit that is none, and for values of another type."""
        super().__post_init__()
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise BadOption(
                f"time_limit_s={shown(self.time_limit_s)} makes no sense",
                numbers="it takes a number of seconds above 0",
                next_step="time_limit_s=60 (--time-limit 60)",
            )

    @classmethod
    def typed(cls, name: str) -> str:
        """Returns the field alone, since functions have it as a keyword, too."""
        return f"{name}={{}}"

    def reads(self, name: str, value: Any) -> bool:
        """Tells whether a count is a text, as of a file of settings: a PlanRequest makes it a number."""
        is_count = field_type(Request, name).kind == int | None
        return is_count and isinstance(value, str) and whole_number(value) is not None

    def joined(self, keywords: Mapping[str, Any]) -> Request:
        """Returns the request with the keywords that are fields of it and are given. Raises BadOption for
        a field that is given twice.
        """
        known, own = fields_of(Request), self.given()
        also = {name: value for name, value in keywords.items() if name in known and value is not None}
        if twice := [name for name in also if name in own]:
            raise BadOption(
                f"{twice[0]} is given twice: as a keyword, and in the request",
                numbers=f"{shown(also[twice[0]])}, and {shown(own[twice[0]])}",
                next_step=f"leave out one {twice[0]}",
            )
        return Request(**{**own, **also})

    def insist_on_none(self, function: str, names: Sequence[str], instead: str) -> None:
        """Raises BadOption for a field that the function cannot follow."""
        wrong = [name for name in names if name in self.given()]
        if wrong:
            raise BadOption(
                f"{wrong[0]} of the request is nothing that {function} can follow",
                numbers=f"{wrong[0]}={shown(getattr(self, wrong[0]))}",
                next_step=instead,
            )

    @property
    def layout(self) -> RequestOptions:
        """Returns the fields of which a PlanRequest is made, each axis by itself. Raises BadOption for
        axes."""
        named = RequestOptions.__annotations__.keys() - {"axes"}
        own = {name: value for name, value in self.given().items() if name in named}
        return cast("RequestOptions", own | axes_options(self.axes))


def mesh_asked(sizes: Mapping[str, Any], searched: AxisSearch | None) -> AxisSizes | None:
    """Returns the sizes of axes, and which of the others are searched, as one value of `axes`."""
    if not sizes:
        return searched
    return {**sizes, OTHERS: 1} if searched == NONE_SEARCHED else dict(sizes)


def axes_options(axes: Any) -> dict[str, Any]:
    """Returns the axes of a mesh as options of a PlanRequest. Raises BadOption for what is none."""
    if not isinstance(axes, Mapping):
        return {"axes": axes} if axes is not None else {}
    sizes: dict[Any, Any] = {name: size for name, size in axes.items() if size is not None}
    others = sizes.pop(OTHERS, None)
    for name in sizes:
        if name not in AXES:
            raise _no_axis(name)
    if others not in (None, 1):
        raise BadOption(
            f"axes={shown(axes)}: the other axes are searched, or are 1",
            numbers=f"{OTHERS}={shown(others)}",
            next_step=f"axes={{..., {OTHERS!r}: 1}}, or leave {OTHERS!r} out",
        )
    return {**sizes, "axes": NONE_SEARCHED} if others == 1 else sizes


def _no_axis(name: Any) -> BadOption:
    """Returns the error for an axis that there is not: the nearest one, or what other tools call so."""
    row, near = spoken(str(name)), nearest(str(name), AXES)
    if row is not None and row.option == "stages":
        step = "stages=2, which is an option beside axes="
    elif row is not None and row.option == "axes":
        step = f"axes={row.value}"
    else:
        step = f"axes={{{(near or AXES[0])!r}: 2}}"
    return BadOption(
        f"axes has {shown(name)}, which is no axis of a mesh",
        numbers=f"axes: {', '.join(AXES)}",
        next_step=step,
    )


RECORDS: Final = (Checkpoint, Clip, Compile, Loss, Lora, Quantize, Ranks, Recordings, Request, Watch)
"""Lists every record of options."""
for _record in RECORDS:
    FieldHelp.attach(_record)
