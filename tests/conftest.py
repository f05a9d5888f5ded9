"""Golden files: `pytest tests/golden --update-golden` writes them anew, a plain run compares.

Look at `git diff tests/golden` before you commit an update: it is a change of behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/** instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("schedules/x.csv", text)` asserts that the file holds exactly this text."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}; write it with pytest --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare
