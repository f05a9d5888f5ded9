"""Reads how a user of a training framework says how a model is split: a plan, its file, or options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from outsize.errors import BadOption
from outsize.ir.plan import Plan

Split = Plan | str | Path | Mapping[str, Any]
"""A plan, its file, or options of `outsize.parallelize`: `{"stages": 2, "schedule": "1f1b"}`."""
_FRAMEWORKS: Final = frozenset(
    {"loss_fn", "target", "optimizer", "counting", "clip_norm", "scaler", "resume"}
)


def options_of(split: Split | None, others: Collection[str] = ()) -> dict[str, Any]:
    """Returns options of `parallelize`.

    Raises BadOption for those that the framework gives itself (`others` are more of them), BadPlan.
    """
    if split is None:
        return {}
    if isinstance(split, Plan):
        return {"plan": split}
    if not isinstance(split, Mapping):
        return {"plan": Plan.load(split)}
    own = sorted((_FRAMEWORKS | set(others)) & set(split))
    if own:
        raise BadOption(
            f"{', '.join(own)} of outsize= is what the training framework says itself",
            numbers=f"{len(own)} of {len(split)} options",
            next_step="leave it out, and use the framework's own argument",
        )
    return dict(split)
