"""Golden files: `pytest tests/golden --update-golden` writes them anew, a plain run compares.
`--all` adds the tests marked `full`.

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
    parser.addoption(
        "--all", action="store_true", help="also what is marked `full`: all of the parity product"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, tests marked `full` are left out."""
    if config.getoption("--all"):
        return
    rare = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=rare)
    items[:] = [item for item in items if item not in rare]


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
