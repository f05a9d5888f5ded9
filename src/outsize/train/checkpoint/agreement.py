"""Exchanges facts between the ranks of a run, as JSON, and makes an error of one rank the error of all.

A rank that raised alone would leave the others in a collective until they time out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from outsize.errors import OutsizeError, RankFailed, error_of
from outsize.run.transport.control_messages import all_gather_json

T = TypeVar("T")


def shared_facts(group: dist.ProcessGroup | None, make: Callable[[], T]) -> list[T]:
    """Returns what each rank has made, by rank: values of JSON.

    An error of outsize that a rank raises is raised on all of them; where it is of another kind, the others
    raise RankFailed.
    """
    if group is None:
        return [make()]
    error: Exception | None = None
    card: dict[str, Any]
    try:
        card = {"made": make()}
    except Exception as raised:
        error = raised if isinstance(raised, OutsizeError) else _failed(group.rank(), raised)
        card = {"error": error.on_all_ranks().fields()}
        if error is not raised:
            error.__cause__ = raised
    cards = all_gather_json(card, group, "a checkpoint")
    failed = [each["error"] for each in cards if "error" in each]
    if error is not None:
        raise error
    if failed:
        raise error_of(failed[0])
    return [each["made"] for each in cards]


def _failed(rank: int, error: Exception) -> RankFailed:
    return RankFailed(
        f"rank {rank} could not take its part in a checkpoint",
        numbers=f"{type(error).__name__}: {error}",
        next_step="the traceback of that rank",
    )
