"""The exception tree in the docstring is the one in the code, and messages have their three parts."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter

import pytest

from outsize import errors
from outsize.errors import OutsizeError


def leaves() -> list[type[OutsizeError]]:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, OutsizeError)]
    return [c for c in found if not c.__subclasses__()]


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) +(E\d{3})", errors.__doc__ or ""))
    assert drawn == {c.__name__: c.code for c in leaves()}
    for c in leaves():
        parent = c.__mro__[1].__name__
        branch = (errors.__doc__ or "").split(f"── {parent}")[1].split("\n    ├── ")[0].split("\n    └── ")[0]
        assert c.__name__ in branch


def test_codes_are_unique() -> None:
    counts = Counter(c.code for c in leaves())
    assert [code for code, n in counts.items() if n > 1] == []


@pytest.mark.parametrize("kind", leaves(), ids=lambda c: c.__name__)
def test_a_message_says_what_numbers_and_next_step(kind: type[OutsizeError]) -> None:
    text = str(kind("it is too large", numbers="31 against 24", next_step="--stages 4"))
    assert text == f"{kind.__name__} [{kind.code}]: it is too large; 31 against 24. Next: --stages 4"
    assert kind.exit_code != 0


def test_an_error_travels_to_another_process() -> None:
    error = errors.BadOption("it is too large", numbers="31 against 24", next_step="--stages 4")
    error.shared = True
    found = errors.error_of(json.loads(json.dumps(error.fields())))
    assert type(found) is errors.BadOption
    assert (str(found), found.shared, found.next_step) == (str(error), True, "--stages 4")
    assert isinstance(errors.error_of({"code": "E999", "what": "odd"}), errors.RankFailed)
