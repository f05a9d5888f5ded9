"""Run by test_context.py, one process per rank: plans with cp against the plain loop of one process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launches import planned_once, record_run
from recorded_once import recorded_once
from tensor_models import MODELS, decoder, gpt2, t5, transformer
from tensor_plan_worker import CASES, CLIP, SEED, STEPS, adamw, loss, loss_of, made, plain
from tensor_worker import all_in, worst
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Plan
from outsize.policies import heads
from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

VIT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": 8, "patch_size": 2, "num_labels": 3,
}  # fmt: skip


def eager(made_model: Any) -> Any:
    """The model with eager attention, whose dropout masks are drawn whole."""
    model, args, kwargs = made_model
    model.set_attn_implementation("eager")
    return model, args, kwargs


def vit() -> Any:
    images = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])}
    return transformer("ViTForImageClassification", "ViTConfig", VIT), (), images


def padded() -> Any:
    model, args, kwargs = decoder("Llama")
    mask = torch.ones_like(kwargs["input_ids"])
    mask[0, -3:] = 0
    return model, args, {**kwargs, "attention_mask": mask}


def batch_first_encoder() -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.train(), (torch.randn(2, 7, 16),), {}


def tokens_first_encoder() -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = True
    return model.train(), (torch.randn(7, 4, 16),), {"src_key_padding_mask": padding}


OWN_CASES: dict[str, Any] = {
    **CASES,
    "shallow": lambda: decoder("Llama", num_hidden_layers=1),
    "gpt2 eager": lambda: eager(gpt2(0.2)),
    "t5": lambda: eager(t5(0.2)),
    "vit": vit,
    "padded": padded,
    "encoder": batch_first_encoder,
    "tokens first": tokens_first_encoder,
    "window": lambda: decoder("Mistral", sliding_window=4),
    "gemma": lambda: decoder("Gemma2", head_dim=8, sliding_window=4),
    "qwen3": MODELS["qwen3"],
}
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
SINGLE = {"mixtral"}  # torch's grouped matmul has no float64


def axes_of(text: str) -> tuple[str, dict[str, int], dict[str, Any]]:
    """`llama:pp2:full` is a llama with pp 2 and full recompute; cp takes the other ranks."""
    name, *marks = text.split(":")
    axes = {mark.rstrip("0123456789"): int(mark[-1]) for mark in marks if mark[-1].isdigit()}
    options: dict[str, Any] = {"recompute": "none"}
    for mark in marks:
        if mark in ("full", "selective", "offload", "streamed"):
            options["recompute"] = mark
        elif mark == "sharded":
            options["weights"] = mark
        elif mark == "pieces":
            options |= {"loss_pieces": 3, "module_pieces": 2}
        elif mark == "sequence":
            options["sequence_parallel"] = True
    return name, axes, options


def plan_of(model: nn.Module, batch: Batch, text: str, ranks: int) -> Plan:
    _, axes, options = axes_of(text)
    replicas = {f"dp_{name}": axes.get(name, 1) for name in ("replicate", "shard")}
    pp, tp, parts = axes.get("pp", 1), axes.get("tp", 1), replicas["dp_replicate"] * replicas["dp_shard"]
    wishes: dict[str, Any] = {
        "stages": pp,
        "axes": {"tp": tp, "cp": ranks // (pp * tp * parts), **replicas},
        **options,
    }
    wishes |= {"microbatches": 2 // parts}
    request = outsize.Request(cluster=f"{ranks}xcpu", **wishes)
    return planned_once(
        f"cp {ranks} {text}",
        model,
        lambda: outsize.plan(model, batch.args, batch.kwargs, request=request, **loss(batch)),
    )


def dtype_of(text: str) -> torch.dtype:
    name = axes_of(text)[0]
    return torch.float32 if name in SINGLE or text.endswith(":single") else torch.float64


@contextmanager
def gathering(text: str) -> Iterator[None]:
    """Where the case says so, keys and values are gathered one head at a time, however few they are."""
    before = heads.PIECE_BYTES
    heads.PIECE_BYTES = 1 if "heads" in text.split(":") else before  # pyright: ignore
    yield
    heads.PIECE_BYTES = before  # pyright: ignore


def record_cases(texts: Iterable[str], ranks: int) -> None:
    """Records what the ranks of a launch need, in the process that they are forks of."""
    with recorded_once():
        for text in texts:
            with all_in(dtype_of(text)), gathering(text):
                model, batch = made(axes_of(text)[0], dtype_of(text), OWN_CASES)
                plan_of(model, batch, text, ranks)
                dims = BatchDims(rejection(model, loss_of), loss(batch)["batch_dims"])
                record_run(model, dims.of(batch).split(2), loss_of)


def split(engine: Engine, batch: Batch) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses, the gradients of the first step, and parameters after the last, of the engine."""
    losses, grads = list[float](), dict[str, Tensor]()
    for step in range(2 * STEPS):
        found = engine.step(*batch.args, update=bool(step % 2), loss_scale=0.5, **batch.kwargs)
        losses.append(found.loss.item())
        if step == 0:
            own = [(n, p.grad.clone()) for n, p in engine.weights.named_parameters() if p.grad is not None]
            grads = {n: engine.weights.whole(n, grad) for n, grad in own}
    return losses, grads, engine.weights.full_state_dict()


def prompt(batch: Batch) -> dict[str, Tensor]:
    """What to go on from."""
    return {"input_ids": batch.kwargs["input_ids"][:, :4]}


def alone_tokens(model: Any, trained: dict[str, Tensor], batch: Batch) -> Tensor:
    """What the model itself generates with these weights."""
    model.load_state_dict(trained)
    with torch.no_grad():
        return model.eval().generate(**prompt(batch), **GREEDY)


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return worst({n: found[n] for n in expected}, expected)


def compared(text: str, world: World, folder: Path) -> dict[str, Any]:
    model, batch = made(axes_of(text)[0], dtype_of(text), OWN_CASES)
    alone = copy.deepcopy(model)
    plan = plan_of(model, batch, text, world.world_size)
    compiled = "aot_eager" if "compiled" in text.split(":") else None
    options = EngineOptions(optimizer=adamw, clip_norm=CLIP, seed=SEED, compiled=compiled, **loss(batch))
    engine = make_engine(model, plan, world.group, options)
    engine.prepare(batch)
    dims = BatchDims(rejection(alone, loss_of), loss(batch)["batch_dims"])
    losses, grads, trained = split(engine, batch)
    # Rank 0 runs the plain loop, for all.
    plainly = [plain(alone, batch, dims.of(batch).split(2)) if world.rank == 0 else None]
    box: list[Any] = plainly
    dist.broadcast_object_list(box, src=0)
    expected_losses, expected_grads, expected = box[0]
    # The gradient of a key's bias is zero but for rounding, since softmax does not see it.
    top = max(g.abs().max().item() for g in expected_grads.values())
    real = {n: g for n, g in expected_grads.items() if g.abs().max() > 1e-7 * top}
    evaluated = engine.evaluate(*batch.args, **batch.kwargs).outputs
    generates = "generated" in text.split(":")
    tokens = engine.generate(**prompt(batch), **GREEDY) if generates else None
    engine.save(folder / text.replace(":", "_"))
    again = make_engine(copy.deepcopy(alone), plan, world.group, options)
    again.prepare(batch)
    again.state.resume(folder / text.replace(":", "_"))
    loaded = again.weights.full_state_dict()
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)),
        "gradients": far(grads, {n: g for n, g in real.items() if n in grads}),
        "trained": far(trained, {n: expected[n] for n in real}) if trained else 0.0,
        "outputs": evaluated is not None,
        "loaded": all(torch.equal(loaded[n], t) for n, t in trained.items()),
        "generated": not trained
        or tokens is None
        or torch.equal(tokens, alone_tokens(alone, trained, batch)),
        "sent": dict(engine._executor.variants._options.context.group.group.collectives.sent),  # pyright: ignore
    }


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    world = join()
    found: dict[str, Any] = {}
    for text in cases:
        with all_in(dtype_of(text)), gathering(text):
            found[text] = compared(text, world, folder)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
