"""Programs and ranks that these tests start are forks that have torch and outsize already; programs of tests
that are marked `interpreters` are not.
"""

from __future__ import annotations

import pytest
from forked_python import preload


@pytest.fixture(autouse=True)
def _forked(forked_python: None) -> None:
    """See tests/unit/forked_python.py. Ranks that outsize's own function forks find imported what each would
    import by itself: half a second in each, and more where nothing is compiled yet.
    """
    preload()
