"""The thinking wing plans on a laptop without torch: importing all of it loads no torch, even indirectly.

The floors contract sees only imports that are written down; this test sees what really gets loaded.
"""

from __future__ import annotations

from house import THINKING, modules_below, run_python

# Prints the first module whose import brings torch in, or nothing.
LOADER = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""


def first_that_loads_torch(names: list[str]) -> str:
    """The first of these modules that has torch loaded once it is imported; empty when none does."""
    return run_python(LOADER, *names)


def test_the_thinking_wing_loads_no_torch() -> None:
    names = modules_below(THINKING)
    assert len(names) >= 4 + len(THINKING)
    assert first_that_loads_torch(names) == ""


def test_the_proof_can_fail() -> None:
    names = ["outsize.errors", "outsize.ir.plan", "outsize.program.tape", "outsize.ir.graph"]
    assert first_that_loads_torch(names) == "outsize.program.tape"
