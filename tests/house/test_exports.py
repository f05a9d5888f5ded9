"""The public surface is a list in a file: a new or vanished name is a visible change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import outsize
from house import PACKAGE, modules_below, run_python

NAMES = (Path(__file__).parents[1] / "golden" / "exports.txt").read_text(encoding="utf-8").split()

# Imports the modules it is given, then prints the public names that are modules and not what they promise.
SHADOWED = """
import importlib, sys, types
for name in sys.argv[1:]:
    importlib.import_module(name)
import outsize
print(*[name for name in outsize.__all__ if isinstance(getattr(outsize, name), types.ModuleType)])
"""


def test_the_public_names(golden: Callable[[str, str], None]) -> None:
    golden("exports.txt", "".join(f"{name}\n" for name in outsize.__all__))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(outsize, name)
    assert value if name == "__version__" else (value.__doc__ or "").strip()


def test_names_that_were_not_used_yet_are_offered_by_tab() -> None:
    offered = run_python("import outsize; print(*dir(outsize))").split()
    assert [name for name in NAMES if name not in offered] == []


def test_no_package_stands_in_for_a_function() -> None:
    """Importing the package `outsize.capture` sets `outsize.capture`, which is also a public function."""
    folders = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert run_python(SHADOWED, *modules_below(sorted(folders))) == ""


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(outsize, "no_such_name")  # noqa: B009  the type checker knows that it is not there
