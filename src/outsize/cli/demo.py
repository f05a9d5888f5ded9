"""`outsize demo`: the library's main job on real data, start to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where plans, figures and reports go.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer steps and smaller models.")]


def demo(out: Out = Path("demo-out"), quick: Quick = False) -> None:
    """Plan, check and train a GPT-2 on real text and a ResNet-50 on real images, over two processes."""
    from outsize.demo import main

    code = main(out, quick=quick)
    if code:
        raise typer.Exit(code)
