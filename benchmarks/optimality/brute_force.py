"""Question: are the exact searches over DAGs ever wrong where all answers can be tried?

Every convex split into at most 4 stages x every way to run each stage, of random DAGs of at most 9 units
(by hypothesis, the same ones every time): the step (memory by position, transfers) and the bottleneck.
The comparison is that of tests/benchmarks/test_convex.py and test_dag_partition.py, on more graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

TESTS = Path(__file__).parents[2] / "tests" / "unit"


def main(arguments: list[str]) -> int:
    """Raises AssertionError with the smallest graph on which they differ."""
    sys.path.insert(0, str(TESTS))
    from dag_planner import compare_bottleneck, compare_step, step_of
    from dag_problems import Problem, problems

    parser = argparse.ArgumentParser(description="The planner against all splits of small graphs")
    parser.add_argument("--graphs", type=int, default=10_000)
    options = parser.parse_args(arguments)
    seen: Counter[str] = Counter()

    def compare(problem: Problem) -> None:
        compare_step(problem)
        compare_bottleneck(problem)
        seen["graphs"] += 1
        seen["feasible"] += step_of(problem) < float("inf")

    quiet = settings(
        max_examples=options.graphs,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    begin = time.perf_counter()
    quiet(given(problems())(compare))()
    print(json.dumps({**seen, "different": 0, "seconds": round(time.perf_counter() - begin, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
