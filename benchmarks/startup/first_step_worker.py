"""One process that measures one figure of first_step.py, and writes it as JSON; its rank comes as torchrun's.

The clocks begin before torch is imported. Seconds are those of the wall and of this process's CPU.
"""

from __future__ import annotations

import time

BEGAN_S = time.perf_counter(), time.process_time()

import argparse  # noqa: E402 - the clocks come first
import copy  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

LAYERS, WIDTH, WORDS = 24, 256, 1000
SAMPLES, TOKENS, MICROBATCHES = 8, 64, 4
OTHER_TOKENS = (80, 96, 72, 88)
UNITS, UNIT_WIDTH = 80, 16
WARM_LAPS, LAPS = 20, 200


class Marks:
    """Seconds of the wall and of the CPU, from mark to mark."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self._last = BEGAN_S

    def set(self, name: str) -> None:
        """Notes what has passed since the last mark."""
        now = time.perf_counter(), time.process_time()
        wall_s, cpu_s = (b - a for a, b in zip(self._last, now, strict=True))
        self.seconds[name] = {"wall": wall_s, "cpu": cpu_s}
        self._last = now


def llama(width: int, words: int, layers: int = LAYERS) -> Any:
    """A Llama of transformers."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=words, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def batch_of(tokens: int) -> dict[str, Any]:
    """Token ids as inputs and labels."""
    import torch

    ids = torch.randint(0, WORDS, (SAMPLES, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def started(options: argparse.Namespace) -> dict[str, Any]:
    """From the first import to the first step, and steps with other lengths."""
    marks = Marks()
    import torch

    torch.set_num_threads(1)
    marks.set("import torch")
    torch.manual_seed(0)
    model, batch = llama(WIDTH, WORDS), batch_of(TOKENS)
    marks.set("build the model")
    import outsize

    marks.set("import outsize")
    asked: dict[str, Any] = json.loads(options.asked)
    engine = outsize.parallelize(
        model, (), batch, stages=2, microbatches=MICROBATCHES, cluster="2xcpu",
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), **asked,
    )  # fmt: skip
    marks.set("parallelize")
    losses = [float(engine.step(**batch).loss)]
    marks.set("first step")
    losses.append(float(engine.step(**batch).loss))
    marks.set("second step")
    for tokens in OTHER_TOKENS:
        other = batch_of(tokens)
        losses.append(float(engine.step(**other).loss))
        marks.set(f"first step of {tokens} tokens")
        losses.append(float(engine.step(**other).loss))
        marks.set(f"second step of {tokens} tokens")
    return {"seconds": marks.seconds, "losses": losses}


def overhead(_: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a step beside those of the plain loop, of layers so small that Python is nearly all."""
    import torch
    from torch import nn

    import outsize

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for stages, microbatches in ((1, 1), (2, 4)):
        torch.manual_seed(0)
        layers = [nn.Linear(UNIT_WIDTH, UNIT_WIDTH) for _ in range(UNITS)]
        model = nn.Sequential(*layers)
        plain_model = copy.deepcopy(model)
        plain_optimizer = torch.optim.SGD(plain_model.parameters(), lr=1e-3)
        x, y = torch.randn(8, UNIT_WIDTH), torch.randn(8, UNIT_WIDTH)
        loss_fn = nn.MSELoss()
        engine = outsize.parallelize(
            model, (x,), target=y, loss_fn=loss_fn, stages=stages, microbatches=microbatches,
            cluster=f"{stages}xcpu", optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        )  # fmt: skip
        parts = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))

        def plain(model: Any = plain_model, steps: Any = plain_optimizer, parts: Any = parts) -> None:
            for a, b in parts:
                (nn.functional.mse_loss(model(a), b) / len(parts)).backward()
            steps.step()
            steps.zero_grad()

        def step(engine: Any = engine, x: Any = x, y: Any = y) -> None:
            engine.step(x, target=y)

        laps: dict[str, list[float]] = {"plain": [], "step": []}
        arms: dict[str, Callable[[], None]] = {"plain": plain, "step": step}
        for lap in range(WARM_LAPS + LAPS):
            for name, run in arms.items():
                begin_s = time.process_time()
                run()
                if lap >= WARM_LAPS:
                    laps[name].append((time.process_time() - begin_s) * 1e6)
        own = statistics.median(laps["step"]) - statistics.median(laps["plain"])
        least = min(laps["step"]) - min(laps["plain"])
        found[f"{stages} stages, {microbatches} microbatches"] = {
            "plain_us": statistics.median(laps["plain"]),
            "own_us": own,
            "least_own_us": least,
        }
    return found


def memory_bytes(name: str) -> int:
    """Returns a line of this process's status, such as VmHWM, the most that it ever had in memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """The most host memory that `parallelize` has beyond what was there before, by the rank's own weights."""
    import torch

    import outsize

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = llama(options.width, options.words, options.layers)
    batch = batch_of(TOKENS)
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # The most so far is what is there now.
    outsize.parallelize(
        model, (), batch, stages=2, microbatches=MICROBATCHES, cluster="2xcpu", weight_files=options.weights,
    )  # fmt: skip
    peak = memory_bytes("VmHWM")
    own = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta and p.numel())
    return {
        "own_bytes": own,
        "before_bytes": before,
        "peak_bytes": peak - before,
        "after_bytes": memory_bytes("VmRSS") - before,
        "peak_by_own": (peak - before) / own,
    }


def write_weights(options: argparse.Namespace) -> dict[str, Any]:
    """Writes the file of weights that `memory` reads."""
    import torch

    torch.manual_seed(0)
    model = llama(options.width, options.words, options.layers)
    model.save_pretrained(options.weights)
    return {"bytes": sum(p.numel() * p.element_size() for p in model.parameters())}


FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "start": started,
    "step": overhead,
    "memory": memory,
    "weights": write_weights,
}


def main() -> None:
    """Measures one figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=sorted(FIGURES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--asked", default="{}", help="more options of parallelize, as JSON")
    parser.add_argument("--weights", default="", help="the folder of the weights' file")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--words", type=int, default=16000)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    found = FIGURES[options.figure](options)
    rank = os.environ.get("RANK", "0")  # noqa: TID251
    out = options.out.with_suffix(f".{rank}.json")
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
