"""Stand-ins for slow imports: a fit does without the real modules, and who wants more of them gets them."""

from __future__ import annotations

import subprocess
import sys

_FIT = """
import sys, runpy
from outsize.cli.app import run
assert run(["fit", "torch.nn:Identity", "--input", "4", "--cluster", "2x12GB"]) in (0, 1, 2, 3)
real = sys.modules["torch._dynamo"]
assert type(real).__name__ == "_StandIn", real
import torch
compiled = torch.compile(lambda x: x * 2, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert type(sys.modules["torch._dynamo"]).__name__ == "module"
assert torch._dynamo.is_compiling() is False
import importlib.util
if importlib.util.find_spec("scipy"):
    from scipy.optimize import linear_sum_assignment, linprog
    assert linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]
"""


def test_a_fit_compiles_nothing_and_a_compile_still_compiles() -> None:
    done = subprocess.run([sys.executable, "-c", _FIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_python_may_ask_of_a_module_brings_nothing() -> None:
    ask = "from outsize.capture.standins import stand_in; stand_in(); import sys, torch._dynamo as d; "
    ask += "assert not hasattr(d, '__wrapped__'); assert type(d).__name__ == '_StandIn'"
    ask += "; assert d.disable(recursive=False)(len) is len and d.disable(len) is len"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
