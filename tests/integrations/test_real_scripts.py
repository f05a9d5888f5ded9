"""The scripts of examples/scripts: on one device, split in one process and over two, and gone on elsewhere.

Each plain script computes what its split form computes, line by line and bit by bit; the split form begins
over two processes and goes on in one. docs/examples*.md show the difference of the two and what they print
(`--update-golden` writes it). The ranks are forks, which have the packages already.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
PAGES = sorted((ROOT / "docs").glob("examples*.md"))
NAMES = ("nanogpt", "classification", "segmentation", "timm_vit", "diffusion", "lora")
sys.path.append(str(ROOT / "tests" / "unit"))

from forked import in_forks  # noqa: E402
from printed_digits import are_alike  # noqa: E402

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    """Imports what the scripts import, also where torchvision's compiled part does not load."""
    from outsize.capture.models.imports import import_package, import_transformers

    import_transformers()
    for name in ("diffusers", "peft", "sklearn.datasets", "timm", "torchvision"):
        import_package(name, extra="zoo")


def run(folder: Path, script: str, steps: int, ranks: int = 1) -> tuple[str, Any]:
    """What rank 0 of a script prints in `folder`, and the weights that it leaves there."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        os.chdir(folder)
        os.environ["STEPS"] = str(steps)
        if ranks > 1:
            numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        sys.path.insert(0, str(SCRIPTS))
        warnings.simplefilter("ignore")
        with (folder / f"printed{number}").open("w") as file, contextlib.redirect_stdout(file):
            names = runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
        names["average"].swap()
        weights = (
            names["engine"].weights.full_state_dict() if "engine" in names else names["model"].state_dict()
        )
        if number == 0:
            torch.save(weights, folder / "weights")

    in_forks(folder, ranks, rank)
    return (folder / "printed0").read_text(), torch.load(folder / "weights")


@pytest.mark.parametrize("name", NAMES)
def test_the_split_script_is_the_plain_one(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plain, split = tmp_path / "plain", tmp_path / "split"
    for folder in (plain, split):
        folder.mkdir()
    printed, expected = run(plain, name, 4)
    begun, _ = run(split, f"{name}_outsize", 2, ranks=2)
    gone_on, weights = run(split, f"{name}_outsize", 4)
    lines = printed.splitlines()
    assert len(lines) == 5
    assert begun.splitlines()[:2] == lines[:2]
    assert gone_on.splitlines() == lines[2:]
    assert set(weights) == set(expected)
    assert [key for key in expected if not torch.equal(weights[key], expected[key])] == []
    in_page(name, printed, update=bool(request.config.getoption("--update-golden")))


def difference(name: str) -> str:
    """The lines of both scripts, in the form of diff blocks."""
    plain, split = ((SCRIPTS / f"{name}{kind}.py").read_text().splitlines() for kind in ("", "_outsize"))
    return "\n".join(list(difflib.unified_diff(plain, split, lineterm="", n=2))[2:])


def in_page(name: str, printed: str, *, update: bool) -> None:
    """Insists that a page shows the difference and what is printed."""
    path = next(path for path in PAGES if f"<!-- {name} -->" in path.read_text(encoding="utf-8"))
    page = path.read_text(encoding="utf-8")
    shown = re.compile(rf"<!-- {name} -->\n(?:.*?\n)??<!-- end -->", re.S)
    block = f"<!-- {name} -->\n```diff\n{difference(name)}\n```\n```text\n{printed}```\n<!-- end -->"
    found = shown.search(page)
    assert found is not None
    if update:
        path.write_text(page.replace(found[0], block), encoding="utf-8")
    else:
        assert are_alike(found[0], block)
