"""Run by test_layouts.py, one process per rank: `layouts_worker.py FOLDER JSON-of-axes MODEL...`.

A model is a case of the zoo, or a case with one of WAYS behind it (`llama eager`).

Optimizer steps of two accumulated batches each, clipped, against the plain loop of one process, whose
numbers are in FOLDER (rank 0 makes what is not there). Leaves FOLDER/rank<r>.json: for each model and
precision the largest distance of the losses, of the first gradients and of the last parameters, each relative
to its tensor's largest element, and how far the plain loop's own norm is off; or why the layout is refused.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_runs import SEED, batch_of, fresh
from tensor_worker import all_in, worst
from zoo import Case, case

import outsize
from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.run.collectives.tensor_parallel import full_of
from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import LossShares
from outsize.train.check.reference import reference_step
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

STEPS, MICROBATCHES, CLIP = 3, 4, 0.5
DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64}
# In fp32 an activation near zero changes its sign with a rounding of the first step's gradients, and its ReLU
# the gradient with it: behind that step the plain loop does not find its own numbers again.
KINKED: Final = ("resnet18", "deeplabv3_resnet")
Numbers = dict[str, Tensor]


def zoo_case(name: str) -> Case:
    """The model's case of the zoo."""
    return case(name.split()[0])


def eager(model: Any, batch: Batch) -> Batch:
    """Attention that writes its mask and its scores out."""
    model.set_attn_implementation("eager")
    return batch


def packed(model: Any, batch: Batch) -> Batch:
    """Two documents in each row: the second one begins at position 0 and does not see the first."""
    ids = batch.kwargs["input_ids"]
    size, first = ids.shape[1], ids.shape[1] // 3
    places = torch.cat([torch.arange(first), torch.arange(size - first)]).repeat(len(ids), 1)
    return Batch(batch.args, {**batch.kwargs, "position_ids": places}, batch.target)


def padded(model: Any, batch: Batch) -> Batch:
    """Every sample ends in padding."""
    mask = torch.ones_like(batch.kwargs["input_ids"])
    mask[:, -3:] = 0
    return Batch(batch.args, {**batch.kwargs, "attention_mask": mask}, batch.target)


WAYS: Final = {"eager": eager, "packed": packed, "padded": padded}


def steps_of(name: str, dtype: torch.dtype) -> int:
    """Of the optimizer."""
    return 1 if name in KINKED and dtype == torch.float32 else STEPS


def optimizer_of(dtype: torch.dtype, parameters: Any) -> torch.optim.Optimizer:
    if dtype == torch.float64:
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    kind, *ways = name.split()
    model = fresh(kind).to(dtype)
    implementation: Any = getattr(model, "set_experts_implementation", None)
    if dtype == torch.float64 and implementation is not None:
        implementation("eager")  # Grouped products have no float64.
    batch = batch_of(case(kind)).mapped(cast)
    for way in ways:
        batch = WAYS[way](model, batch)
    return model, batch


def plain(name: str, dtype: torch.dtype, steps: int, draw: int = 0) -> dict[str, Any]:
    """Losses of all steps, gradients of the first, parameters after the last; `draw`: rounded otherwise."""
    model, batch = made(name, dtype)
    parts, optimizer = batch.split(MICROBATCHES), optimizer_of(dtype, model.parameters())
    tape = record(model, parts[0].args, parts[0].kwargs, zoo_case(name).loss, parts[0].target)
    shares = [share / 2 for share in LossShares(tape, model).of(parts)]
    losses: list[Tensor] = []
    grads, norm_off = Numbers(), 0.0
    for step in range(2 * steps):
        seeds = [seeder(SEED, step, mb) for mb in range(MICROBATCHES)]
        loss = reference_step(model, tape, parts, shares, seeds, zoo_case(name).loss).loss
        assert loss is not None
        losses.append(2 * loss)
        if not step:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if step % 2:
            if draw:
                round_otherwise(model, draw + step)
            exact = nn.utils.get_total_norm(
                [p.grad.double() for p in model.parameters() if p.grad is not None]
            )
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            norm_off = max(norm_off, float((norm / exact - 1).abs()))
            optimizer.step()
            optimizer.zero_grad()
    trained = {n: p.detach() for n, p in model.named_parameters()}
    return {"loss": torch.stack(losses), "gradients": grads, "trained": trained, "norm": norm_off}


def round_otherwise(model: nn.Module, seed: int) -> None:
    """Each gradient an ulp more, an ulp less or as it is: as if they had been added up in another order."""
    draw = torch.Generator().manual_seed(seed)
    for grad in (p.grad for p in model.parameters() if p.grad is not None):
        ulps = torch.randint(-1, 2, grad.shape, generator=draw).to(grad.dtype)
        grad.mul_(1 + torch.finfo(grad.dtype).eps * ulps)


def expected_of(folder: Path, name: str, precision: str, rank: int) -> dict[str, Any]:
    """The plain loop's numbers, made once for all layouts."""
    path = folder / f"{name}-{precision}.pt"
    if rank == 0 and not path.exists():
        dtype = DTYPES[precision]
        torch.save(plain(name, dtype, steps_of(name, dtype)), path)
    dist.barrier()
    return torch.load(path, mmap=True)


def engine_of(name: str, dtype: torch.dtype, axes: dict[str, int], world: World) -> tuple[Engine, Batch]:
    model, batch = made(name, dtype)
    loss, target = zoo_case(name).loss, batch.target or None
    mesh = {axis: size for axis, size in axes.items() if axis != "pp"}
    replicas = prod(axes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "ep"))
    plan = outsize.plan(
        model, batch.args, batch.kwargs, cluster=f"{world.world_size}xcpu", loss_fn=loss, target=target,
        microbatches=MICROBATCHES // replicas, stages=axes.get("pp"), axes=mesh,
    )  # fmt: skip
    engine = make_engine(
        model,
        plan,
        world.group,
        EngineOptions(
            loss_fn=loss,
            seed=SEED,
            clip_norm=CLIP,
            optimizer=lambda parameters: optimizer_of(dtype, parameters),
        ),
    )
    return engine, batch


def split(engine: Engine, batch: Batch, steps: int) -> dict[str, Any]:
    """The same by the engine, whole on every rank that has a part of it."""
    losses, grads = [], Numbers()
    for step in range(2 * steps):
        found = engine.step(
            *batch.args, target=batch.target or None, update=bool(step % 2), loss_scale=0.5, **batch.kwargs
        )
        losses.append(found.loss)
        if not step:
            own = [(n, p.grad) for n, p in engine.weights.named_parameters() if p.grad is not None]
            grads = {n: whole(engine, n, grad).clone() for n, grad in own}
    trained = {n: whole(engine, n, p.detach()) for n, p in engine.weights.named_parameters()}
    return {"loss": torch.stack(losses), "gradients": grads, "trained": trained}


def whole(engine: Engine, name: str, part: Tensor) -> Tensor:
    tensor = engine._tensor  # pyright: ignore[reportPrivateUsage]
    full = full_of(part)
    return full if tensor is None else tensor.gathered(name, full)


def distances(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Of what this rank has."""
    far = {"loss": float(((found["loss"] - expected["loss"]) / expected["loss"]).abs().max())}
    far["norm"] = expected["norm"]
    for kind in ("gradients", "trained"):
        own = {n: t.to(expected[kind][n].dtype) for n, t in found[kind].items()}
        far[kind] = worst(own, {n: expected[kind][n] for n in own})
    return far


def compared(
    name: str, precision: str, axes: dict[str, int], world: World, folder: Path
) -> dict[str, float] | str:
    dtype = DTYPES[precision]
    with all_in(dtype):
        try:
            engine, batch = engine_of(name, dtype, axes, world)
        except BadOption as refused:
            return str(refused)
        expected = expected_of(folder, name, precision, world.rank)
        return distances(split(engine, batch, steps_of(name, dtype)), expected)


def main(folder: Path, axes: dict[str, int], cases: list[str]) -> None:
    torch.set_num_threads(1)
    world, found = join(), {}
    for asked in cases:
        name, precision = asked.split(":")
        found[asked] = compared(name, precision, axes, world, folder)
        (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
