"""A QLoRA step of two layers over two processes: what each really holds is what the plan says.

The sizes of a 70B are in benchmarks/memory/results; these are an eighth. `make test-integrations` installs
bitsandbytes; without it the test is skipped.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "memory"


@pytest.mark.sample("full")  # test_quantized_plans.py has steps without recompute.
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_processes_hold_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """Messages lie in memory of both processes, which is counted where they are received."""
    pytest.importorskip("bitsandbytes")
    warnings.simplefilter("ignore")
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    benchmark: Any = importlib.import_module("qlora_slice")
    sizes = benchmark.Sizes(hidden=1024, vocabulary=1024, tokens=64, recompute=recompute)
    try:
        rows = benchmark.compare(sizes)
    finally:
        for name in {"qlora_slice", "meter"} & (set(sys.modules) - before):
            del sys.modules[name]
    assert [row.stage for row in rows] == [0, 1]
    ratios = [(row.real_bytes - row.sent_bytes) / row.predicted_bytes for row in rows]
    assert max(ratios) <= 1.02
    assert min(ratios) >= 0.97
