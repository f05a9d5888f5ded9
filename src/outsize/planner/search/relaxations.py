"""Where a request has no plan: which relaxed requests are tried instead, in which order?

What may be relaxed is a record (`Relaxation`) in an ordered tuple, the least loss first, and `relaxed` walks
the tuple: the first relaxed request that has a plan is the answer. The search has such a tuple
(search.py:RELAXATIONS), and so have losses in pieces (api/loss_pieces.py:RELAXATIONS), which capture the
model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from outsize.errors import OutsizeError

Asked = TypeVar("Asked")
Found = TypeVar("Found")


@final
@dataclass(frozen=True, kw_only=True)
class Relaxation(Generic[Asked, Found]):
    """Is one thing that may be given up of a request that has no plan.

    name       what is done instead, in words
    relaxes    the fields of the request that it changes
    answers    the refusals that it may help against; all others stay
    helps      whether it is worth a try, by what is known of the request without a search
    finds      the plan of the relaxed request; None where it has none either
    tells_why  whether the plan says which refusal it is the answer to
    """

    name: str
    relaxes: frozenset[str]
    answers: tuple[type[OutsizeError], ...]
    helps: Callable[[Asked], bool]
    finds: Callable[[Asked], Found | None]
    tells_why: bool = False


@final
@dataclass(frozen=True)
class Relaxed(Generic[Asked, Found]):
    """Is what a relaxed request found."""

    by: Relaxation[Asked, Found]
    found: Found


def relaxed(
    relaxations: Iterable[Relaxation[Asked, Found]], asked: Asked, refused: OutsizeError
) -> Relaxed[Asked, Found] | None:
    """Returns what the first relaxation finds that has a plan; None where none has."""
    for relaxation in relaxations:
        if isinstance(refused, relaxation.answers) and relaxation.helps(asked):
            found = relaxation.finds(asked)
            if found is not None:
                return Relaxed(relaxation, found)
    return None
