"""The public surface is a list in a file: a new or vanished name is a visible change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import outsize

NAMES = (Path(__file__).parents[1] / "golden" / "exports.txt").read_text(encoding="utf-8").split()


def test_the_public_names(golden: Callable[[str, str], None]) -> None:
    golden("exports.txt", "".join(f"{name}\n" for name in getattr(outsize, "__all__", ())))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(outsize, name)
    assert value if name == "__version__" else (value.__doc__ or "").strip()
    assert name in dir(outsize)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(outsize, "no_such_name")  # noqa: B009  the type checker knows that it is not there
