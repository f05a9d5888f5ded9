"""Reads how a user of a training framework says how a model is split: a plan, its file, or options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outsize.errors import BadOption
from outsize.ir.plan import Plan

Split = Plan | str | Path | Mapping[str, Any]
"""A plan, its file, or options of `outsize.parallelize`: `{"stages": 2, "schedule": "1f1b"}`."""
_FRAMEWORKS: Final = frozenset(
    {"loss_fn", "target", "optimizer", "counting", "clip_norm", "scaler", "resume"}
)


def options_of(split: Split | None) -> dict[str, Any]:
    """Returns options of `parallelize`.

    Raises BadOption for those that the framework gives itself, and for what says nothing; BadPlan.
    """
    if split is None:
        return {}
    if isinstance(split, Plan):
        return {"plan": split}
    if isinstance(split, str | Path):
        return {"plan": Plan.load(split)}
    if not isinstance(split, Mapping):
        raise BadOption(
            f"{split!r} does not say how the model is split: it is no plan, no file of one, and no options",
            numbers=f"a {type(split).__name__}",
            next_step='outsize={"stages": 2}',
        )
    own = sorted(_FRAMEWORKS & set(split))
    if own:
        raise BadOption(
            f"{', '.join(own)} of outsize= is what the training framework says itself",
            numbers=f"{len(own)} of {len(split)} options",
            next_step="leave it out, and use the framework's own argument",
        )
    return dict(split)
