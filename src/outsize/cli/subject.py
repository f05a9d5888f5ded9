"""What a verb works on: MODEL, --input and --batch made into a model, an example batch and a loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from outsize.cli.options import BATCH
from outsize.errors import BadOption

if TYPE_CHECKING:
    from torch import nn

    from outsize.capture.losses import Objective
    from outsize.ir.plan import Plan
    from outsize.ir.profile import ProfileSet


@final
@dataclass(frozen=True)
class Subject:
    """`model(*args, **kwargs)` is one forward; `loss_fn` is None when the output holds the loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objective: Objective

    @property
    def call(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The first three arguments of the functions of outsize.api."""
        return self.model, self.args, self.kwargs

    @property
    def loss(self) -> dict[str, Any]:
        """Their keyword arguments `loss_fn` and `target`."""
        return {"loss_fn": self.objective.loss_fn, "target": self.objective.target}


def make_subject(spec: str, shape: str | None, batch: int, *, meta: bool = False, seed: int = 0) -> Subject:
    """Build MODEL and draw a random batch.

    Raises: UnknownModel, ModelNotImportable, BadOption, ExampleRejected, NotCapturable.
    """
    from outsize.capture.losses import Objective, objective
    from outsize.capture.models import example, load

    model = load(spec, meta=meta, seed=seed)
    args, kwargs = example(model, shape, batch, seed, spec=spec)
    # With labels a transformers model returns its loss: one capture less.
    wanted = Objective() if "labels" in kwargs else objective(model, args, kwargs, seed)
    return Subject(model, args, kwargs, wanted)


def with_weights(spec: str, shape: str | None, batch: int, seed: int, size_bytes: int) -> Subject | None:
    """The same with weights of `size_bytes`; None where they are more than a quarter of the free memory.

    Raises as make_subject.
    """
    import psutil

    if 4 * size_bytes > psutil.virtual_memory().available:
        return None
    return make_subject(spec, shape, batch, seed=seed)


def batch_size(batch: int | None, plan: Plan | None) -> int:
    """--batch, or the plan's. Raises BadOption when the two disagree."""
    if plan is None:
        return BATCH if batch is None else batch
    if batch not in (None, plan.batch_size):
        raise BadOption(
            f"--batch {batch} is not the plan's batch",
            numbers=f"the plan holds for {plan.batch_size}",
            next_step=f"--batch {plan.batch_size}, or plan for {batch}: outsize plan MODEL --batch {batch}",
        )
    return plan.batch_size


def load_plan(path: Path | None) -> Plan | None:
    """The plan of a file, to be read. Raises BadPlan."""
    from outsize.ir.plan import Plan

    return None if path is None else Plan.load(path)


def load_plan_to_run(path: Path | None) -> Plan | None:
    """The plan of --plan. Raises BadPlan, and WhatIfPlan for one that this version does not run."""
    plan = load_plan(path)
    if plan is not None:
        plan.check_runs()
    return plan


def load_profile(path: Path | None) -> ProfileSet | None:
    """The profile of --profile. Raises BadOption."""
    from outsize.ir.profile import ProfileSet

    return None if path is None else ProfileSet.load(path)


def write_text(path: Path, text: str) -> None:
    """Write an output file. Raises BadOption when the place cannot be written to."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadOption(
            f"cannot write {path}", numbers=str(error.strerror), next_step=f"ls -ld {path.parent}"
        ) from error
