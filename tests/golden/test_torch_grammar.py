"""A chain's schedule is torch's text to the letter (docs/decisions/0003): torch's own parser reads our files.

A skip edge's `@2` is ours. torch reads over it without a word, so such a schedule must not be handed to it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _Action

FILES = sorted((Path(__file__).parent / "schedules").glob("*.csv"))
CHAINS = [path for path in FILES if not path.stem.endswith(("skip", "tied"))]


def cells(path: Path) -> list[str]:
    """All actions of a schedule file."""
    return [cell for line in path.read_text(encoding="utf-8").splitlines() for cell in line.split(",")]


@pytest.mark.parametrize("path", CHAINS, ids=lambda path: path.stem)
def test_torch_reads_our_chains(path: Path) -> None:
    assert [str(_Action.from_str(cell)) for cell in cells(path)] == cells(path)


def test_torch_does_not_know_a_named_peer() -> None:
    assert any("@" in cell for path in FILES for cell in cells(path))
    assert str(_Action.from_str("0SEND_F3@2")) == "0SEND_F3"
