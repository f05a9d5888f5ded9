"""The scripts of examples/scripts as notebooks: their `# %%` cells, run in a real Jupyter kernel."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make test-integrations)"
)
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
# Its torchvision may have a compiled part that does not load; a user's imports by itself.
SETUP = f"""
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(SCRIPTS)!r})
os.environ["STEPS"] = "4"
"""


def cells(script: str) -> list[str]:
    """The cells of a script, without the text at its head."""
    return re.split(r"^# %%.*\n", (SCRIPTS / f"{script}.py").read_text(encoding="utf-8"), flags=re.M)[1:]


def shown(script: str) -> str:
    """The block of docs/examples.md with what a script prints."""
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {script} -->\n.*?```text\n(.*?)```\n<!-- end -->", page, re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("script", ["nanogpt"])
def test_a_script_runs_as_a_notebook(script: str, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    setup = SETUP + "from outsize.capture.models.imports import import_transformers; import_transformers()"
    code = [setup, *cells(f"{script}_outsize")]
    assert len(code) >= 4
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in code])
    where = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where).execute()
    outputs: list[Any] = [output for cell in notebook["cells"] for output in cell["outputs"]]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert printed == shown(script)
