"""Takes the steps of one model that does not fit a GPU, in one way and in a process of its own.

    python beyond_memory.py CASE WAY DEVICE     prints one line of JSON

    outsize            by the plan that it picks
    FSDP2, offload     torch's `fully_shard` of each layer with `CPUOffloadPolicy`, layers checkpointed
    RoundPipe, exact   RoundPipe whose optimizer has ended when the next step begins

All have the same weights and AdamW in bfloat16, and a share of the GPU's memory (`Case.room_bytes`), to which
the process is held. The loss of the first step is printed to compare. Models are `nn.Sequential` because
RoundPipe cuts nothing else.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAYS: Final = ("outsize", "FSDP2, offload", "RoundPipe, exact")
_KINDS: Final = {"NVIDIA H100": "h100-80gb", "NVIDIA H200": "h200"}
_WARM: Final = 2
_STEPS: Final = 3
_GIB: Final = 2**30


@final
@dataclass(frozen=True)
class Case:
    """The sizes of a transformer, of its batch, and of the memory that a process may have.

    `vocabulary` is 0 for images of `tokens` patches of 14 x 14 pixels.
    """

    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    tokens: int
    batch: int
    room_bytes: int

    def build(self) -> nn.Sequential:
        """Returns the model."""
        first = Words(self) if self.vocabulary else Patches(self)
        return nn.Sequential(first, *(Block(self) for _ in range(self.layers)), Head(self))

    def samples(self, device: str) -> tuple[Tensor, Tensor]:
        """Returns a batch and its labels."""
        generator = torch.Generator().manual_seed(1)
        if self.vocabulary:
            drawn = torch.randint(self.vocabulary, (self.batch, self.tokens + 1), generator=generator)
            return drawn[:, :-1].to(device), drawn[:, 1:].contiguous().to(device)
        images = torch.randn(self.batch, self.tokens, 3 * 14 * 14, generator=generator)
        return images.bfloat16().to(device), torch.arange(self.batch).remainder(1000).to(device)


# Sizes of Llama 3 8B, Qwen3-1.7B, GPT-2 1.5B and ViT-G/14, with learned positions and heads of their own.
CASES: Final = {
    "decoder 8B in 80 GB": Case(4096, 32, 32, 8, 14336, 128256, 1024, 8, 80_000_000_000),
    "decoder 1.7B in 24 GB": Case(2048, 28, 16, 8, 6144, 151936, 1024, 16, 24_000_000_000),
    "gpt 1.5B in 12 GB": Case(1600, 48, 25, 25, 4288, 50257, 1024, 8, 12_000_000_000),
    "vit 1.8B in 12 GB": Case(1664, 48, 16, 16, 5504, 0, 256, 64, 12_000_000_000),
}


class Words(nn.Module):
    """Vectors of words and of their positions."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.words = nn.Embedding(case.vocabulary, case.width)
        self.positions = nn.Embedding(case.tokens, case.width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Patches(nn.Module):
    """Vectors of patches and of their positions."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 14 * 14, case.width)
        self.positions = nn.Parameter(torch.empty(case.tokens, case.width))

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images) + self.positions


class Block(nn.Module):
    """A transformer layer with a gated MLP; words do not see those behind them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.size, self.is_causal = case.width // case.heads, bool(case.vocabulary)
        self.parts = (case.width, *[case.groups * self.size] * 2)
        self.before, self.between = nn.RMSNorm(case.width), nn.RMSNorm(case.width)
        self.qkv = nn.Linear(case.width, sum(self.parts), bias=False)
        self.out = nn.Linear(case.width, case.width, bias=False)
        self.up = nn.Linear(case.width, 2 * case.inner, bias=False)
        self.down = nn.Linear(case.inner, case.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).split(self.parts, -1)
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, wide = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * wide)


class Head(nn.Module):
    """Logits: of each word, or of an image's classes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm, self.is_image = nn.RMSNorm(case.width), not case.vocabulary
        self.head = nn.Linear(case.width, case.vocabulary or 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.mean(1) if self.is_image else x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over all labels."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of all ways, which steps where the weights are."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def filled(case: Case, device: str) -> nn.Sequential:
    """Returns the model on the host; its numbers are drawn on the device, which is fast at it."""
    with torch.device("meta"):
        model = case.build().bfloat16()
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator, device=device, dtype=weight.dtype)
            is_norm = weight.ndim == 1 and not name.endswith("bias")
            weight.copy_(torch.ones_like(drawn) if is_norm else drawn.mul_(0.02))
    return model.train()


def outsize_step(model: nn.Module, case: Case, device: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns a step by the plan that outsize picks, and what the plan says."""
    import outsize
    from outsize.api.problem import cluster_of

    kind = "h100-80gb"
    if device == "cuda":
        kind = next(kind for name, kind in _KINDS.items() if torch.cuda.get_device_name().startswith(name))
    cluster = cluster_of(f"1x{kind}")
    cluster = cluster.shared(min(1.0, case.room_bytes / cluster.devices[0].memory_bytes), cluster.name)
    inputs, labels = case.samples(device)
    given: dict[str, Any] = {"target": labels, "loss_fn": loss_of}
    plan = outsize.plan(model, (inputs,), cluster=cluster, **given)
    engine = outsize.parallelize(model, (inputs,), plan=plan, devices=[device], optimizer=adamw, **given)
    facts = ("weights", "recompute", "microbatches", "loss_pieces", "module_pieces")
    says = {name: getattr(plan, name) for name in facts} | {"stages": len(plan.stages)}
    says["predicted_s"] = plan.expected.step_s if plan.expected is not None else None
    return lambda: float(engine.step(inputs, target=labels).loss), says


def fsdp_step(model: nn.Module, case: Case, device: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns a step of FSDP2 over one rank, each layer checkpointed, weights and optimizer on the host."""
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    given: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if device == "cuda" else {}
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **given)
    fully_shard(model, mesh=mesh, **given)
    optimizer = adamw(model.parameters())
    inputs, labels = case.samples(device)

    def step() -> float:
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, {}


def roundpipe_step(model: nn.Module, case: Case, device: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns a step of RoundPipe that ends with the optimizer's. It runs on GPUs alone."""
    roundpipe: Any = importlib.import_module("roundpipe")
    count = 2  # its default for one device
    piped = roundpipe.RoundPipe(model, model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=count))
    optimizer = adamw(piped.optim_parameters())
    inputs, labels = case.samples("cpu")

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> float:
        loss = piped.forward_backward(
            input_args=(inputs,), label=labels, loss_fn=lambda out, label: loss_of(out, label) / count
        )
        piped.step(update, is_async=False)
        return float(loss)

    return step, {"microbatches": count}


STEPS_OF: Final = dict(zip(WAYS, (outsize_step, fsdp_step, roundpipe_step), strict=True))


def copies_s(size: int) -> dict[str, float]:
    """Returns the seconds in which so many bytes come to the device and go back, one way at a time."""
    host = torch.empty(_GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_GIB, dtype=torch.uint8, device="cuda")

    def timed(copy: Callable[[], Any]) -> float:
        begin_s = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    to_device_s = min(timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(4))
    to_host_s = min(timed(lambda: host.copy_(there, non_blocking=True)) for _ in range(4))
    return {"to_device_s": to_device_s * size / _GIB, "to_host_s": to_host_s * size / _GIB}


def taken(name: str, way: str, device: str) -> dict[str, Any]:
    """Returns the loss of the first step, and the seconds and the memory of the later ones."""
    case, on_gpu = CASES[name], device == "cuda"
    if on_gpu:
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.room_bytes / total_bytes))
    else:
        groups = case.groups * 4 // case.heads
        case = replace(case, width=64, layers=2, heads=4, groups=groups, inner=96, tokens=16, batch=4)
        case = replace(case, vocabulary=min(case.vocabulary, 128))
    model = filled(case, device)
    size = sum(weight.nbytes for weight in model.parameters())
    found: dict[str, Any] = {"weights_bytes": size}
    if on_gpu and way == "outsize":
        found |= copies_s(size)
        torch.cuda.empty_cache()
    step, says = STEPS_OF[way](model, case, device)
    seconds, losses = list[float](), list[float]()
    for _ in range(_WARM + _STEPS if on_gpu else 2):
        begin_s = time.perf_counter()
        losses.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin_s)
    later = seconds[_WARM:] or seconds[1:]
    peak_bytes = torch.cuda.max_memory_reserved() if on_gpu else 0
    timed = {"median_s": statistics.median(later), "least_s": min(later), "peak_bytes": peak_bytes}
    return {"loss": losses[0], "second_loss": losses[1], **timed, **says, **found}


if __name__ == "__main__":
    print(json.dumps(taken(*sys.argv[1:4])))
