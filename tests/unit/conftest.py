"""Makes the helpers of this folder (`splits`) importable from the tests below it, and shares a fixture."""

from __future__ import annotations

import sys

import pytest

from outsize.capture.kept import sources


@pytest.fixture
def no_files_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the modules that other tests of this process wrote and loaded: with them nothing is kept."""
    for name, path in list(sources.loaded_files()):
        found = sources.stamp(path)
        if found is None or found[1] > sources._BEGAN:
            monkeypatch.delitem(sys.modules, name)
