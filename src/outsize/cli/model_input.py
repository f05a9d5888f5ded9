"""Turns MODEL, --input and --batch into a model, an example batch and a loss; reads and writes a verb's
files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from outsize.cli.options import BATCH, check_not_planned
from outsize.errors import BadOption
from outsize.files.replace import replace_text

if TYPE_CHECKING:
    from torch import nn

    from outsize.api.options import LossOptions
    from outsize.api.records import Recordings, Request
    from outsize.capture.models.losses import Objective
    from outsize.ir.answers.request import LayoutOptions, PlanRequest
    from outsize.ir.plan import Plan
    from outsize.ir.profile import ProfileSet

OFF: Final = "off"
# What differs from one terminal to the next, and no model asks for.
_SESSION: Final = re.compile(
    r"(_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|DISPLAY|WINDOWID|STY|PS\d|LS_COLORS|COLORTERM|MAIL|HIST\w+|PYTEST_\w+|OUTSIZE_RECORDINGS)$"
    r"|(TERM|TMUX|SSH_|XDG_|DBUS_|GPG_|VTE_|VSCODE_|WAYLAND_|KONSOLE_|ITERM_|PROMPT|LESS)"
)


@final
@dataclass(frozen=True)
class ModelInput:
    """A model with its example batch: `model(*args, **kwargs)` is one forward.

    The objective's `loss_fn` is None when the output holds the loss.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objective: Objective

    @property
    def call(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Returns the first three arguments of the functions of outsize.api."""
        return self.model, self.args, self.kwargs

    @property
    def loss(self) -> LossOptions:
        """Returns the keyword arguments `loss_fn` and `target` of these functions."""
        return {"loss_fn": self.objective.loss_fn, "target": self.objective.target}

    def adapted(self, asked: Request) -> ModelInput:
        """Returns the input with the model in the format, and with the adapters, that are asked for. Raises
        BadOption.
        """
        from outsize.api.problem import adapted

        return replace(self, model=adapted(self.model, asked))


def make_model_input(
    spec: str, shape: str | None, batch: int, *, meta: bool = False, seed: int = 0
) -> ModelInput:
    """Builds MODEL and draws a random batch.

    Raises UnknownModel, ModelNotImportable, BadOption, ExampleRejected, NotCapturable.
    """
    from outsize.capture.models.load import example, load
    from outsize.capture.models.losses import Objective, objective

    model = load(spec, meta=meta, seed=seed)
    args, kwargs = example(model, shape, batch, seed, spec=spec)
    # With labels a transformers model returns its loss, which saves a capture.
    wanted = Objective() if "labels" in kwargs else objective(model, args, kwargs, seed)
    return ModelInput(model, args, kwargs, wanted)


def cache_folder(name: str) -> Path:
    """Returns a folder where this user's programs keep what can be made again (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outsize" / name


def recordings(asked: str | None) -> Recordings | None:
    """Returns where recordings are kept, which depend on all variables but those of a terminal's session."""
    from outsize.api.records import Recordings

    if asked == OFF:
        return None
    variables = (f"{name}={value}" for name, value in sorted(os.environ.items()) if not _SESSION.match(name))
    return Recordings(asked or cache_folder("recordings"), "\n".join(variables))


def is_model(target: object, module: bool = False) -> bool:
    """Tells whether TARGET is `provider:name`, unless a file has this very name."""
    return isinstance(target, str) and ":" in target and not module and not Path(target).exists()


def with_weights(spec: str, shape: str | None, batch: int, seed: int, size_bytes: int) -> ModelInput | None:
    """Returns the input with weights of `size_bytes`; None where they exceed a quarter of the free memory.

    Raises what make_model_input raises.
    """
    import psutil

    if 4 * size_bytes > psutil.virtual_memory().available:
        return None
    return make_model_input(spec, shape, batch, seed=seed)


def batch_size(batch: int | None, plan: Plan | None) -> int:
    """Returns --batch, or the plan's batch. Raises BadOption when the two disagree."""
    if plan is None:
        return BATCH if batch is None else batch
    if batch not in (None, plan.batch_size):
        raise BadOption(
            f"--batch {batch} is not the plan's batch",
            numbers=f"the plan was made for {plan.batch_size}",
            next_step=f"--batch {plan.batch_size}, or plan for {batch}: outsize plan MODEL --batch {batch}",
        )
    return plan.batch_size


def load_plan(path: Path | None) -> Plan | None:
    """Returns the plan of a file, to be read. Raises BadPlan."""
    from outsize.ir.plan import Plan

    return None if path is None else Plan.load(path)


def load_plan_to_run(path: Path | None) -> Plan | None:
    """Returns the plan of --plan. Raises BadPlan and UnsupportedPlan."""
    plan = load_plan(path)
    if plan is not None:
        plan.check_runs()
    return plan


def plan_or_request(
    path: Path | None, batch: int | None, layout: LayoutOptions
) -> tuple[Plan | None, PlanRequest]:
    """Returns the plan of --plan, if any, and the request that a run without one is planned by.

    Raises BadPlan, UnsupportedPlan, and BadOption for an option that the plan has already decided.
    """
    from outsize.api.options import request_of

    plan = load_plan_to_run(path)
    check_not_planned(plan, "--plan", layout)
    return plan, request_of(layout, batch_size(batch, plan))


def load_profile(path: Path | None) -> ProfileSet | None:
    """Returns the profile of --profile. Raises BadOption."""
    from outsize.ir.profile import ProfileSet

    return None if path is None else ProfileSet.load(path)


def write_text(path: Path, text: str) -> None:
    """Writes an output file. Raises BadOption when the place cannot be written to."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise BadOption(
            f"cannot write {path}", numbers=str(error.strerror), next_step=f"ls -ld {path.parent}"
        ) from error
