"""Writes the examples as Jupyter notebooks: 01_toy.py becomes notebooks/01_toy.ipynb, and so on.

    python examples/notebooks/convert.py

A script's text at its head becomes the notebook's text, and each `# %%` begins a cell, as in editors that
open scripts as notebooks. Nothing but the scripts is written by hand; a test compares both. Scripts that
import what lies beside them get a first cell that goes there.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = (*sorted(HERE.parent.glob("0*.py")), *sorted(HERE.parent.glob("scripts/*_outsize.py")))
CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def cells_of(script: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of each cell of a script."""
    about = ast.get_docstring(ast.parse(script)) or ""
    titles_and_codes = CELL.split(script)[1:]
    cells = [("markdown", about)]
    for title, code in zip(titles_and_codes[::2], titles_and_codes[1::2], strict=True):
        cells += [("markdown", title.strip())] if title.strip() else []
        cells.append(("code", code.strip()))
    return cells


def notebook_of(source: Path) -> str:
    """The file of a script's notebook, without outputs (nbformat 4.5)."""
    cells: list[dict[str, Any]] = []
    head, *rest = cells_of(source.read_text(encoding="utf-8"))
    place = [("code", f"%cd -q ../{source.parent.name}")] if source.parent.name == "scripts" else []
    for number, (kind, text) in enumerate((head, *place, *rest)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        code = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append({**cell, **code, "source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for source in SOURCES:
        (HERE / f"{source.stem}.ipynb").write_text(notebook_of(source), encoding="utf-8")


if __name__ == "__main__":
    main()
