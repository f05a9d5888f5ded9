"""Question: W210 predicts what its remedy would gain; is that what a run gains that does as it says?

`outsize run` of a sequential plan, then once more with what its W210 says to type; in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import saved

HERE = Path(__file__).parent
TARGET = 0.15
CASES = {
    "torchvision:resnet18": ("3x96x96", 16),
    "torchvision:resnet50": ("3x96x96", 16),
    "transformers:GPT2Config?n_layer=8&n_embd=256&n_head=4&vocab_size=1024": ("128", 16),
}
Options = dict[str, str]


def outsize_run(model: str, options: Options) -> dict[str, Any]:
    """What `outsize run --json` says."""
    main = "import sys; from outsize.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "run", model, "--json"]
    for name, value in options.items():
        command += [f"--{name}", value]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure(model: str, rounds: int, steps: int) -> dict[str, Any]:
    """Both runs in turns; what is typed is what the first run says."""
    shape, batch = CASES[model]
    first = {"input": shape, "batch": str(batch), "stages": "2", "steps": str(steps)}
    naive, told, advised = first | {"schedule": "naive", "microbatches": "1"}, list[dict[str, Any]](), []
    changes = {}
    for _ in range(rounds):
        found = outsize_run(model, naive)["measured"]
        changes = changes or dict(found["warning"]["change"])
        told.append(found)
        advised.append(outsize_run(model, first | changes)["measured"])
    predicted = statistics.median(run["warning"]["gain"] for run in told)
    before, after = (statistics.median(run["step_s"] for run in runs) for runs in (told, advised))
    return {
        "model": model,
        "batch": batch,
        "said": told[0]["warning"]["text"],
        "typed": changes,
        "predicted": predicted,
        "gained": before / after,
        "ratio": predicted / (before / after),
        "steps_s": {"naive": [r["step_s"] for r in told], "advised": [r["step_s"] for r in advised]},
    }


def main() -> None:
    """All models, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options = parser.parse_args()
    rows = [measure(model, options.rounds, options.steps) for model in options.models]
    result = saved(Path(__file__), {"target": TARGET, "rows": rows}, options.tag)
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["model                                     typed              predicted  gained  ratio"]
    for row in result["rows"]:
        typed = " ".join(row["typed"].values())
        lines.append(
            f"{row['model'][:40]:40s}  {typed:17s}  {row['predicted']:8.2f}x {row['gained']:6.2f}x"
            f"  {row['ratio']:5.2f}"
        )
    return "\n".join([*lines, f"load {result['load']:.1f}"])


if __name__ == "__main__":
    main()
