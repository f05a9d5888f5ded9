"""Question: what does a step cost whose weights are on the host, and what does the device hold?

One process, one device, in turns on the same model and batch: all on the device with checkpointing (a plain
loop), outsize with weights on the host, Accelerate's `cpu_offload` and torchao's optimizer where they are
installed. See README.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.ir.offload import Bound

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import saved

HERE = Path(__file__).parent
VOCABULARY, HEADS = 8192, 8


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(samples, tokens, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A decoder with a tied head; `again`: blocks are checkpointed."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.again = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Per token."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Case:
    """The model, its batch, and where it is trained."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        generator = torch.Generator().manual_seed(0)
        shape = (options.batch, options.length)
        self.ids, self.target = (
            torch.randint(VOCABULARY, shape, generator=generator).to(self.device) for _ in range(2)
        )

    def build(self) -> Model:
        """On the host."""
        torch.manual_seed(0)
        return Model(self.options.layers, self.options.width)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The microbatches."""
        count = self.options.microbatches
        return list(zip(self.ids.chunk(count), self.target.chunk(count), strict=True))

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def in_memory(case: Case) -> Callable[[], float]:
    """All on the device, blocks checkpointed, gradients accumulated."""
    model = case.build().to(case.device)
    model.again = True
    optimizer = adamw(model.parameters())

    def step() -> float:
        total = torch.zeros((), device=case.device)
        for ids, target in case.parts():
            loss = loss_of(model(ids), target) / case.options.microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def on_host(case: Case) -> tuple[Callable[[], float], outsize.Engine, outsize.Plan]:
    """Ours."""
    options, model = case.options, case.build()
    plan = outsize.plan(
        model,
        (case.ids.cpu(),),
        target=case.target.cpu(),
        loss_fn=loss_of,
        cluster=options.cluster,
        microbatches=options.microbatches,
        recompute="full",
        weights="host",
    )
    given: dict[str, Any] = {"target": case.target, "loss_fn": loss_of, "plan": plan, "optimizer": adamw}
    engine = outsize.parallelize(model, (case.ids,), devices=[options.device], **given)
    return lambda: float(engine.step(case.ids, target=case.target).loss), engine, plan


def accelerate_trains(case: Case) -> str:
    """What a step of Accelerate's `cpu_offload` changes; the word of this benchmark on it."""
    if importlib.util.find_spec("accelerate") is None:
        return "not installed"
    from accelerate import cpu_offload

    model = case.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cpu_offload(model, execution_device=case.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        ids, target = case.parts()[0]
        loss_of(model(ids), target).backward()
        optimizer.step()
    except Exception as error:  # whatever it says is the finding
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    changed = sum(
        not p.is_meta and not torch.equal(p.cpu(), before[name]) for name, p in model.named_parameters()
    )
    return f"trains {changed} of {len(before)} parameters"


def torchao(case: Case) -> Callable[[], float] | None:
    """Optimizer states and gradients on the host, weights on the device."""
    if importlib.util.find_spec("torchao") is None or case.device.type != "cuda":
        return None
    model = case.build().to(case.device)
    model.again = True
    offloading = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    optimizer = offloading(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    def step() -> float:
        total = 0.0
        for ids, target in case.parts():
            loss = loss_of(model(ids), target) / case.options.microbatches
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def timed(case: Case, step: Callable[[], float]) -> float:
    """Seconds of one step."""
    case.wait()
    start = time.perf_counter()
    step()
    case.wait()
    return time.perf_counter() - start


def peak_bytes(case: Case, step: Callable[[], float]) -> int:
    """What a GPU holds at most; the CPU's budget is counted in tests/parity/test_offload_parity.py."""
    if case.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(case.device)
    step()
    return torch.cuda.max_memory_allocated(case.device)


def bound(case: Case, engine: outsize.Engine, compute_s: float) -> Bound:
    """Each of the four timed alone: the step in memory, copies of all weights, the host's optimizer."""
    model = engine.model
    size = sum(p.nbytes for p in model.parameters())
    host = torch.empty(size, dtype=torch.uint8, pin_memory=case.device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=case.device)
    to_device_s = min(timed(case, lambda: float(there.copy_(host, non_blocking=True)[0])) for _ in range(3))
    to_host_s = min(timed(case, lambda: float(host.copy_(there, non_blocking=True)[0])) for _ in range(3))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert engine.optimizer is not None
    start = time.perf_counter()
    engine.optimizer.step()
    optimizer_s = time.perf_counter() - start
    engine.optimizer.zero_grad()
    return Bound(
        compute_s=compute_s, to_device_s=2 * to_device_s, to_host_s=to_host_s, optimizer_s=optimizer_s
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of them in turns."""
    case = Case(options)
    ours, engine, plan = on_host(case)
    ways: dict[str, Callable[[], float]] = {"in memory, checkpointed": in_memory(case), "outsize": ours}
    other = torchao(case)
    ways |= {"torchao": other} if other is not None else {}
    losses = {name: [step() for _ in range(2)] for name, step in ways.items()}
    laps: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.steps):
        for name, step in ways.items():
            laps[name].append(timed(case, step))
    seconds = {name: statistics.median(each) for name, each in laps.items()}
    size = sum(p.nbytes for p in engine.model.parameters())
    four = bound(case, engine, seconds["in memory, checkpointed"])
    moves: Any = engine.crew.moves
    residency = moves.residency
    return {
        "weights_bytes": size,
        "stages": len(plan.stages),
        "schedule": plan.schedule,
        "step_s": {name: statistics.quantiles(each, n=4) for name, each in laps.items()},
        "tokens_per_s": {name: case.ids.numel() / each for name, each in seconds.items()},
        "share_of_in_memory": seconds["in memory, checkpointed"] / seconds["outsize"],
        "bound": {"step_s": four.step_s, "of_it": four.step_s / seconds["outsize"], "text": str(four)},
        "places_bytes": residency.device_bytes,
        "host_bytes_per_parameter": 4 * residency.host_bytes / size + 8,
        "peak_bytes": {name: peak_bytes(case, step) for name, step in ways.items()},
        "losses": losses,
        "accelerate cpu_offload": accelerate_trains(case),
        "report": str(engine.report()),
    }


def table(found: dict[str, Any]) -> str:
    """For people."""
    size = found["weights_bytes"]
    rows = [
        f"{size / 1e6:.0f} MB of weights, {4 * size / 1e6:.0f} MB with gradients and states",
        f"{found['stages']} stages, {found['schedule']}",
        f"places on the device {found['places_bytes'] / 1e6:.0f} MB",
        f"host {found['host_bytes_per_parameter']:.2f} bytes a parameter",
        "way                        step ms (quartiles)      tokens/s   peak MB",
    ]
    for name, (low, middle, high) in found["step_s"].items():
        peak = found["peak_bytes"][name]
        rows.append(
            f"{name:26s} {middle * 1e3:8.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})".ljust(50)
            + f"{found['tokens_per_s'][name]:10.0f}{f'{peak / 1e6:10.0f}' if peak else '         -'}"
        )
    of_it = found["bound"]["of_it"]
    rows.append(f"outsize against in memory: {found['share_of_in_memory']:.2f}; bound / step: {of_it:.2f}")
    rows += [found["bound"]["text"], f"accelerate cpu_offload: {found['accelerate cpu_offload']}"]
    return "\n".join(rows)


def main() -> None:
    """As a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu")
    parser.add_argument("--cluster", default="1x12GB", help="what the plan is made for")
    parser.add_argument("--cap-gb", type=float, default=0.0, help="of the GPU's memory, for all")
    parser.add_argument("--layers", type=int, default=24 if cuda else 8)
    parser.add_argument("--width", type=int, default=2048 if cuda else 256)
    parser.add_argument("--length", type=int, default=1024 if cuda else 128)
    parser.add_argument("--batch", type=int, default=16 if cuda else 8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cap_gb and cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap_gb * 1e9 / total)
    found = measure(options)
    found = saved(Path(__file__), found, f"-{options.device.partition(':')[0]}")
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
