"""Question: is outsize's tuned plan ever slower than torch's 1F1B, and how much faster than equal parameters?

Two processes, one thread and one core each; every system in one run, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved

HERE = Path(__file__).parent
TORCH = {"resnet50-24x96x96": "2,3,4,6,8,12", "resnet50-64x128x128": "2,4,8,16"}
FORUM = {
    "resnet50-24x96x96": "2,4,8",
    "deeplabv3-8x96x96": "2,4",  # its pooled branch has one pixel: BatchNorm wants two samples
    "unet-16x96x96": "2,4,8",
    "gpt2-8x64": "2,4,8",
}
TARGETS = {"torch": 1.0, "forum, mean": 1.25}


def measure(case: str, against: str, microbatches: str, extra: list[str]) -> dict[str, Any]:
    """One launch of two processes."""
    asked = ("--case", case, "--against", against, "--microbatches", microbatches, *extra)
    return summary(case, against, launched(HERE / "worker.py", 2, *asked))


def summary(case: str, against: str, found: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the best of the others, chosen by its median in this very run, over ours."""
    laps = found["laps_s"]
    middle = {name: statistics.median(seconds) for name, seconds in laps.items()}
    pipelined = [name for name in middle if " 1f1b " in name]
    best = min(pipelined, key=lambda name: middle[name])
    ratios = [a / b for a, b in zip(laps[best], laps["outsize"], strict=True)]
    return {
        "case": case,
        "against": against,
        "best": best,
        "speedup": middle[best] / middle["outsize"],
        "speedup_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "speedup_over_naive": middle["forum naive"] / middle["outsize"] if "forum naive" in middle else None,
        "median_s": middle,
        **found,
    }


def main() -> None:
    """All cases, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="cases with this in `against/case`")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options, extra = parser.parse_known_args()
    cases = [
        (c, against, m) for against, table in (("torch", TORCH), ("forum", FORUM)) for c, m in table.items()
    ]
    rows = [measure(c, a, m, extra) for c, a, m in cases if options.only in f"{a}/{c}"]
    forum = [row["speedup"] for row in rows if row["against"] == "forum"]
    result = saved(
        Path(__file__),
        {
            "targets": TARGETS,
            "forum_mean_speedup": statistics.fmean(forum) if forum else None,
            "rows": rows,
        },
        options.tag,
    )
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["case                  against  best of it      its ms   ours ms  speed-up  over naive"]
    for row in result["rows"]:
        naive, best = row["speedup_over_naive"], row["best"]
        its, ours = row["median_s"][best] * 1e3, row["median_s"]["outsize"] * 1e3
        lines.append(
            f"{row['case']:20s}  {row['against']:7s}  {best:13s}  {its:7.0f}  {ours:8.0f}"
            f"  {row['speedup']:8.2f}  {'' if naive is None else f'{naive:.2f}'}"
        )
    mean = result["forum_mean_speedup"]
    return "\n".join(
        [
            *lines,
            *([f"mean over the forum's advice {mean:.2f}"] if mean else []),
            f"load {result['load']:.1f}",
        ]
    )


if __name__ == "__main__":
    main()
