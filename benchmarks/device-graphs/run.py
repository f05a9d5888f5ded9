"""Compares stages recorded as graphs of their device with the same stages without: bits, seconds, memory.

    export CUBLAS_WORKSPACE_CONFIG=:4096:8
    python benchmarks/device-graphs/run.py --device cuda:0 --limit-s 120 --out graphs.json

For each model: the plain loop over microbatches where nothing draws, else one stage without graphs, is what
bits are compared with (loss and every parameter after five steps, deterministic kernels). Seconds are those
of a step afterwards, with the device's usual kernels. What the time limit does not reach is missing in the
file.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_transformers

transformers = import_transformers()

STEPS, TIMED = 5, 10


class Case(NamedTuple):
    """A model, the inputs of one step, and the number of microbatches."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    draws: bool
    microbatches: int = 4


def tokens(vocabulary: int, samples: int, length: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, vocabulary, (samples, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return batch


def gpt2(drop: float, **sizes: int) -> nn.Module:
    drops = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    config = transformers.GPT2Config(**drops, **sizes, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int = 8) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Vision(nn.Module):
    """ResNet-50 with its loss inside, as the language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=100))

    def forward(self, pixels: Tensor, labels: Tensor) -> Any:
        return nn.functional.cross_entropy(self.net(pixels).logits, labels)


def images(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 100, (16,), generator=generator)
    return {"pixels": torch.randn(16, 3, 96, 96, generator=generator), "labels": labels}


CASES = {
    "GPT-2 124M, dropout": Case(lambda: gpt2(0.1), tokens(50257, 8, 128), draws=True),
    "Llama, 8 layers of 512": Case(llama, tokens(8192, 8, 128), draws=False),
    "ResNet-50": Case(Vision, images, draws=False),
}
COMPILED = {"Llama, 4 layers of 512": Case(lambda: llama(4), tokens(8192, 8, 128), draws=False)}


def built(case: Case, device: str) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(device)


def on(batch: dict[str, Tensor], device: str) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def deterministic(yes: bool) -> None:
    torch.use_deterministic_algorithms(yes, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - torch types it as a module's
    torch.backends.cudnn.deterministic = yes


def seconds(step: Callable[[], object], device: str) -> float:
    for _ in range(4):
        step()
    torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    for _ in range(TIMED):
        step()
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - begin) / TIMED


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def plain(case: Case, device: str) -> tuple[list[Tensor], float]:
    """Losses and parameters of a loop over microbatches, and the seconds of a step."""
    model, losses = built(case, device), list[Tensor]()
    optimizer = optimizer_of(model.parameters())

    def step(number: int) -> Tensor:
        batch = on(case.batch(number), device)
        parts = [
            dict(zip(batch, part, strict=True))
            for part in zip(*(v.chunk(case.microbatches) for v in batch.values()), strict=True)
        ]
        total = torch.zeros((), device=device)
        for part in parts:
            loss = loss_of(model(**part))
            loss.backward(torch.full_like(loss, 1 / case.microbatches))
            total = total + loss.detach() * (1 / case.microbatches)
        optimizer.step()
        optimizer.zero_grad()
        return total

    deterministic(True)
    losses = [step(number) for number in range(STEPS)]
    found = [*losses, *(v.detach().clone() for v in model.state_dict().values())]
    deterministic(False)
    return found, seconds(lambda: step(0), device)


def split(case: Case, device: str, stages: int, **how: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """The same of an engine, with its memory and what it says of its graphs."""
    model, begin = built(case, device), time.perf_counter()
    example = on(case.batch(0), device)
    kind = "h100-80gb" if device.startswith("cuda") else "cpu"
    plan = outsize.plan(
        model, (), example, cluster=f"{stages}x{kind}", stages=stages, microbatches=case.microbatches,
        schedule="1f1b", recompute="none",
    )  # fmt: skip
    engine = outsize.parallelize(
        model, (), example, plan=plan, optimizer=optimizer_of, compiled=outsize.Compile(**how)
    )
    deterministic(True)
    losses = [engine.step(**on(case.batch(number), device)).loss for number in range(STEPS)]
    found = [*losses, *(v.detach().clone() for v in model.state_dict().values())]
    deterministic(False)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    batch = on(case.batch(0), device)
    step_s = seconds(lambda: engine.step(**batch), device)
    peak_bytes = torch.accelerator.max_memory_reserved(device)
    use, compilation = engine.device_graphs, engine.compilation
    return found, {
        "step_s": step_s,
        "reserved_bytes": peak_bytes,
        "graphs": None if use is None else use.model_dump(),
        "compiled": None if compilation is None else str(compilation),
        "all_s": time.perf_counter() - begin,
    }


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--out", type=Path, default=Path("graphs.json"))
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    end, rows = time.monotonic() + arguments.limit_s, list[dict[str, Any]]()
    device: str = arguments.device
    ways: list[tuple[int, dict[str, Any]]] = [
        (stages, {"device_graphs": graphs}) for stages in (1, 3) for graphs in (False, True)
    ]
    compiled: list[tuple[int, dict[str, Any]]] = [
        (1, {"device_graphs": False}), (1, {"device_graphs": True}), (1, {"compiled": "auto"}),
        (1, {"compiled": "auto", "device_graphs": True}), (3, {"compiled": "auto"}),
    ]  # fmt: skip
    tiny = Case(lambda: gpt2(0.1, n_layer=3, n_embd=24, vocab_size=500), tokens(500, 4, 8), draws=True)
    cases = {"GPT-2": tiny} if arguments.small else CASES
    for (name, case), todo in [
        *((c, ways) for c in cases.items()),
        *((c, compiled) for c in (() if arguments.small else COMPILED.items())),
    ]:
        expected: list[Tensor] | None = None
        if not case.draws:
            expected, step_s = plain(case, device)
            rows.append({"case": name, "way": "plain loop", "step_s": step_s})
        for stages, how in todo:
            if time.monotonic() > end or (arguments.small and "compiled" in how):
                continue
            row: dict[str, Any] = {"case": name, "way": how, "stages": stages}
            try:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    found, figures = split(case, device, stages, **how)
                expected = found if expected is None else expected
                largest = max(
                    float((a.double() - b.double()).abs().max()) for a, b in zip(found, expected, strict=True)
                )
                row |= {"bit_equal": same(found, expected), "largest_difference": largest, **figures}
                row["warnings"] = sorted({str(each.message).partition("\n")[0][:200] for each in said})
            except Exception as error:  # One case must not end the others.
                row["error"] = f"{type(error).__name__}: {error}"[:2000]
            rows.append(row)
            print(json.dumps(row), flush=True)
            arguments.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
