"""A call of `parallelize` as records: each keyword is the record of its subject, whatever was typed for
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from torch import nn

from outsize.api.options import CaseOptions, ParallelizeOptions
from outsize.api.records import OF_A_SEARCH, Checkpoint, Clip, Compile, Loss, Ranks, Request
from outsize.errors import BadOption
from outsize.errors.arguments import path_of, shown
from outsize.ir.plan import Plan
from outsize.planner.advice.compilation import BACKEND
from outsize.run.weights.load import source_for
from outsize.run.weights.safetensors import WeightFiles
from outsize.train.context.options import EngineOptions, MakeOptimizer

AUTO: Final = "auto"  # is decided when the plan is known
_COMPILED: Final[dict[Any, str | None]] = {True: BACKEND, False: None, AUTO: None}


@final
@dataclass(frozen=True)
class AskedRun:
    """Holds what a call of `parallelize` asks for.

    There is a `plan`, or a `request` of one, which is then not empty; `example` has what belongs to the
    example batch.
    """

    plan: Plan | None
    request: Request
    example: CaseOptions
    loss: Loss
    clip: Clip
    ranks: Ranks
    checkpoint: Checkpoint
    compile: Compile
    optimizer: MakeOptimizer | None = None
    weight_files: str | Path | None = None
    callbacks: Sequence[Any] = ()

    @classmethod
    def of(cls, plan: Plan | Request | None, options: ParallelizeOptions) -> Self:
        """Reads the keywords.

        Raises BadOption for a plan that does not run or that an option contradicts, for what a run cannot
        follow, and for a file or a folder that is no path.
        """
        loss = Loss.of(options.get("loss_fn"), "loss_fn")
        example: CaseOptions = {
            "loss_fn": loss.function,
            "target": options.get("target"),
            "batch_dims": options.get("batch_dims"),
        }
        asked = cls(
            plan=None if isinstance(plan, Request) else plan,
            request=(plan if isinstance(plan, Request) else Request()).joined(_layout_of(options)),
            example=example,
            loss=loss,
            clip=Clip.of(options.get("clip_norm"), "clip_norm"),
            ranks=Ranks.of(options.get("devices"), "devices"),
            checkpoint=Checkpoint.of(options.get("resume"), "resume"),
            compile=Compile.of(options.get("compiled"), "compiled"),
            optimizer=options.get("optimizer"),
            weight_files=options.get("weight_files"),
            callbacks=options.get("callbacks", ()),
        )
        asked._check_plan()
        asked._insist_on_paths()
        return asked

    def engine_options(self, model: nn.Module, explain: Any) -> EngineOptions:
        """Returns the options that the engine reads, as far as they are known without a plan. Raises
        BadWeights and BadOption.
        """
        files, compiled = self.weight_files, self.compile.compiled
        return EngineOptions(
            loss_fn=self.loss.function,
            optimizer=self.optimizer,
            clip_norm=self.clip.norm,
            clipping=self.clip.clipping,
            counting=self.loss.counting,
            seed=self.ranks.seed,
            weights=None if files is None else source_for(model, WeightFiles(files)),
            batch_dims=self.example.get("batch_dims"),
            scaler=self.loss.scaler,
            explain=explain,
            captures=self.compile.captures,
            compiled=_COMPILED[compiled] if compiled in _COMPILED else str(compiled),
            callbacks=self.callbacks,
        )

    def _check_plan(self) -> None:
        """Checks that a plan is one that runs, and that no option contradicts it."""
        if not isinstance(self.plan, Plan | None):
            raise BadOption(
                f"plan is a {type(self.plan).__name__}, no Plan",
                next_step="plan=outsize.plan(...), or outsize.Plan.load('plan.json')",
            )
        self.request.insist_on_none(
            "parallelize",
            ("inference", "lora", "objective", "quantize", *OF_A_SEARCH),
            "outsize.plan(model, ..., request=...), and parallelize(model, ..., plan=that plan)",
        )
        if self.plan is None:
            return
        self.plan.check_runs()
        if planning := self.request.given():
            raise BadOption(
                f"{', '.join(planning)} cannot be used together with plan=, which has decided it",
                next_step="leave them out, or leave out plan=",
            )

    def _insist_on_paths(self) -> None:
        """Raises BadOption for an option that names a file or a folder and has no path."""
        files: Any = self.weight_files
        if isinstance(files, Mapping):
            raise BadOption(
                f"weight_files={shown(files)} is a state, no path",
                next_step="model.load_state_dict(state) before parallelize, on every rank",
            )
        for name, value, example in (
            ("resume", self.checkpoint.folder, "run"),
            ("weight_files", files, "model.safetensors"),
            ("offload_folder", self.ranks.offload_folder, "/scratch"),
            ("saves_in", self.checkpoint.saves_in, "run"),
        ):
            if value is not None:
                path_of(value, name, f"{name}={example!r}, or leave it out")


_IN_REQUEST: Final = ("cluster", "stages", "microbatches", "schedule", "axes")


def _layout_of(options: ParallelizeOptions) -> dict[str, Any]:
    """Returns the keywords that are fields of the request; `optimizer` is the run's."""
    return {name: value for name, value in options.items() if name in _IN_REQUEST}
