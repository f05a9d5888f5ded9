"""Problem: a pipeline does not fit as asked. Which relaxed settings are tried instead, in which order?

What may be given up is a record (`SettingChange`): from one setting it makes others, the nearest first. The
changes of a row are made one after the other, each from what those before it have made, and a table lists
rows by what they cost, the cheapest first. `sufficing` walks a table and knows none of its rows:

    (FINEST,)                       4 -> 8 microbatches
    (FINEST, DEVICES)               4 -> 8 microbatches, 2 -> 4 stages
    (FINEST, DEVICES, LEANER)       the same with adam8bit; the same with adafactor; the same with sgd

`outsize fit` has such tables (fit.py: CHANGES, CHANGES_OF_INFERENCE), and so has the nearest request that
fits (nearest.py: NEAREST). They are of pipelines, judged one by one without a search; what the search itself
relaxes, each with a search of its own, is search/relaxations.py. Oracle:
tests/unit/planner/fit/test_fit_changes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar, final

Setting = TypeVar("Setting")
AnySetting = TypeVar("AnySetting", contravariant=True)


class Feasibility(Protocol[AnySetting]):
    """Decides whether a setting fits the devices that are there, or as many as it says."""

    def fits(self, setting: AnySetting, /) -> bool:
        """Returns whether any cut of the setting fits."""
        ...


Judge = TypeVar("Judge", bound=Feasibility[Any])


@final
@dataclass(frozen=True, kw_only=True)
class SettingChange(Generic[Setting, Judge]):
    """Is one thing that may be given up of a setting.

    name      what is done instead, in words
    relaxes   the fields of the setting that it changes
    settings  what it makes of a setting, the nearest first: the setting itself where there is nothing to
              change, and nothing where a row with this change does not apply
    """

    name: str
    relaxes: frozenset[str]
    settings: Callable[[Setting, Judge], Iterable[Setting]]


def relaxed_settings(
    rows: Iterable[Sequence[SettingChange[Setting, Judge]]], asked: Setting, judge: Judge
) -> Iterator[Setting]:
    """Yields what the rows make of the setting that was asked for, row after row, each setting once."""
    yield from _distinct(setting for row in rows for setting in _made(row, asked, judge))


def sufficing(
    rows: Iterable[Sequence[SettingChange[Setting, Judge]]], asked: Setting, judge: Judge
) -> Iterator[Setting]:
    """Yields the relaxed settings that fit, the nearest first; one that contains all changes of an earlier
    one is left out.
    """
    sufficient: list[dict[str, Any]] = []
    for setting in relaxed_settings(rows, asked, judge):
        changed = changed_fields(setting, asked)
        if not any(earlier.items() <= changed.items() for earlier in sufficient) and judge.fits(setting):
            sufficient.append(changed)
            yield setting


def changed_fields(setting: Any, asked: Any) -> dict[str, Any]:
    """Returns the fields in which a setting differs from what was asked for, with their new values."""
    values = ((field.name, getattr(setting, field.name)) for field in fields(setting))
    return {name: value for name, value in values if value != getattr(asked, name)}


def _made(row: Sequence[SettingChange[Setting, Judge]], setting: Setting, judge: Judge) -> Iterator[Setting]:
    if not row:
        yield setting
        return
    for changed in row[0].settings(setting, judge):
        yield from _made(row[1:], changed, judge)


def _distinct(settings: Iterable[Setting]) -> Iterator[Setting]:
    known = set[Setting]()
    for setting in settings:
        if setting not in known:
            known.add(setting)
            yield setting
