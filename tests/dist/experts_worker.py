"""Run by test_experts.py, one process per rank: plans with ep against a plain loop over microbatches."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from launches import planned_once, record_run
from recorded_once import recorded_once
from tensor_models import SMALL, transformer
from tensor_worker import all_in, worst
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.ir.plan import Plan
from outsize.run.collectives.expert_parallel import ExpertParallelGroup
from outsize.run.collectives.tensor_parallel import local_of
from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

CLIP, SEED, STEPS = 0.5, 5, 2


class Collection(nn.Module):
    """Experts as research code has them: a loop over those that some token has chosen."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.amount = experts
        self.up = nn.Parameter(0.3 * torch.randn(experts, inner, width))
        self.bias = nn.Parameter(0.3 * torch.randn(experts, inner))
        self.down = nn.Parameter(0.3 * torch.randn(experts, width, inner))
        self.act = nn.GELU()

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.amount):
            token, choice = (index == expert).nonzero(as_tuple=True)
            if len(token):
                inner = self.act(functional.linear(x[token], self.up[expert], self.bias[expert]))
                made = functional.linear(inner, self.down[expert]) * weight[token, choice, None]
                out.index_add_(0, token, made)
        return out


class Block(nn.Module):
    """A router, experts, and an expert that all tokens have. The router may drop tokens, or avoid experts."""

    def __init__(self, width: int = 16, experts: int = 5, capacity: int = 0, avoided: int = 0) -> None:
        super().__init__()
        self.gate, self.capacity, self.avoided = nn.Linear(width, experts), capacity, avoided
        self.experts, self.shared = Collection(experts, width, 12), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        if self.avoided:
            logits = torch.cat([logits[:, : -self.avoided], logits[:, -self.avoided :] - 1e4], 1)
        weight, index = logits.softmax(-1).topk(2)
        if self.capacity:
            chosen = functional.one_hot(index.flatten(), logits.shape[1])
            place = (chosen.cumsum(0) * chosen).sum(-1).view(index.shape)
            index = index.masked_fill(place > self.capacity, logits.shape[1])
        return x + (self.experts(flat, index, weight) + self.shared(flat)).view(x.shape)


class Tower(nn.Module):
    """Blocks, and their loss, for 3 samples of which microbatches have 2 and 1."""

    def __init__(self, samples: int, **of_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(8, 16), Block(**of_blocks), Block(**of_blocks), nn.Linear(16, 8)
        )
        self.samples = samples

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(self.blocks(input_ids), labels)


def decoder(name: str, **more: Any) -> Callable[[], nn.Module]:
    fields = {**SMALL, "num_hidden_layers": 2, "experts_implementation": "eager", **more}
    return lambda: transformer(f"{name}ForCausalLM", f"{name}Config", fields)


CASES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": decoder("Mixtral", num_local_experts=5, num_experts_per_tok=2, output_router_logits=True),
    "grouped": decoder("Mixtral", num_local_experts=4, experts_implementation="grouped_mm"),
    "qwen3": decoder("Qwen3Moe", num_experts=4, num_experts_per_tok=3, moe_intermediate_size=12, head_dim=4),
    "deepseek": decoder(
        "DeepseekV3", num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        first_k_dense_replace=1, moe_intermediate_size=12,
    ),
    "gptoss": decoder(
        "GptOss", num_local_experts=4, num_experts_per_tok=1, head_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "dropping": lambda: Tower(4, capacity=5),
    "avoiding": lambda: Tower(4, avoided=2),
    "uneven": lambda: Tower(3),
}  # fmt: skip


def axes_of(text: str) -> tuple[str, dict[str, int], list[str]]:
    """`mixtral:pp2:full` is a Mixtral with pp 2 and full recompute; ep takes the other ranks, and `to2` is
    the ep of a run that goes on from its checkpoint.
    """
    name, *marks = text.split(":")
    axes = {mark.rstrip("0123456789"): int(mark[-1]) for mark in marks if mark[-1].isdigit()}
    return name, axes, [mark for mark in marks if not mark[-1].isdigit()]


def made(text: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    name, axes, _ = axes_of(text)
    model, dtype = CASES[name]().train(), dtype_of(text)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape)
    samples = model.samples if isinstance(model, Tower) else 4
    samples *= 1 + (axes.get("replicate", 1) * axes.get("shard", 1) > 1)
    if isinstance(model, Tower):
        kwargs = {"input_ids": torch.randn(samples, 7, 8), "labels": torch.randn(samples, 7, 8)}
        kwargs = {name: value.to(dtype) for name, value in kwargs.items()}
    else:
        ids = torch.randint(3, 61, (samples, 9))
        kwargs = {"input_ids": ids, "labels": ids}
    return model.to(dtype), Batch((), kwargs)


def plan_of(model: nn.Module, batch: Batch, text: str, ranks: int) -> Plan:
    _, axes, marks = axes_of(text)
    replicas = {f"dp_{name}": axes.get(name, 1) for name in ("replicate", "shard")}
    within = {name: axes.get(name, 1) for name in ("tp", "cp")}
    apart = axes.get("pp", 1) * prod((*replicas.values(), *within.values()))
    recompute = next((mark for mark in marks if mark in ("full", "selective")), "none")
    wishes: dict[str, Any] = {"stages": axes.get("pp", 1), "recompute": recompute}
    wishes |= {"axes": {"ep": ranks // apart, **replicas, **within}, "microbatches": axes.get("pp", 1)}
    if "zb-h1" in marks:
        wishes["schedule"] = "zb-h1"
    request = outsize.Request(sequence_parallel="sequence" in marks or None, chunks=1)
    how: dict[str, Any] = {"cluster": f"{ranks}xcpu", "request": request, **wishes}
    plan = planned_once(
        f"ep {ranks} {text}", model, lambda: outsize.plan(model, batch.args, batch.kwargs, **how)
    )
    assert plan.sequence_parallel is ("sequence" in marks)
    return plan


def plan_after(model: nn.Module, batch: Batch, text: str, ranks: int) -> Plan:
    """That of a run which goes on from the checkpoint: replicas without ep, or with another (`to`)."""
    _, axes, _ = axes_of(text)
    stages, ep = axes.get("pp", 1), axes.get("to", 1)
    mesh = {"ep": ep, "dp_replicate": ranks // stages // ep}
    how: dict[str, Any] = {"cluster": f"{ranks}xcpu", "stages": stages, "microbatches": stages, "axes": mesh}
    return planned_once(
        f"ep {ranks} {text} after",
        model,
        lambda: outsize.plan(copy.deepcopy(model), batch.args, batch.kwargs, **how),
    )


def dtype_of(text: str) -> torch.dtype:
    name, _, marks = axes_of(text)
    return torch.float32 if name == "grouped" or "single" in marks else torch.float64


def record_cases(texts: Iterable[str], ranks: int, resumed: Iterable[str]) -> None:
    """Records and plans what the ranks of a launch need, in the process that they are forks of."""
    with recorded_once():
        for text in texts:
            with all_in(dtype_of(text)):
                model, batch = made(text)
                plan = plan_of(model, batch, text, ranks)
                if text in resumed:
                    plan_after(model, batch, text, ranks)
                whole = BatchDims(rejection(model, None), None).of(batch)
                record_run(model, whole.split(plan.microbatches * plan.axes.replicas), None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss_in(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.loss


@dataclass
class Balance:
    """What a step tells of its experts' balance, the rows that this rank has computed, and what it has been
    asked to compute, call by call.
    """

    calls: ExpertParallelGroup
    rows: list[int] = field(default_factory=list[int])
    told: list[float | None] = field(default_factory=list[float | None])
    routings: list[str] = field(default_factory=list[str])

    def own_rows(self) -> int:
        return sum(counts.rows for counts in self.calls.counts.values())

    @contextmanager
    def noting_routings(self) -> Iterator[None]:
        of_rows = self.calls._of_rows  # pyright: ignore

        def noting(call: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            bits = b"".join(t.detach().contiguous().numpy().tobytes() for t in (index, weight))
            self.routings.append(call.experts.name + sha256(bits).hexdigest())
            return of_rows(call, x, index, weight)

        with mock.patch.object(self.calls, "_of_rows", noting):
            yield


def plain(
    model: nn.Module, batch: Batch, count: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of all steps, the gradients of the first, the parameters after the last, of PyTorch alone."""
    optimizer, losses, grads = adamw(model.parameters()), list[float](), dict[str, Tensor]()
    samples = len(batch.kwargs["input_ids"])
    for step in range(2 * STEPS):
        total = 0.0
        parts = zip(*(value.tensor_split(count) for value in batch.kwargs.values()), strict=True)
        for part in parts:
            share = len(part[0]) / samples
            loss = loss_in(model(**dict(zip(batch.kwargs, part, strict=True)))) * share
            (0.5 * loss).backward()
            total += loss.item()
        losses.append(total)
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses, grads, {n: p.detach() for n, p in model.named_parameters()}


def split(
    engine: Engine, batch: Batch, balance: Balance
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    losses, grads = list[float](), dict[str, Tensor]()
    for step in range(2 * STEPS):
        before = balance.own_rows()
        found = engine.step(*batch.args, update=bool(step % 2), loss_scale=0.5, **batch.kwargs)
        losses.append(found.loss.item())
        balance.rows.append(balance.own_rows() - before)
        balance.told.append(found.expert_imbalance)
        if step == 0:
            own = {n: p.grad.clone() for n, p in engine.weights.named_parameters() if p.grad is not None}
            grads = {n: engine.weights.whole(n, grad) for n, grad in own.items()}
    return losses, grads, engine.weights.full_state_dict()


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return worst({n: found[n] for n in expected}, expected)


def compared(text: str, world: World, folder: Path, *, resumes: bool) -> dict[str, Any]:
    model, batch = made(text)
    alone = copy.deepcopy(model)
    plan = plan_of(model, batch, text, world.world_size)
    options = EngineOptions(optimizer=adamw, clip_norm=CLIP, seed=SEED)
    engine = make_engine(model, plan, world.group, options)
    engine.prepare(batch)
    ranks = engine._tensor  # pyright: ignore
    calls = None if ranks is None else ranks.expert_calls
    assert calls is not None
    balance = Balance(calls)
    with balance.noting_routings():
        losses, grads, trained = split(engine, batch, balance)
    count, first = plan.microbatches * plan.axes.replicas, world.rank == 0
    box: list[Any] = [plain(copy.deepcopy(alone), batch, count) if first else None]
    dist.broadcast_object_list(box, src=0)
    expected_losses, expected_grads, expected = box[0]
    # The gradient of a key's bias is zero but for rounding, since softmax does not see it.
    top = max(g.abs().max().item() for g in expected_grads.values())
    real = {n: g for n, g in expected_grads.items() if g.abs().max() > 1e-7 * top}
    engine.evaluate(*batch.args, **batch.kwargs)
    place = folder / text.replace(":", "_")
    engine.save(place)
    states = [s for state in engine.optimizer.state.values() for s in state.values() if s.ndim]  # pyright: ignore
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)),
        "gradients": far(grads, {n: g for n, g in real.items() if n in grads}),
        "lacking": [n for n in real if n not in grads] if plan.axes.pp == 1 else [],
        "trained": far(trained, expected) if trained else 0.0,
        "resumed": resumed(alone, batch, text, world, place, trained) if resumes else None,
        "state_elements": sum(local_of(s).numel() for s in states),
        "sent": dict(calls.sent),
        "balance": (balance.rows, balance.told),
        "routings": sorted(Counter(balance.routings).values()),
        "rows": {name: (c.rows, c.expected_rows) for name, c in calls.counts.items()},
    }


def resumed(
    model: nn.Module, batch: Batch, text: str, world: World, place: Path, trained: dict[str, Tensor]
) -> float:
    """How far a step after the checkpoint is, with `plan_after`, from one of the same plan."""
    options = EngineOptions(optimizer=adamw, clip_norm=CLIP, seed=SEED)
    found: list[dict[str, Tensor]] = []
    for plan in (make(model, batch, text, world.world_size) for make in (plan_of, plan_after)):
        engine = make_engine(copy.deepcopy(model), plan, world.group, options)
        engine.prepare(batch)
        engine.state.resume(place)
        loaded = engine.weights.full_state_dict()
        assert all(torch.equal(loaded[n], t) for n, t in trained.items())
        engine.step(*batch.args, **batch.kwargs)
        found.append(engine.weights.full_state_dict())
    return worst(*found) if found[0] else 0.0


def main(folder: Path, resuming: list[str], cases: list[str]) -> None:
    torch.set_num_threads(1)
    world = join()
    found: dict[str, Any] = {}
    for text in cases:
        with all_in(dtype_of(text)):
            found[text] = compared(text, world, folder, resumes=text in resuming)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
