"""The pages do what they say: their python blocks run in order, and print the text block that follows.

A diff block is run on both sides, before and after, and both sides must print the same.
`--update-golden` writes the text blocks again.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from outsize.capture.models.imports import import_transformers

ROOT = Path(__file__).parents[2]
PAGES = [
    "docs/batches.md",
    "docs/checkpoints.md",
    "docs/counts.md",
    "docs/from-pytorch-tutorial.md",
    "docs/integrations.md",
    "docs/scripts.md",
    "docs/split.md",
    "docs/tour.md",
    "docs/troubleshooting.md",
    "docs/weights.md",
]
BLOCK = re.compile(
    r"^```(?P<kind>python|diff)\n(?P<code>.*?)^```\n(?P<printed>```text\n(?P<text>.*?)^```\n)?", re.M | re.S
)


def side(diff: str, sign: str) -> str:
    """One side of a diff: the lines of both sides and those with this sign, without the first column."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in ("", " ", sign))


def printed_by(code: str, names: dict[str, Any]) -> str:
    """What the code prints; what it binds goes into `names`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "page", "exec"), names)
    return output.getvalue()


def run(page: str) -> str:
    """The page with the text that its blocks print now; what a block binds, the later ones see."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if "transformers" in page:
        import_transformers()  # also where torchvision's compiled part does not load

    def with_output(block: re.Match[str]) -> str:
        empty_lines = "\n" * page.count("\n", 0, block.start("code"))
        if block["kind"] == "diff":
            before = printed_by(empty_lines + side(block["code"], "-"), dict(names))
            output = printed_by(empty_lines + side(block["code"], "+"), names)
            assert before == output
        else:
            output = printed_by(empty_lines + block["code"], names)
        text = f"```text\n{output}```\n" if output else ""
        return f"```{block['kind']}\n{block['code']}```\n{text}"

    return BLOCK.sub(with_output, page)


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


def test_both_sides_of_the_diff_in_the_readme_print_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    project: Any = ModuleType("my_project")
    project.Net = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(0)
    project.batches = [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator))
        for _ in range(3)
    ]
    monkeypatch.setitem(sys.modules, "my_project", project)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    diffs = [block["code"] for block in BLOCK.finditer(readme) if block["kind"] == "diff"]
    assert len(diffs) == 1
    losses = printed_by(side(diffs[0], "+"), {})
    assert losses.count("loss") == len(project.batches)
    assert losses == printed_by(side(diffs[0], "-"), {})


def test_a_block_that_says_otherwise_is_seen() -> None:
    page = "```python\nx = 2\n```\nand\n```python\nprint(x + 1)\n```\n```text\n4\n```\n"
    assert run(page) == page.replace("4\n", "3\n")


def test_a_failing_block_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n")


def test_a_diff_whose_sides_print_something_else_is_seen() -> None:
    page = "```diff\n x = 2\n-print(x)\n+print(x + {more})\n```\n```text\n2\n```\n"
    assert run(page.format(more=0)) == page.format(more=0)
    with pytest.raises(AssertionError):
        run(page.format(more=1))
