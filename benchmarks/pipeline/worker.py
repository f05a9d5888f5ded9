"""One pinned rank: outsize and torch.distributed.pipelining on the same hand-cut stages, A B A B.

Writes one JSON per rank: per system and round the step seconds, and outsize's compute spans per action.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.train.world.join import join
from outsize.train.world.world import leave

VOCABULARY = 256


def build(layers: int, width: int, length: int) -> nn.Module:
    """The GPT-2 of both systems; embeddings untied, since torch's stages cannot share a weight."""
    hf = import_transformers()
    config = hf.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        n_positions=length,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(config).train()


class Half(nn.Module):
    """What a torch user writes by hand: one half of the blocks, with the embeddings or the head."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        core = model.transformer
        half = len(core.h) // 2
        self.first = first
        self.blocks = nn.ModuleList(core.h[:half] if first else core.h[half:])
        self.wte, self.wpe = (core.wte, core.wpe) if first else (None, None)
        self.norm, self.head = (None, None) if first else (core.ln_f, model.lm_head)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids in for the first half; logits out of the second."""
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1])[None])
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x if self.first else self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Next-token loss on [batch, length, vocabulary] and [batch, length]."""
    return F.cross_entropy(logits.view(-1, VOCABULARY), target.reshape(-1))


def outsize_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The same on the transformers output."""
    return loss_of(output["logits"], target)


def outsize_step(
    options: argparse.Namespace, ids: Tensor, target: Tensor
) -> tuple[Callable[[], None], outsize.Engine]:
    """A training step (forward and backward) of the engine, cut where torch's halves are cut."""
    model = build(options.layers, options.width, options.length)
    part = len(ids) // options.microbatches
    example = {"input_ids": ids[:part]}
    graph = outsize.capture(model, (), example, loss_fn=outsize_loss, target=target[:part])
    names = [u.name for u in graph.units]
    middle = next(i for i, n in enumerate(names) if n.startswith(f"transformer.h.{options.layers // 2}."))
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="2xcpu",
        axes=Axes(pp=2),
        batch_size=len(ids),
        microbatches=options.microbatches,
        schedule=options.schedule,
        stages=stages_from_bounds(graph, (0, middle, len(names)), ("cpu:0", "cpu:1")),
    )
    engine = outsize.parallelize(
        model, (), {"input_ids": ids}, plan=plan, loss_fn=outsize_loss, target=target
    )

    def step() -> None:
        engine.step(input_ids=ids, target=target, update=False)

    return step, engine


def torch_step(
    options: argparse.Namespace, rank: int, ids: Tensor, target: Tensor
) -> tuple[Callable[[], None], nn.Module]:
    """The same step with torch.distributed.pipelining."""
    half = Half(build(options.layers, options.width, options.length), first=rank == 0)
    part = ids[: len(ids) // options.microbatches]
    hidden = torch.zeros(len(part), options.length, options.width, requires_grad=True)
    example, result = (part, hidden) if rank == 0 else (hidden, torch.zeros(*part.shape, VOCABULARY))
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), input_args=(example,), output_args=(result,))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[options.schedule]
    schedule = kind(stage, n_microbatches=options.microbatches, loss_fn=loss_of)

    def step() -> None:
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=target, losses=[])

    return step, half


def timed(step: Callable[[], None], model: nn.Module, count: int) -> list[float]:
    """Seconds of `count` steps, each between two barriers."""
    laps = []
    for _ in range(count):
        for p in model.parameters():
            p.grad = None
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        laps.append(time.perf_counter() - start)
    return laps


def spans_of(engine: outsize.Engine) -> dict[str, list[float]]:
    """Compute seconds by `stage kind` of the last step, all ranks."""
    found: dict[str, list[float]] = {}
    for span in engine.timeline().spans:
        if span.lane == "compute":
            key = span.action.rstrip("0123456789")
            found.setdefault(key, []).append(span.duration_s)
    return found


def main() -> None:
    """Rounds of both systems, A B A B."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("width", 256), ("length", 256), ("batch", 16), ("microbatches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    world = join()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    torch.set_num_threads(1)
    ids = torch.randint(
        0, VOCABULARY, (options.batch, options.length), generator=torch.Generator().manual_seed(1)
    )
    target = torch.roll(ids, -1, 1)
    ours, engine = outsize_step(options, ids, target)
    theirs, half = torch_step(options, world.rank, ids, target)
    timed(ours, engine.model, 2), timed(theirs, half, 2)
    result: dict[str, list[float]] = {"outsize": [], "torch": []}
    spans: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        result["outsize"] += timed(ours, engine.model, options.steps)
        for key, seconds in spans_of(engine).items():
            spans.setdefault(key, []).extend(seconds)
        result["torch"] += timed(theirs, half, options.steps)
    if world.rank == 0:
        compute = {key: statistics.median(seconds) for key, seconds in spans.items()}
        options.out.write_text(json.dumps({"steps_s": result, "compute_s": compute}))
    leave(world)


if __name__ == "__main__":
    main()
