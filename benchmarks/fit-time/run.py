"""Question: how long does `outsize fit` take, from the first import to the answer?

Each case is a process of its own with one thread, and its CPU seconds (user and system) are counted: a busy
machine makes them more, never fewer. Models of torchvision on meta; a Llama of 80 layers and 70 B parameters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
MEMORY_BYTES = 12_000_000_000
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
WHERE = ("--cluster", "8xh100-80gb", "--batch", "8", "--input", "4096")


def main() -> None:
    """All cases, or those named; slowest first, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", help="names of torchvision, llama, llama-bf16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA))
        cases = {name: case for name, case in all_cases(config).items() if name in (asked.models or [name])}
        found = {name: timed(case) for name, case in cases.items()}
    ranked = dict(sorted(found.items(), key=lambda pair: -pair[1]["cpu_s"]))
    result = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "limit_s": LIMIT_S,
        "import_torch_s": timed(["-c", "import torch"])["cpu_s"],
        "over_limit": [name for name, case in ranked.items() if case["cpu_s"] > LIMIT_S],
        "cases": ranked,
    }
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if asked.json else table(ranked))


def all_cases(config: Path) -> dict[str, list[str]]:
    """Name -> arguments of Python; every builder that torchvision lists."""
    from outsize.capture.models.imports import import_torchvision

    fit = ["-W", "ignore", "-c", "from outsize.cli import main; main()", "fit"]
    llama = [*fit, f"transformers:{config}", *WHERE]
    cases = {"llama": llama}
    cases |= {f"llama-{p}": [*llama, "--precision", p] for p in ("bf16", "bf16-mixed", "fp16-mixed")}
    for name in import_torchvision().models.list_models():
        cases[name] = [*fit, f"torchvision:{name}", "--cluster", "2x12GB", "--batch", "8"]
    return cases


def timed(arguments: list[str]) -> dict[str, Any]:
    """CPU and wall seconds of one process, and how it ended: 0 fits, 1 does not, else an error."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        ["env", "OMP_NUM_THREADS=1", "prlimit", f"--as={MEMORY_BYTES}", sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.read().strip().splitlines()
    _, status, used = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.perf_counter() - begun, 2),
        "exit": code,
        "said": said[-1][:160] if code > 1 and said else "",
    }


def table(ranked: dict[str, dict[str, Any]]) -> str:
    """A line per case."""
    lines = (f"{c['cpu_s']:6.2f} s  exit {c['exit']}  {name}  {c['said']}" for name, c in ranked.items())
    return "\n".join(lines)


if __name__ == "__main__":
    main()
