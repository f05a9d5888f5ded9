"""Question: how many CPU seconds does an answer take from the model to the plan, recording included?

    python benchmarks/planning-time/whole.py            # the table: seconds, targets, plans
    python benchmarks/planning-time/whole.py --only plan-70b-16 --json

Each answer is the public function in a process of its own, on one core, in which Python's cycle collector
rests as in the command line. What counts is the CPU time of `outsize.plan` or `outsize.fit` on a model that
is on meta: recording at every microbatch size, what tensor parallelism divides, and the search. Imports and
the model itself are not in it (2 to 4 s). A busy machine makes CPU seconds longer, so a fixed loop is timed
beside each answer: `loop_s`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

from answers import ANSWERS, Answer

import outsize
from outsize.report.tables.plan_tables import optimum_text


def answered(answer: Answer) -> dict[str, Any]:
    """Asks the product in this process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    example = answer.build()
    gc.collect()
    gc.freeze()
    gc.disable()
    loop_s, begin = _loop_s(), time.process_time()
    ask: Any = getattr(outsize, answer.verb)
    found = ask(
        example.module,
        example.args,
        example.kwargs,
        **example.loss,
        cluster=answer.cluster,
        batch_size=answer.batch_size,
        precision=answer.precision,
        **answer.options,
    )
    cpu_s = time.process_time() - begin
    return {"cpu_s": cpu_s, "loop_s": (loop_s + _loop_s()) / 2, **_figures(found)}


def _figures(found: Any) -> dict[str, Any]:
    if isinstance(found, outsize.Plan):
        assert found.expected is not None, "the search has priced it"
        return {"axes": found.axes.used, "step_s": found.expected.step_s, "gap": found.expected.gap}
    return {"answer": found.answer, "changes": [change.options for change in found.changes]}


def _loop_s() -> float:
    """Returns the CPU seconds of a loop that is always the same."""
    begin = time.process_time()
    total = 0
    for n in range(2_000_000):
        total += n & 7
    return time.process_time() - begin


def timed(answer: Answer, most_s: int) -> dict[str, Any]:
    """Asks in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--only", answer.name, "--here"]
    row = {"answer": answer.name, "target_s": answer.target_s, "target_gap": answer.target_gap}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=most_s)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"ended after {most_s} s by the clock"}
    if ran.returncode:
        return {**row, "error": (ran.stderr.strip().splitlines() or ["no word"])[-1]}
    return {**row, "figures": json.loads(ran.stdout.splitlines()[-1])}


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    most_s = row["target_s"]
    head = f"{row['answer']:22s} {'no target    ' if most_s is None else f'target {most_s:4.0f} s'}  "
    if "error" in row:
        return f"{head}{row['error']}"
    figures = row["figures"]
    gap, most = figures.get("gap"), row["target_gap"]
    quick = most_s is None or figures["cpu_s"] <= most_s
    met = quick and (most is None or (gap is not None and gap <= most))
    told = [name for name in figures if name not in ("cpu_s", "loop_s") and (name != "gap" or is_told(gap))]
    rest = {name: figures[name] for name in told}
    verdict = "met" if met else "MISSED"
    return f"{head}{figures['cpu_s']:6.1f} s {verdict}, loop {figures['loop_s']:.2f} s, {rest}"


def is_told(gap: float | None) -> bool:
    """Returns whether a plan tells its gap: where the bound is too far away, it says nothing."""
    return bool(optimum_text(gap))


def main(arguments: list[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="How long does an answer take, recording included?")
    parser.add_argument("--only", help="one answer by name")
    parser.add_argument("--most-s", type=int, default=600, help="seconds by the clock, then it is ended")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process: what the others start")
    options = parser.parse_args(arguments)
    chosen = [answer for answer in ANSWERS if options.only in (None, answer.name)]
    if options.here:
        print(json.dumps(answered(chosen[0])))
        return 0
    rows: list[dict[str, Any]] = []
    for answer in chosen:
        rows.append(timed(answer, options.most_s))
        if not options.json:
            print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
