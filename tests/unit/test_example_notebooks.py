"""The notebooks in the repository are the examples' cells, and nothing else."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def convert() -> Any:
    """The module that writes the notebooks."""
    spec = spec_from_file_location("convert", EXAMPLES / "notebooks" / "convert.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_example_is_a_notebook(convert: Any) -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(source.stem for source in convert.SOURCES)
    assert len(NOTEBOOKS) >= 11
    for source in convert.SOURCES:
        path = EXAMPLES / "notebooks" / f"{source.stem}.ipynb"
        assert path.read_text(encoding="utf-8") == convert.notebook_of(source), "run convert.py"


def test_no_line_of_a_script_is_lost(convert: Any) -> None:
    for source in convert.SOURCES:
        script = source.read_text(encoding="utf-8")
        notebook = json.loads(convert.notebook_of(source))
        codes = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        lines = [line for code in codes for line in code.splitlines() if line[:1] not in ("", "%")]
        body = script.split("# %%", 1)[1].splitlines()[1:]
        assert lines == [line for line in body if line and not line.startswith("# %%")]
        assert len(codes) >= 3
