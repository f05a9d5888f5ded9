"""Defines the options of `outsize run`: a record for each subject, with all that it takes at once.

--nproc-per-node 2 --steps 20      what is typed daily: a flag each
--watch dashboard                  what is rare: one flag for each subject, whose keys `--watch help` explains
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, final

import typer
from pydantic import Field

from outsize.cli import options
from outsize.cli.flags import Brief, Key, KeyFlag
from outsize.cli.processes.launch import LaunchPlace
from outsize.errors import BadOption
from outsize.files.run_folders import RunFolder
from outsize.ir.answers.request import LayoutOptions
from outsize.ir.hardware.memory_share import checked_share
from outsize.train.checkpoint.interval import SaveInterval

STEPS: Final = 10
_PROCESSES: Final = "Processes (before a script)"
_COUNTS: Final = re.compile(r"[0-9]{1,6}(:[0-9]{1,6})?")
Nproc = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node",
        help="Processes: 2, gpu, cpu, auto, MIN:MAX.",
        metavar="COUNT",
        envvar="PET_NPROC_PER_NODE",
        show_envvar=False,
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="COUNT|LIST",
        help="So many devices, or cuda:0,cuda:1.",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
Module = Annotated[
    bool,
    typer.Option("-m", "--module", help="TARGET is a module, as in python -m.", rich_help_panel=_PROCESSES),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        min=1,
        metavar="N",
        show_default=False,
        help=f"AdamW steps on one batch (default: {STEPS}).",
    ),
]


# What each says at length is in the help of `outsize plan`.
Input = Annotated[options.Input, Brief("SHAPE", "Shape of one sample: 3x224x224, or 128.")]
Batch = Annotated[options.Batch, Brief("N", f"Samples (default: the plan's, else {options.BATCH}).")]
Plan = Annotated[options.PlanFile, Brief("FILE", "Run this plan instead of making one.")]
Weights = Annotated[options.WeightFiles, Brief("PATH", "safetensors to load (default: random).")]
Stages = Annotated[options.Stages, Brief("N", "Pipeline stages (default: one per device).")]
Microbatches = Annotated[options.Microbatches, Brief("N", "Parts that a batch is split into.")]
Schedule = Annotated[options.ScheduleOrFile, Brief("NAME", "1f1b, interleaved, ..., auto, or FILE.csv.")]
Axes = Annotated[options.Axes, Brief("AXIS=N,...", "Axes besides stages: tp=2,dp_shard=4.")]
Exact = Annotated[options.Exact, Brief("", "Only layouts with one device's very bits.")]
Json = Annotated[options.Json, Brief("", "One JSON document on stdout, nothing else.")]


@final
@dataclass(frozen=True)
class RankFlags:
    """Holds what each process of a run has, and what follows where it is lost."""

    memory_share: Annotated[
        float | None,
        Key(
            "0.5",
            "Plan with this share of each device's memory, and hold the run to it (default: all).",
        ),
    ] = None
    per_device: Annotated[
        int,
        Field(ge=1),
        Key(
            "2",
            "So many processes compute on each device, as if each had one of its own with an Nth of "
            "the memory: a layout for several devices, tried on one (NVIDIA: NCCL 2.30).",
        ),
    ] = 1
    on_oom: Annotated[
        Literal["raise", "replan"] | None,
        Key(
            "replan",
            "Where a device of a script's run has no memory: raise ends it (default), replan starts "
            "again by a plan for less of it, from the newest checkpoint (--max-restarts).",
        ),
    ] = None
    peer_copies: Annotated[
        str | None,
        Key(
            "30s",
            "Copy the run into this machine's memory after every 1 (steps), 30s or 10m: a worker that "
            "is killed loses no more (--max-restarts).",
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        Key(
            "FILE",
            "A file of mode 0600 with the same text on every machine, which seals what they tell each "
            "other (or OUTSIZE_RUN_SECRET).",
        ),
    ] = None

    def launched(self, place: LaunchPlace, *, is_model: bool) -> LaunchPlace:
        """Returns the place with what is asked for. Raises BadOption for what cannot be done."""
        how = replace(
            place.how,
            on_oom=_checked(self.on_oom, place.restarts, is_model=is_model),
            peer_copies=_checked_copies(self.peer_copies, place.restarts),
            secret_file=self.secret_file,
            memory_share=None if self.memory_share is None else checked_share(self.memory_share),
            ranks_per_device=self.per_device,
        )
        return replace(place, how=how)


@final
@dataclass(frozen=True)
class WatchFlags:
    """Who watches a run, and where it is shown."""

    hang_timeout: Annotated[
        float | None,
        Key(
            "60",
            "After so many seconds without progress (10, and five steps at least) ranks find out for "
            "whom they wait; 0: never.",
        ),
    ] = None
    on_hang: Annotated[
        Literal["end", "wait"] | None,
        Key(
            "wait",
            "What follows when a run cannot go on: end it (default), or wait.",
        ),
    ] = None
    verify: Annotated[
        int | None,
        Key(
            "100",
            "In every so many-th step ranks repeat each other's work while they idle, and compare bits; 0 "
            "(default): never.",
        ),
    ] = None
    dashboard: Annotated[
        bool,
        Key(
            "dashboard",
            "Serve a page and Prometheus metrics of the run on this machine alone; the address is shown.",
        ),
    ] = False
    dashboard_port: Annotated[
        int,
        Field(ge=0, le=65535),
        Key(
            "9400",
            "The port of the dashboard (0: a free one).",
        ),
    ] = 0

    @property
    def beside(self) -> Callable[[RunFolder | None], AbstractContextManager[None]]:
        """Returns what goes on beside the run in the launcher: the server of its page, if asked for."""
        return _dashboard(self.dashboard_port) if self.dashboard or self.dashboard_port else _nothing


@final
@dataclass(frozen=True)
class ProcessFlags:
    """How many processes there are on this machine."""

    nproc_per_node: Nproc = None
    devices: Devices = None
    module: Module = False

    @property
    def is_counted(self) -> bool:
        """Tells whether `--devices` is a number of processes, or a range of it."""
        return self.devices is not None and _COUNTS.fullmatch(self.devices) is not None

    @property
    def count(self) -> str | None:
        """Returns the number of processes, or its range. Raises BadOption where two options say it."""
        if self.is_counted and self.nproc_per_node is not None:
            raise BadOption(
                "--devices and --nproc-per-node both say how many processes there are",
                numbers=f"--devices {self.devices}, --nproc-per-node {self.nproc_per_node}",
                next_step=f"--devices {self.devices}",
            )
        return self.devices if self.is_counted else self.nproc_per_node

    @property
    def places(self) -> tuple[str, ...]:
        """Returns the devices that one process uses; none where processes are counted."""
        return tuple(self.devices.split(",")) if self.devices and not self.is_counted else ()


@final
@dataclass(frozen=True)
class TrainingFlags:
    """Holds what a MODEL is trained on."""

    steps: Steps = STEPS
    input: Input = None
    batch: Batch = None


@final
@dataclass(frozen=True)
class PlanFlags:
    """The plan of a MODEL run, or what is asked of one."""

    plan: Plan = None
    weights: Weights = None
    stages: Stages = None
    microbatches: Microbatches = None
    schedule: Schedule = None
    axes: Axes = None
    exact: Exact = False

    @property
    def layout(self) -> LayoutOptions:
        """Returns what is asked of a plan. Raises BadOption and InvalidSchedule."""
        asked: LayoutOptions = {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": options.schedule_or_file(self.schedule),
            "exact": self.exact if self.plan is None else None,
        }
        return asked | options.MeshFlags(self.axes).layout


@final
@dataclass(frozen=True)
class TrainFlags:
    """How a MODEL is trained, where the defaults will not do."""

    lr: Annotated[
        float,
        Key(
            "0.01",
            "Learning rate of AdamW (default: 0.001).",
        ),
    ] = 0.001
    seed: Annotated[
        int,
        Key(
            "1",
            "Seed of the weights and of the random batch (default: 0).",
        ),
    ] = 0
    measure: Annotated[
        bool,
        Key(
            "measure",
            "Time the units on this machine first instead of estimating them.",
        ),
    ] = False


@final
@dataclass(frozen=True)
class ReportFlags:
    """Holds what the run of a MODEL writes."""

    file: Annotated[
        Path | None,
        Key(
            "report.html",
            "Write an offline HTML report.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        Key(
            "trace.json",
            "Write a timeline for ui.perfetto.dev.",
        ),
    ] = None


@final
@dataclass(frozen=True)
class SaveFlags:
    """Where and how often a MODEL run saves itself."""

    folder: Annotated[
        Path | None,
        Key(
            "run",
            "Save the run in this folder, and go on from the newest checkpoint there.",
        ),
    ] = None
    every: Annotated[
        str | None,
        Key(
            "10m",
            "Save every 500 (steps), 90s, 10m or 2h, and at the end.",
        ),
    ] = None
    keep: Annotated[
        int | None,
        Field(ge=1),
        Key(
            "3",
            "How many checkpoints stay (default: all).",
        ),
    ] = None

    def check(self) -> None:
        """Raises BadOption for an interval that makes no sense, or where there is no folder to save in."""
        if self.folder is None and (self.every is not None or self.keep is not None):
            key, value = ("every", self.every) if self.every is not None else ("keep", self.keep)
            raise BadOption(
                f"{key} is for checkpoints, and there is no folder for them",
                numbers=f"--checkpoint {key}={value}",
                next_step=f"--checkpoint DIR,{key}={value}",
            )
        if self.every is not None:
            SaveInterval.parse(self.every)


Ranks = Annotated[
    RankFlags, KeyFlag("--ranks", RankFlags, "memory_share=0.5, ... (--ranks help).", panel=_PROCESSES)
]
Watch = Annotated[
    WatchFlags,
    KeyFlag("--watch", WatchFlags, "dashboard, ... (--watch help).", panel=_PROCESSES),
]
Saves = Annotated[
    SaveFlags,
    KeyFlag("--checkpoint", SaveFlags, "Save here, go on from here: run,every=10m.", plain="DIR"),
]
Train = Annotated[TrainFlags, KeyFlag("--train", TrainFlags, "lr=0.01,seed=1,measure (--train help).")]
Report = Annotated[
    ReportFlags, KeyFlag("--report", ReportFlags, "HTML report; a timeline: trace=t.json.", plain="FILE")
]


def _nothing(_: RunFolder | None) -> AbstractContextManager[None]:
    return nullcontext()


def _dashboard(port: int) -> Callable[[RunFolder | None], AbstractContextManager[None]]:
    """Returns what serves the run's page. Raises BadOption."""
    from outsize.ops.publish import dashboard

    return dashboard.dashboard(port, os.environ.get(dashboard.TOKEN), dashboard.say)


def _checked(on_oom: str | None, max_restarts: int, *, is_model: bool) -> str | None:
    """Returns what follows where a device has no memory. Raises BadOption for what cannot be done."""
    if on_oom == "replan" and is_model:
        raise BadOption(
            "--ranks on_oom=replan is for scripts, whose parallelize(resume=FOLDER) says where checkpoints "
            "are",
            next_step="leave it out, or outsize run --max-restarts 3 --ranks on_oom=replan train.py",
        )
    if on_oom == "replan" and not max_restarts:
        raise BadOption(
            "--ranks on_oom=replan starts the run again, which --max-restarts has to allow",
            next_step="--max-restarts 3",
        )
    return on_oom


def _checked_copies(interval: str | None, max_restarts: int) -> str | None:
    """Returns how often the run copies itself into memory. Raises BadOption for what makes no sense."""
    if interval is None:
        return None
    if not max_restarts:
        raise BadOption(
            "copies in memory are for a run that starts again, which --max-restarts has to allow",
            next_step="--max-restarts 3",
        )
    SaveInterval.parse(interval)
    return interval
