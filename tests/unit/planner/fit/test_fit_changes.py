"""Relaxed settings: in the order of rows, each once, and what fits without the changes of an earlier one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, final

import pytest

from outsize.planner.fit import fit, nearest
from outsize.planner.fit.changes import SettingChange, changed_fields, relaxed_settings, sufficing
from outsize.planner.partition.feasibility import ChainFeasibility


@final
@dataclass(frozen=True)
class Place:
    """A setting of two numbers."""

    x: int = 0
    y: int = 0


@final
@dataclass(frozen=True)
class Known:
    """Fits these places, and writes down which it was asked about."""

    fitting: Collection[Place]
    asked: list[Place]

    def fits(self, place: Place) -> bool:
        self.asked.append(place)
        return place in self.fitting


Change = SettingChange[Place, Known]
X: Change = SettingChange(
    name="x", relaxes=frozenset({"x"}), settings=lambda at, _: [replace(at, x=value) for value in (1, 2)]
)
Y: Change = SettingChange(
    name="y", relaxes=frozenset({"y"}), settings=lambda at, _: [replace(at, y=at.x + 10)]
)
NEVER: Change = SettingChange(name="never", relaxes=frozenset(), settings=lambda *_: [])


def test_a_row_begins_where_its_change_before_has_ended() -> None:
    judge = Known((), [])
    made = relaxed_settings([(), (X,), (X, Y), (X, NEVER), (X,)], Place(), judge)
    assert list(made) == [Place(), Place(1), Place(2), Place(1, 11), Place(2, 12)]


def test_what_contains_an_earlier_sufficient_change_is_left_out_unasked() -> None:
    judge = Known((Place(2), Place(2, 12), Place(1, 11)), [])
    assert list(sufficing([(X,), (X, Y)], Place(), judge)) == [Place(2), Place(1, 11)]
    assert judge.asked == [Place(1), Place(2), Place(1, 11)]


def test_nothing_is_tried_behind_the_first_that_fits_unless_it_is_asked_for() -> None:
    judge = Known((Place(1),), [])
    assert next(sufficing([(X,), (X, Y)], Place(), judge)) == Place(1)
    assert judge.asked == [Place(1)]


TABLES: list[tuple[type, tuple[tuple[SettingChange[Any, Any], ...], ...]]] = [
    (fit.Setting, fit.ASKED),
    (fit.Setting, fit.CHANGES),
    (fit.Setting, fit.CHANGES_OF_INFERENCE),
    (fit.Setting, fit.MORE_DEVICES),
    (ChainFeasibility, nearest.NEAREST),
]


@pytest.mark.parametrize(("setting", "rows"), TABLES)
def test_a_change_relaxes_fields_of_its_setting(
    setting: type, rows: tuple[tuple[SettingChange[Any, Any], ...], ...]
) -> None:
    names = {field.name for field in fields(setting)}
    for change in {change.name: change for row in rows for change in row}.values():
        assert change.relaxes
        assert change.relaxes <= names


def test_what_changes_the_numbers_of_a_training_comes_last() -> None:
    numbers = {"batch_size", "optimizer", "precision"}
    changes_numbers = [any(change.relaxes & numbers for change in row) for row in fit.CHANGES]
    assert changes_numbers == sorted(changes_numbers)
    assert set(changes_numbers) == {False, True}
    assert changed_fields(Place(1, 2), Place(1, 3)) == {"y": 2}
