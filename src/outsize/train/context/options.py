"""Options of an engine besides its model and its plan; `outsize.parallelize` documents each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, final, get_args

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from outsize.capture.recording.fallbacks import LossFn
from outsize.errors import BadOption
from outsize.errors.arguments import insist_on_whole_number
from outsize.errors.words import value_here
from outsize.ir.answers.compilation import Compilation, GraphUse
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.graph import Form
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.run.weights.source import WeightSource
from outsize.train.batch.batch_dims import Asked
from outsize.train.batch.checks import insist_on_norm
from outsize.train.batch.loss_weights import FROM_LOSS, Counting
from outsize.train.context.callback import Callback
from outsize.train.variants.known_tapes import KnownTapes
from outsize.train.variants.variant import KEPT

Clipping = Literal["exact", "speculative"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Explain = Callable[[Timeline, Plan, Sequence[str]], Utilisation]


@final
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is trained, besides what its plan says.

    `counting` says whether a microbatch weighs by its samples or its tokens, by default as the loss does, or
    whether losses of microbatches are added as they are ("sum").
    `explain` makes the report of a measured step. `captures` recorded programs stay in memory. `compiled` is
    a backend of torch.compile; None runs the stages as they are. `compilation` is how compiled="auto" was
    decided: then a stage that cannot be compiled runs as it is. `device_graphs` says whether stages are
    recorded as graphs of their devices, and why. `on_out_of_memory` is called where a device
    has no memory for a step, and returns what follows, which the error says. `callbacks` are told of steps.
    `known` are tapes of the model that were recorded for its plan.
    """

    loss_fn: LossFn | None = None
    optimizer: MakeOptimizer | None = None
    clip_norm: float | None = None
    clipping: Clipping = "exact"
    counting: Counting = FROM_LOSS
    seed: int = 0
    weights: WeightSource | None = None
    batch_dims: Asked | None = None
    scaler: GradScaler | None = None
    explain: Explain | None = None
    captures: int = KEPT
    compiled: str | None = None
    compilation: Compilation | None = None
    device_graphs: GraphUse | None = None
    on_out_of_memory: Callable[[], str] | None = None
    callbacks: Sequence[Callback] = ()
    known: KnownTapes = field(default_factory=KnownTapes, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises BadOption for values with which nothing could be trained, or nothing would stay."""
        insist_on_whole_number(self.captures, "captures", 1, f"captures={KEPT}, the default")
        insist_on_whole_number(self.seed, "seed", 0, "seed=0, the default")
        if self.clip_norm is not None:
            insist_on_norm("clip_norm", self.clip_norm, "clip_norm=1.0, or leave it out to clip nothing")
        self._check_callbacks()
        if self.counting not in get_args(Counting):
            here = value_here("counting", self.counting) or FROM_LOSS
            raise BadOption(
                f"counting={self.counting!r} says nothing",
                numbers=f"known: {', '.join(get_args(Counting))}",
                next_step=f"outsize.Loss(..., counting={here!r})",
            )
        scaler: Any = self.scaler
        if not (scaler is None or (hasattr(scaler, "unscale_") and hasattr(scaler, "update"))):
            raise BadOption(
                f"scaler={scaler!r} is a {type(scaler).__name__}, no GradScaler",
                next_step='outsize.Loss(..., scaler=torch.amp.GradScaler("cuda")), or none: bf16 needs none',
            )

    def _check_callbacks(self) -> None:
        """Raises BadOption for what cannot be told of a step."""
        given: Any = self.callbacks
        if given is None:
            raise BadOption(
                "callbacks is None, no list of callbacks",
                next_step="callbacks=[MyCallback()], or leave it out",
            )
        wrong = (
            next((one for one in given if isinstance(one, type) or not hasattr(one, "on_step")), None)
            if isinstance(given, Iterable)
            else given
        )
        if wrong is not None:
            raise BadOption(
                f"callbacks has a {type(wrong).__name__} that cannot be told of steps",
                next_step="callbacks=[MyCallback()], with class MyCallback(outsize.Callback) and its on_step",
            )


DEFAULTS: Final = EngineOptions()


def insist_on_backend(backend: str | None, form: Form) -> None:
    """Raises BadOption for a backend that torch lacks, or where there is no stage function to compile."""
    if backend is not None and form == "modules":
        raise BadOption(
            f"compiled={backend!r} is for stages, and this model runs by modules, in its own Python",
            next_step="module.compile() on the modules that are worth it",
        )
    known = () if backend is None else torch.compiler.list_backends(exclude_tags=())
    if backend is not None and backend not in known:
        raise BadOption(
            f"torch.compile has no backend {backend!r}",
            numbers=f"it has {', '.join(known)}",
            next_step="compiled='inductor', or 'aot_eager', which is bit-identical",
        )


@final
@dataclass(frozen=True, slots=True)
class RankOptions:
    """Where the ranks of an engine compute, what they read, and where they store what the host keeps.

    `places` are the devices of the ranks of one process; None leaves them where the model is. With
    `own_batches` each replica passes its own samples alone. `offload_folder` has files in place of memory.
    """

    places: tuple[str, ...] | None = None
    own_batches: bool = False
    offload_folder: str | Path | None = None
