"""Reads how a user of a training framework says how a model is split: a plan, its file, or options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from outsize.api.old_spellings import in_new_spelling
from outsize.api.options import ParallelizeOptions
from outsize.api.records import Checkpoint, Clip, Request, axes_options, fields_of
from outsize.axes.registry import GROUP, PAIRING
from outsize.errors import BadOption
from outsize.ir.plan import Axes, Plan

Split = Plan | Request | str | Path | Mapping[str, Any]
"""A plan, a request of one, a plan's file, or options of `outsize.parallelize`: `{"stages": 2,
"schedule": "1f1b"}`."""
_FRAMEWORKS: Final = frozenset(
    {"loss_fn", "target", "optimizer", "counting", "clip_norm", "scaler", "resume"}
)


OTHER_SPLITS: Final = ("deepspeed", "fsdp", "parallelism_config")
"""Arguments of transformers by which other libraries split a model."""


def options_of(split: Split | None) -> dict[str, Any]:
    """Returns options of `parallelize`.

    Raises BadOption for those that the framework gives itself, and for what says nothing; BadPlan.
    """
    if split is None:
        return {}
    if isinstance(split, Plan | Request):
        return {"plan": split}
    if isinstance(split, str | Path):
        return {"plan": Plan.load(split)}
    if not isinstance(split, Mapping):
        raise BadOption(
            f"{split!r} does not say how the model is split: it is no plan, no file of one, and no options",
            numbers=f"a {type(split).__name__}",
            next_step='outsize={"stages": 2}',
        )
    own = sorted(name for name, value in split.items() if _is_frameworks(name, value))
    if own:
        raise BadOption(
            f"{', '.join(own)} of outsize= is what the training framework says itself",
            numbers=f"{len(own)} of {len(split)} options",
            next_step="leave it out, and use the framework's own argument",
        )
    return in_new_spelling("parallelize", split, ParallelizeOptions.__annotations__)


def named_options(names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as a file or a command has them: the fields of a Request by their names, beside those
    of `parallelize`, or the file of a plan as `plan`.
    """
    others = dict(names)
    plan = others.pop("plan", None)
    if isinstance(plan, str | Path):
        return {"plan": Plan.load(plan), **others}
    asked = {name: others.pop(name) for name in fields_of(Request) if name in others}
    return {"plan": Request(**asked), **others} if plan is None else {"plan": plan, **asked, **others}


def _is_frameworks(name: str, value: Any) -> bool:
    """Tells whether the framework says it itself: of clipping the norm alone, of saving the folder."""
    if isinstance(value, Clip | Checkpoint):
        return fields_of(type(value))[0] in value.given()
    return name in _FRAMEWORKS


def insist_on_one_split(settings: Mapping[str, Any], names: Iterable[str] = OTHER_SPLITS) -> None:
    """Raises BadOption where the settings of a framework split the model by another library as well."""
    asked = [name for name in names if settings.get(name)]
    if asked:
        raise BadOption(
            f"{', '.join(asked)} splits the model by another library, as outsize does by its plan",
            numbers="; ".join(f"{name}={str(settings[name])[:60]!r}" for name in asked),
            next_step=f"leave {' and '.join(asked)} out; outsize's axes={{'dp_shard': 2}} shards weights, "
            "gradients and the optimizer's states over two processes",
        )


def batches_of_replica(options: Mapping[str, Any], batches: int, samples: int) -> int:
    """Returns how many of a loop's batches, of so many samples, each replica runs.

    Its share of them where the replicas that the user asks for run them apart and can have equally many; else
    all of them, each divided among the replicas; where its samples cannot be, no more than the share.
    """
    asked = Request.of(options.get("plan"), "plan")
    own = asked.joined({name: options[name] for name in options if name == "axes"})
    sizes = axes_options(own.axes)
    sizes.pop("axes", None)
    mesh = Axes(**sizes)
    shares = batches % mesh.replicas == 0 or samples % mesh.replicas
    return batches if mesh.used_of(PAIRING) or not shares else -(-batches // mesh.replicas)


def split_into(
    options: Mapping[str, Any], microbatches: int, batch_size: int, *, exact: bool = False
) -> dict[str, Any]:
    """Returns options without a plan, for the batch that the framework makes of so many microbatches.

    What the user says counts more. The layout is `exact` where no axis is asked for that adds up in
    another order.
    """
    asked = Request.of(options.get("plan"), "plan")
    own = asked.joined({name: options[name] for name in options if name in ("axes", "microbatches")})
    rounds = {axis.name for axis in GROUP if not axis.keeps_bits}
    wants_axes = isinstance(own.axes, Mapping) and not rounds.isdisjoint(map(str, own.axes))
    given = {
        "batch_size": batch_size if own.batch_size is None else own.batch_size,
        "exact": True if exact and own.exact is None and not wants_axes else own.exact,
    }
    chosen = {} if own.microbatches is not None else {"microbatches": microbatches}
    return {**chosen, **options, "plan": replace(asked, **given)}
