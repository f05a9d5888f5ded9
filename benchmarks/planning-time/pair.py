"""Question: which part of an older build's CPU seconds does an answer take, and is its plan as good?

    python benchmarks/planning-time/pair.py OLD NEW                    # two source trees, all answers
    python benchmarks/planning-time/pair.py OLD NEW --only fit-70b-16 plan-8b-8 --repeats 1

OLD and NEW are worktrees of this repository (`git worktree add --detach /tmp/old 0928b1ac`). Both are asked
in turn, old, new, old, new, each answer in a process of its own, on one core, nothing kept from run to run:
what a busy machine adds, both have. The questions are those of answers.py. Seconds are the CPU time of
`outsize.plan` or `outsize.fit`, recording included; imports and the model on meta are not in it.

A plan is the `same` when all that it decides is equal. Where it is another one, the new build prices the
plan of the old one as well: `better` and `worse` compare step seconds under equal prices.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from answers import ANSWERS, Answer

HERE: Final = Path(__file__).resolve()
# What a plan says about itself, and does not decide.
TOLD: Final = ("version", "expected", "alternatives", "why")
# Steps within this part of each other are equally long.
EQUAL: Final = 1e-3


def answered(answer: Answer, plan_path: Path | None) -> dict[str, Any]:
    """Asks the build that this process imports; a plan is written to `plan_path`."""
    import outsize

    ask: Any = getattr(outsize, answer.verb)  # Imports what it needs, which is not in the seconds.
    example = answer.build()
    gc.collect()
    gc.freeze()  # As `outsize plan` does: nearly all that is made is kept.
    gc.disable()
    begin = time.process_time()
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
    if answer.verb == "fit":
        changes = [dict(change.options) for change in found.changes]
        return {"cpu_s": cpu_s, "decided": {"answer": found.answer, "changes": changes}}
    if plan_path is not None:
        plan_path.write_text(found.to_json(), encoding="utf-8")
    decided = {name: value for name, value in json.loads(found.to_json()).items() if name not in TOLD}
    return {
        "cpu_s": cpu_s,
        "decided": decided,
        "axes": found.axes.used,
        "step_s": found.expected.step_s,
        "gap": found.expected.gap,
    }


def priced(answer: Answer, plan_path: Path) -> dict[str, Any]:
    """Prices a plan that another build made."""
    from outsize import Plan
    from outsize.api.planning import price

    example = answer.build()
    plan, _, _ = price(Plan.load(plan_path), example.module, example.args, example.kwargs, **example.loss)
    assert plan.expected is not None, "a plan that was priced has its seconds"
    return {"step_s": plan.expected.step_s}


def run(tree: Path, arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs this file on the sources of a tree, in a process of its own; returns what it found."""
    command = ["env", f"PYTHONPATH={tree / 'src'}", "OMP_NUM_THREADS=1", sys.executable, "-W", "ignore"]
    command += [str(HERE), str(tree), str(tree), *arguments, "--core", str(options.core)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.most_s)
    except subprocess.TimeoutExpired:
        return {"error": f"ended after {options.most_s} s by the clock"}
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["no word"])[-1]}
    return json.loads(ran.stdout.splitlines()[-1])


def compared(answer: Answer, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Asks both builds in turn; returns their seconds, the ratio, and which plan is better."""
    sides: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    trees = {"old": options.old, "new": options.new}
    for _ in range(options.repeats):
        for side, found in sides.items():
            plan_path = folder / f"{answer.name}_{side}.json"
            found.append(run(trees[side], ["--here", answer.name, "--plan", str(plan_path)], options))
    row: dict[str, Any] = {"answer": answer.name}
    for side, found in sides.items():
        seconds = [one["cpu_s"] for one in found if "cpu_s" in one]
        row[side] = {**found[-1], "all_s": seconds}
        if seconds:
            row[side]["cpu_s"] = statistics.median(seconds)
    if all(row[side]["all_s"] for side in sides):
        ratios = [new / old for old, new in zip(row["old"]["all_s"], row["new"]["all_s"], strict=False)]
        row["ratio"] = row["new"]["cpu_s"] / row["old"]["cpu_s"]
        row["spread"] = [min(ratios), max(ratios)]
        row |= verdict(answer, row["old"], row["new"], options, folder)
    for side in sides:
        row[side].pop("decided", None)
    return row


def verdict(
    answer: Answer, old: dict[str, Any], new: dict[str, Any], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Says whether the new answer is the same, better or worse; plans under the prices of the new build."""
    if old["decided"] == new["decided"]:
        return {"plan": "same"}
    if answer.verb == "fit":
        return {"plan": "other", "was": old["decided"], "now": new["decided"]}
    path = folder / f"{answer.name}_old.json"
    old_now = run(options.new, ["--price", answer.name, "--plan", str(path)], options)
    if "error" in old_now:
        return {"plan": "other", "old_plan_now": old_now["error"]}
    change = new["step_s"] / old_now["step_s"] - 1
    word = "as good" if abs(change) <= EQUAL else "better" if change < 0 else "worse"
    return {"plan": word, "change": change, "old_plan_now_s": old_now["step_s"]}


def line(row: dict[str, Any]) -> str:
    """Returns one row of the table."""
    old, new = row["old"], row["new"]
    if "ratio" not in row:
        return f"{row['answer']:22s} old: {old.get('error', 'answered')}; new: {new.get('error', 'answered')}"
    least, most = row["spread"]
    text = f"{row['answer']:22s} {old['cpu_s']:7.1f} {new['cpu_s']:7.1f} s  ratio {row['ratio']:.2f} "
    text += f"({least:.2f} to {most:.2f})  {row['plan']:8s}"
    if "change" in row:
        text += f" {row['change']:+.1%} of {row['old_plan_now_s']:.4g} s,"
    if "step_s" in new:
        text += f" {new['axes']} {new['step_s']:.4g} s ({old['step_s']:.4g}),"
        text += f" gap {_percent(new['gap'])} ({_percent(old['gap'])})"
    if "old_plan_now" in row:
        text += f" the old plan: {row['old_plan_now']}"
    return text + (f" {row['was']} -> {row['now']}" if "was" in row else "")


def _percent(gap: float | None) -> str:
    return "none" if gap is None else f"{gap:.1%}"


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, help="the source tree to compare with")
    parser.add_argument("new", type=Path, help="the source tree in question")
    parser.add_argument("--only", nargs="+", choices=[answer.name for answer in ANSWERS])
    parser.add_argument("--repeats", type=int, default=2, help="how often both are asked in turn")
    parser.add_argument("--most-s", type=int, default=900, help="seconds by the clock, then one is ended")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to run on")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--price", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Prints the table."""
    options = options_of(arguments)
    named = {answer.name: answer for answer in ANSWERS}
    if options.here or options.price:
        os.sched_setaffinity(0, {options.core})
        of_name = named[options.here or options.price]
        told = answered(of_name, options.plan) if options.here else priced(of_name, options.plan)
        print(json.dumps(told))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for tree in (options.old, options.new):  # Else the first run of a tree would compile it as well.
            compileall.compile_dir(tree / "src", quiet=1)
        for name in options.only or list(named):
            rows.append(compared(named[name], options, Path(temporary)))
            print(line(rows[-1]), flush=True)
            if options.json:
                text = json.dumps({"repeats": options.repeats, "rows": rows}, indent=1)
                options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
