"""Implements `outsize demo`: the library's main job on real data, start to end."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen

Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where plans, figures and reports go.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer steps and smaller models.")]


def demo(out: Out = Path("demo-out"), quick: Quick = False, json: options.Json = False) -> None:
    """Plan, check and train a GPT-2 on real text and a ResNet-50 on real images, over two processes."""
    from outsize.cli.demo import main

    # Under --json the demo's own tables go to stderr.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        code = main(out, quick=quick)
    files = sorted(str(path) for path in out.rglob("*") if path.is_file())
    Screen(json).emit({"holds": code == 0, "out": str(out), "files": files})
    if code:
        raise typer.Exit(code)
