"""Question: which unmodified models does torch's own tracer split and train, and are the gradients right?

Each model of CASES goes through `torch.distributed.pipelining.pipeline` (the tracer), `build_stage` and a
schedule over gloo processes, cut at module boundaries that suit torch; its gradients are compared with the
plain loop's. Then `outsize.check` gets the same model with as many stages. For torch, transformers' cache is
off and the loss is outside of the model, since it asks for both.

    python benchmarks/coverage/run.py [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import outsize

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "parity"))
# model of the parity zoo, schedule, modules at which stages 1, 2, ... begin for torch
CASES = (
    ("toy", "1f1b", ("net2",)),
    ("resnet18", "1f1b", ("layer3",)),
    ("unet", "1f1b", ("bottom", "merge2")),
    ("late_fusion", "gpipe", ("right",)),
    ("gpt2", "1f1b", ("transformer.h.2",)),
    ("bert", "1f1b", ("bert.encoder.layer.2",)),
    ("llama", "1f1b", ("model.layers.2",)),
    ("qwen3", "1f1b", ("model.layers.2",)),
)
TIMEOUT_S = 120
ECHOES = ("Connection closed by peer", "no message")  # of another rank's error


def theirs(name: str, schedule: str, splits: tuple[str, ...]) -> str:
    """What became of the model under torch, in a line."""
    with tempfile.TemporaryDirectory() as folder:
        launch = "import sys; from outsize.ops.launch.launch import run_script as r; "
        launch += "r(sys.argv[2:], int(sys.argv[1]))"
        command = [sys.executable, "-c", launch, str(1 + len(splits)), str(HERE / "worker.py")]
        subprocess.run(
            [*command, name, schedule, folder, *splits], timeout=TIMEOUT_S, capture_output=True, check=False
        )
        said = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]
    errors = [f"{s['stage']}: {s['error']}" for s in said if "error" in s]
    if errors:
        return next((e for e in errors if not any(echo in e for echo in ECHOES)), errors[0])
    wrong = {n: d for s in said for n, d in s["wrong"].items()}
    count = sum(s["gradients"] for s in said)
    return f"ran; wrong gradients: {wrong}" if wrong else f"ran; all {count} gradients bit-equal"


def ours(name: str, schedule: Any, stages: int) -> str:
    """The verdict of `outsize.check`, in a line."""
    from zoo import case

    found = case(name)
    args, kwargs = found.batch(8)
    target = found.target(8)
    verdict = outsize.check(
        found.build(), args, kwargs, stages=stages, schedule=schedule, loss_fn=found.loss, target=target
    )
    return "bit-equal" if verdict.bit_equal else f"differs, first at {verdict.first_divergence}"


def main() -> None:
    """Print a line per model; --out writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, schedule, splits in CASES:
        row = {"model": name, "schedule": schedule, "stages": 1 + len(splits)}
        row |= {"torch": theirs(name, schedule, splits), "outsize": ours(name, schedule, 1 + len(splits))}
        rows.append(row)
        print(f"{name:12} {schedule:5} torch: {row['torch']}\n{'':18} outsize: {row['outsize']}", flush=True)
    if options.out is not None:
        about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
        about["machine"] = f"{platform.machine()} {platform.system()}"
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
