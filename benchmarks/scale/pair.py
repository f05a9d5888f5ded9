"""A rank of two: benchmarks/prediction/worker.py, which finds its cases in this folder's models.py."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    worker = Path(__file__).parent.parent / "prediction" / "worker.py"
    runpy.run_path(str(worker), run_name="__main__")
