"""Programs that these tests start are forks that have torch already; those marked `interpreters` are not."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forked(forked_python: None) -> None:
    """See tests/unit/forked_python.py."""
