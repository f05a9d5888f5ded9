"""The pages do what they say: their python blocks run in order, and print the text block behind them.

`--update-golden` writes the text blocks anew.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["docs/tour.md", "docs/weights.md"]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?P<said>```text\n(?P<text>.*?)^```\n)?", re.M | re.S)


def run(page: str) -> str:
    """The page with the text that its blocks print now; what a block binds, the later ones see."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def again(block: re.Match[str]) -> str:
        said = io.StringIO()
        line = page.count("\n", 0, block.start("code"))
        with contextlib.redirect_stdout(said):
            exec(compile("\n" * line + block["code"], "page", "exec"), names)
        text = f"```text\n{said.getvalue()}```\n" if said.getvalue() else ""
        return f"```python\n{block['code']}```\n{text}"

    return BLOCK.sub(again, page)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_says(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / name
    monkeypatch.chdir(tmp_path)
    text = run(page.read_text(encoding="utf-8"))
    if request.config.getoption("--update-golden"):
        page.write_text(text, encoding="utf-8")
    assert text == page.read_text(encoding="utf-8")


def test_a_block_that_says_otherwise_is_seen() -> None:
    page = "```python\nx = 2\n```\nand\n```python\nprint(x + 1)\n```\n```text\n4\n```\n"
    assert run(page) == page.replace("4\n", "3\n")


def test_a_failing_block_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n")
