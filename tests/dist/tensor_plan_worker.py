"""Run by test_tensor_plans.py, one process per rank: plans with tp against the plain loop of one process."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from launches import planned_once
from recorded_once import recorded_once
from safetensors.torch import save_file
from tensor_models import MODELS, Made
from tensor_worker import all_in, doubled, loss_of, worst
from torch import Tensor, nn

import outsize
from outsize.capture.graph.build import build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.schedule import Action
from outsize.ir.units.names import compress_units
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.evaluate_plan import timeline
from outsize.program.tape import Tape
from outsize.run.collectives.tensor_parallel import full_of
from outsize.run.stage.rng import borrowed_generators, seeder
from outsize.run.weights.safetensors import WeightFiles
from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.batch.loss_trials import LossTrial
from outsize.train.batch.loss_weights import LossShares
from outsize.train.check.reference import reference_step
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

CLIP, SEED, STEPS = 0.5, 5, 2
Numbers = dict[str, Tensor]
Sent = dict[str, int]


def convolutional() -> Made:
    """Convolutions and their statistics stay whole, the classifier is divided."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 5))
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*body, head).train(), (torch.randn(4, 3, 16, 16),), {}


CASES = {name: MODELS[name] for name in ("llama", "gpt2", "bert", "t5", "vit", "mixtral", "encoder", "qwen3")}
CASES["convolutional"] = convolutional
NO_DOUBLE = {"mixtral"}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def made(name: str, dtype: torch.dtype, cases: Mapping[str, Any] = CASES) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, args, kwargs = cases[name]()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape)  # no bias of zeros, whose rounding Adam would blow up
    if dtype == torch.float64:
        args, kwargs = doubled(args), dict(zip(kwargs, doubled(kwargs.values()), strict=True))
    return model.to(dtype), Batch(tuple(args), kwargs)


@final
@dataclass(frozen=True)
class Case:
    """A model and how it is divided; see `main`."""

    name: str
    dtype: torch.dtype
    ranks: int
    replicas: int = 1
    recompute: str = "none"
    sequence: bool = False


def parsed(text: str, number: int, ranks: int) -> Case:
    """The case of this text, the `number`-th of a launch of so many ranks."""
    name, *marks = text.split(":")
    double = (ranks > 2 or "double" in marks) and name not in NO_DOUBLE
    return Case(
        name,
        torch.float64 if double else torch.float32,
        ranks,
        replicas=next((int(mark) for mark in marks if mark.isdigit()), 1),
        recompute=("none", "full", "selective")[number % 3 if ranks > 2 else 0],
        sequence="sequence" in marks,
    )


def record_cases(texts: Iterable[str], ranks: int) -> None:
    """Records what the ranks of a launch need, in the process that they are forks of."""
    with recorded_once():
        for case in (parsed(text, number, ranks) for number, text in enumerate(texts)):
            with all_in(case.dtype):
                model, batch = made(case.name, case.dtype)
                plan_of(model, batch, case)
                dims = BatchDims(rejection(model, loss_of), loss(batch)["batch_dims"])
                styled(model, dims.of(batch).split(2))


def plan_of(model: nn.Module, batch: Batch, case: Case) -> Plan:
    """Two ranks share a stage, so many pipelines the batch's two microbatches, and stages the rest."""
    replicas = case.replicas
    stages = case.ranks // (2 * replicas)
    request = outsize.Request(
        cluster=f"{case.ranks}xcpu",
        stages=stages,
        microbatches=2 // replicas,
        axes={"tp": 2, "dp_replicate": replicas},
        recompute=case.recompute,
        sequence_parallel=case.sequence,
    )

    def make() -> Plan:
        plan = outsize.plan(model, batch.args, batch.kwargs, request=request, **loss(batch))
        return some_recomputed(plan, model, batch) if case.recompute == "selective" else plan

    return planned_once(f"tp {case}", model, make)


def some_recomputed(plan: Plan, model: nn.Module, batch: Batch) -> Plan:
    """A plan where memory would ask for nothing: of three units two are recomputed, also within layers."""
    graph = outsize.capture(model, batch.args, batch.kwargs, loss_fn=loss_of)
    names, bounds = [unit.name for unit in graph.units], plan.bounds(graph)
    chosen = [[unit for unit in range(*run) if unit % 3] for run in pairwise(bounds)]
    stages = (
        stage.model_copy(update={"recompute": "selective", "recomputed": compress_units(names, units)})
        for stage, units in zip(plan.stages, chosen, strict=True)
    )
    return plan.model_copy(update={"stages": tuple(stages)})


def loss(batch: Batch) -> dict[str, Any]:
    dims = {0: 1} if "src_key_padding_mask" in batch.kwargs else None
    return {"loss_fn": loss_of, "batch_dims": dims}


def plain(model: nn.Module, batch: Batch, parts: list[Batch]) -> tuple[list[float], Numbers, Numbers]:
    """Losses of all steps, the gradients of the first, the parameters after the last."""
    tapes = {id(part): record(model, part.args, part.kwargs, loss_of, ()) for part in parts}
    first = tapes[id(parts[0])]

    def tape_of(part: Batch) -> Tape:
        return tapes[id(part)]

    counter = LossShares(first, model, trial=LossTrial(loss_of, parts[0], lambda _: first))
    optimizer, losses, grads = adamw(model.parameters()), list[float](), Numbers()
    for step in range(2 * STEPS):
        seeds = [seeder(SEED, step, mb) for mb in range(2)]
        shares = [share / 2 for share in counter.of(parts)]
        with borrowed_generators():
            found = reference_step(model, tape_of, parts, shares, seeds, loss_of)
        assert found.loss is not None
        losses.append(found.loss.item() * 2)
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses, grads, {n: p.detach() for n, p in model.named_parameters()}


def styled(model: nn.Module, parts: list[Batch]) -> list[ModelGraph]:
    """The model at the size of each microbatch, with what tp divides of it."""
    tapes = [record(model, part.args, part.kwargs, loss_of, ()) for part in parts]
    return [with_styles(build_graph(tape, model), model) for tape in tapes]


def counted(graphs: list[ModelGraph], sequence: bool) -> Sent:
    """Bytes of a step's all-reduces, and of its gathers and reduce-scatters, in the planner's account."""
    each = [u.in_sequence if sequence else u.divided for graph in graphs for u in graph.units]
    gathered = sum(of.forward_gather + of.backward_gather for of in each)
    return {"summed": sum(of.forward_sum + of.backward_sum for of in each), "gathered": gathered}


def crossing(engine: Engine) -> Counter[str]:
    """Bytes of forwards and backwards that this rank sends to other stages from now on."""
    transport, found = engine.crew._transport, Counter[str]()  # pyright: ignore
    send = transport.send

    def counting(peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        if tensor is not None:
            found["SEND_B" if channel % 2 else "SEND_F"] += tensor.numel() * tensor.element_size()
        send(peer, channel, microbatch, tensor)

    transport.send = counting
    return found


def foretold(plan: Plan, graphs: list[ModelGraph], rank: int) -> dict[str, float]:
    """The same as the planner plays it, with each microbatch's size in turn: seconds at a byte a second."""
    cluster = parse_cluster(plan.cluster)
    link = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1.0})
    slow = cluster.model_copy(update={"inner": link, "outer": link})
    played = [timeline(plan, graph, roofline(graph, cluster.devices[0]), slow) for graph in graphs]
    spans = [span for of in played for span in of.spans if span.lane == "send" and span.rank == rank]
    found = Counter[str]()
    for span in spans:
        found[str(Action.parse(span.action).kind)] += (span.end_s - span.start_s) / len(graphs)
    return dict(found)


def split(engine: Engine, batch: Batch) -> tuple[list[float], Numbers, Sent, Numbers]:
    """The same with the engine; every rank has the gradients of whole weights, and what it sent for them."""
    losses, grads, sent = list[float](), Numbers(), Sent()
    tensor = tensor_of(engine)
    for step in range(2 * STEPS):
        found = engine.step(*batch.args, update=bool(step % 2), loss_scale=0.5, **batch.kwargs)
        losses.append(found.loss.item())
        if step == 0:
            kinds = tensor.group.collectives.sent
            sent = {
                "summed": kinds["all_reduce"],
                "gathered": kinds["all_gather"] + kinds["reduce_scatter"],
            }
            own = [(n, p.grad.clone()) for n, p in engine.weights.named_parameters() if p.grad is not None]
            grads = {n: tensor.gathered(n, full_of(grad)) for n, grad in own}
    return losses, grads, sent, engine.weights.full_state_dict()


def tensor_of(engine: Engine) -> DividedWeights:
    found = engine._tensor  # pyright: ignore[reportPrivateUsage]
    assert found is not None
    return found


def features(folder: Path, world: World) -> dict[str, Any]:
    """What a training loop does besides steps, on a Llama."""
    model, batch = made("llama", torch.float32)
    alone = copy.deepcopy(model).eval()
    files = folder / "model.safetensors"
    if world.rank == 0:
        save_file(alone.state_dict(), files)
    dist.barrier()
    with torch.device("meta"):
        empty = type(model)(model.config)
    plan = plan_of(model, batch, Case("llama", torch.float32, world.world_size))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    engine = make_engine(
        empty.train(),
        plan,
        world.group,
        EngineOptions(
            optimizer=adamw, scaler=scaler, clip_norm=CLIP, weights=WeightFiles(files), **loss(batch)
        ),
    )
    engine.prepare(batch)
    state = engine.weights.full_state_dict()
    longer = {k: torch.cat([v, v.flip(1)], 1) for k, v in batch.kwargs.items()}
    outputs = engine.evaluate(**longer).outputs
    logits = None if outputs is None else torch.cat([out.logits for out in outputs])
    with torch.no_grad():
        expected = alone(**longer).logits
    engine.weights.full_state_dict(folder / "saved", shard_bytes=4000)
    again = WeightFiles(folder / "saved")
    names = {n: torch.empty_like(t) for n, t in alone.state_dict().items() if n in again}
    for name, into in names.items():
        into.copy_(again.box(name))
    before = {n: p.detach().clone() for n, p in engine.weights.named_parameters()}
    engine.step(**batch.kwargs, update=False)
    grads = [p.grad for _, p in engine.weights.named_parameters() if p.grad is not None]
    if world.rank == 1:
        grads[0].fill_(torch.inf)
    engine.update()
    kept = all(torch.equal(p, before[n]) for n, p in engine.weights.named_parameters())
    engine.step(**batch.kwargs)
    moved = any(not torch.equal(p, before[n]) for n, p in engine.weights.named_parameters())
    try:
        engine.generate(batch.kwargs["input_ids"])
        refusal = ""
    except BadOption as error:
        refusal = str(error)
    return {
        "loaded": not state or all(torch.equal(state[n], t) for n, t in alone.state_dict().items()),
        "evaluated": 0.0 if logits is None else worst({"logits": logits}, {"logits": expected}),
        "saved": all(torch.equal(t, alone.state_dict()[n]) for n, t in names.items()) and len(names) > 10,
        "overflow": [kept, moved, scaler.get_scale()],
        "refusal": refusal,
        "largest": max(p.numel() for p in engine.model.parameters() if not p.is_meta),
    }


def compared(case: Case, world: World) -> dict[str, Any]:
    model, batch = made(case.name, case.dtype)
    alone = copy.deepcopy(model)
    plan = plan_of(model, batch, case)
    engine = make_engine(
        model, plan, world.group, EngineOptions(optimizer=adamw, clip_norm=CLIP, seed=SEED, **loss(batch))
    )
    engine.prepare(batch)
    held, parts = sum(p.numel() for _, p in engine.weights.named_parameters()), engine._split.of_batch(batch)  # pyright: ignore
    graphs, crossed = styled(made(case.name, case.dtype)[0], parts), crossing(engine)
    losses, grads, sent, trained = split(engine, batch)
    # Rank 0 runs the plain loop, for all.
    box: list[Any] = [plain(alone, batch, parts) if world.rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    expected_losses, expected_grads, expected = box[0]
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)),
        "gradients": worst(grads, {n: g for n, g in expected_grads.items() if n in grads}),
        "trained": worst({n: trained[n] for n in expected}, expected) if trained else 0.0,
        "names": list(trained) == (list(alone.state_dict()) if world.rank == 0 else []),
        "share": held / sum(p.numel() for p in alone.parameters()),
        "sent": sent,
        "counted": counted(graphs, plan.sequence_parallel),
        "crossed": {kind: size / (2 * STEPS) for kind, size in crossed.items()},
        "foretold": foretold(plan, graphs, engine.crew.rank),
    }


def main(folder: Path, cases: list[str]) -> None:
    """`llama` with all ranks in a pipeline of pairs, `llama:2` with so many replicas of it.

    `llama:sequence` also divides what lies between layers, `llama:double` is in float64 in any case.
    """
    torch.set_num_threads(1)
    world = join()
    found: dict[str, Any] = {}
    for number, text in enumerate(cases):
        case = parsed(text, number, world.world_size)
        with all_in(case.dtype):
            found[text] = compared(case, world)
    if not any("sequence" in text for text in cases):
        found["features"] = features(folder, world)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
