"""`import outsize` stays light: none of the heavy packages comes along.

Nothing is timed here (benchmarks/ measures the seconds); what is not loaded cannot cost time.
"""

from __future__ import annotations

import pytest

from house import run_python

HEAVY = ("transformers", "torchvision", "matplotlib", "rich", "typer", "torch.distributed.pipelining")
LOADED = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"


def heavy_after(code: str) -> list[str]:
    """The heavy packages that are loaded once `code` has run in a fresh interpreter."""
    return run_python(f"{code}\n{LOADED}").split()


@pytest.mark.parametrize(
    "code",
    [
        "import outsize",
        "import outsize\nfor name in getattr(outsize, '__all__', ()): getattr(outsize, name)",
        "import outsize.train.engine.engine",
    ],
    ids=["outsize", "every public name", "engine"],
)
def test_importing_brings_nothing_heavy(code: str) -> None:
    assert heavy_after(code) == []


def test_the_help_loads_no_torch() -> None:
    run = """
import sys
sys.argv = ["outsize", "--help"]
from outsize.cli import main
try:
    main()
finally:
    print("loaded:", *{name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "outsize"})
"""
    assert set(run_python(run).rpartition("loaded:")[2].split()) & {"torch", "numpy"} == set()


def test_the_proof_can_fail() -> None:
    assert heavy_after("import outsize, rich, torch.distributed.pipelining") == [
        "rich",
        "torch.distributed.pipelining",
    ]
