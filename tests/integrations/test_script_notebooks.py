"""The examples as notebooks, run in a real Jupyter kernel: they print what the scripts print."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from printed_digits import are_alike

MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make test-integrations)"
)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = EXAMPLES / "scripts"
# Its torchvision may have a compiled part that does not load; a user's imports by itself.
SETUP = f"""
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(SCRIPTS)!r})
os.environ["STEPS"] = "4"
"""


def executed(codes: list[str], folder: Path) -> list[str]:
    """What each of these cells prints, in one kernel."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    where = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3", resources=where).execute()
    return [
        "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")
        for cell in notebook["cells"]
    ]


def codes_of(name: str) -> list[str]:
    """The cells with code of a notebook in the repository."""
    import nbformat

    notebook: Any = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(script: str) -> str:
    """The block of docs/examples*.md with what a script prints."""
    page = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("examples*.md")))
    found = re.search(rf"<!-- {script} -->\n.*?```text\n(.*?)```\n<!-- end -->", page, re.S)
    assert found is not None
    return found[1]


def test_the_examples_print_as_notebooks_what_they_print_as_scripts(tmp_path: Path) -> None:
    """One kernel runs them one after the other, so that torch is imported once."""
    names = sorted(path.stem for path in EXAMPLES.glob("0*.py"))
    codes = {name: codes_of(name) for name in names}
    printed = executed([SETUP, *chain.from_iterable(codes.values())], tmp_path)[1:]
    for name in names:
        own, printed = printed[: len(codes[name])], printed[len(codes[name]) :]
        assert "".join(own) == (EXAMPLES / f"{name}.out").read_text(encoding="utf-8")


def test_scripts_run_as_notebooks(tmp_path: Path) -> None:
    """Each in a folder of its own, because it saves checkpoints; one kernel has them all, as above."""
    codes = [SETUP + "from outsize.capture.models.imports import import_transformers; import_transformers()"]
    begins = dict[str, int]()
    for script in ("nanogpt", "lora", "diffusion"):
        place, *cells = codes_of(f"{script}_outsize")
        assert place == "%cd -q ../scripts"
        assert len(cells) >= 3
        (tmp_path / script).mkdir()
        begins[script] = len(codes)
        codes += [f"%cd -q {tmp_path / script}", *cells]
    printed, ends = executed(codes, tmp_path), [*begins.values(), len(codes)][1:]
    for (script, begin), end in zip(begins.items(), ends, strict=True):
        assert are_alike("".join(printed[begin:end]), shown(script)), script
