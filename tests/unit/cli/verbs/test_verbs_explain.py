"""`outsize explain`: a text for every code, in the terminal's width."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outsize import errors

Outsize = Callable[..., Any]
CODES = sorted(
    kind.code
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.OutsizeError) and not kind.__subclasses__()
)


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained(outsize: Outsize, code: str) -> None:
    answer = outsize("explain", code)
    assert (answer.code, answer.err) == (0, "")
    assert code in answer.out.splitlines()[0]
    assert max(map(len, answer.out.splitlines())) <= 80


def test_json(outsize: Outsize) -> None:
    for word in ("e201", "NoFeasiblePlan"):
        assert json.loads(outsize("explain", word, "--json").out)["code"] == "E201"


def test_an_unknown_code_is_refused(outsize: Outsize) -> None:
    answer = outsize("explain", "E999")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("BadOption [E106]")
