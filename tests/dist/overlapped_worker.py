"""One rank of four: `overlapped_worker.py FOLDER CASE...`. Forwards that run inside of other microbatches'
backwards have the bits of one microbatch after the other on the same mesh.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from experts_worker import Tower, decoder
from launches import planned_once, record_run
from recorded_once import recorded_once
from tensor_models import SMALL, transformer
from torch import Tensor, nn

import outsize
from outsize.device.alternation import Alternation
from outsize.ir.plan import Plan
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

COUNT, SEED, STEPS = 6, 5, 2
PLAIN: Final = "naive"
OVERLAPPED: Final = ("1f1b-overlap", "dualpipe-v")
GPT2: Final[dict[str, Any]] = {
    "vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24,
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# What is trained, and the axis of two ranks; `full` recomputes, `bf16` is autocast, `gloo` the backend.
MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "llama": lambda: transformer("LlamaForCausalLM", "LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "gpt2": lambda: transformer("GPT2LMHeadModel", "GPT2Config", GPT2),
    "mixtral": decoder("Mixtral", num_local_experts=5, num_experts_per_tok=2, output_router_logits=True),
    "dispatched": decoder("Mixtral", num_local_experts=4, num_experts_per_tok=1),
    "tower": lambda: Tower(COUNT, avoided=2),
}


def made(case: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    name, axis, *_ = case.split(":")
    model, samples = MODELS[name]().train(), COUNT * (2 if axis == "ep" else 1)
    if isinstance(model, Tower):
        kwargs = {"input_ids": torch.randn(samples, 7, 8), "labels": torch.randn(samples, 7, 8)}
        return model, Batch((), kwargs)
    ids = torch.randint(3, 61, (samples, 9))
    return model, Batch((), {"input_ids": ids, "labels": ids})


def plan_of(case: str, schedule: str) -> Plan:
    (model, batch), (_, axis, *marks) = made(case), case.split(":")
    how: dict[str, Any] = {"axes": {axis: 2}, "recompute": "full" if "full" in marks else "none"}
    with casting(case):
        return planned_once(
            f"overlap {case} {schedule}",
            model,
            lambda: outsize.plan(
                model, batch.args, batch.kwargs, cluster="4xcpu", stages=2,
                microbatches=COUNT, schedule=schedule, **how,
            ),
        )  # fmt: skip


def casting(case: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if "bf16" in case.split(":") else nullcontext()


def exchanging(case: str) -> AbstractContextManager[Any]:
    """Within the context of a case of gloo ranks exchange by their backend, as on several machines."""
    by_backend = mock.patch.object(RankCollectives, "_shared", return_value=None)
    return by_backend if "gloo" in case.split(":") else nullcontext()


def record_cases(cases: Iterable[str]) -> None:
    """Plans and records what the ranks need, in the process that they are forks of."""
    with recorded_once():
        for case in cases:
            model, batch = made(case)
            for schedule in (PLAIN, *OVERLAPPED):
                plan_of(case, schedule)
            with casting(case):
                record_run(model, batch.split(len(batch.kwargs["input_ids"])), None)


def trained(case: str, schedule: str, world: World) -> tuple[dict[str, Tensor], int]:
    """All values after some steps, by name, and how many pairs have alternated on this rank."""
    model, batch = made(case)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    plan = plan_of(case, schedule)
    engine = make_engine(copy.deepcopy(model), plan, world.group, EngineOptions(optimizer=sgd, seed=SEED))
    values, pairs = dict[str, Tensor](), list[None]()
    run = Alternation.run

    def counted(*args: Any) -> None:
        pairs.append(None)
        run(*args)

    with mock.patch.object(Alternation, "run", counted), casting(case), exchanging(case):
        for step in range(STEPS):
            values[f"loss {step}"] = engine.step(*batch.args, **batch.kwargs).loss
    return values | engine.weights.full_state_dict(), len(pairs)


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    world, found = join(), dict[str, Any]()
    for case in cases:
        expected, none = trained(case, PLAIN, world)
        assert none == 0
        for schedule in OVERLAPPED:
            values, pairs = trained(case, schedule, world)
            common = values.keys() & expected.keys()
            wrong = sorted(name for name in common if not torch.equal(values[name], expected[name]))
            found[f"{case} {schedule}"] = {"wrong": wrong, "compared": len(common), "pairs": pairs}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
