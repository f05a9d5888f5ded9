"""Plans four models of which RoundPipe publishes tokens a second, on the same devices, beside its figures.

Weights are on meta and nothing runs. Published are tokens a second of all devices, from RoundPipe's page
(published_runs_3.csv and issue 40); it names neither batch nor length, so each row says ours. RoundPipe has
weights of two bytes on the devices, sums in float16, and an optimizer that is one step behind; outsize plans
autocast to float16 with the same sums over weights of four bytes, and the optimizer of the same step. The
235B with adapters has bfloat16, since its frozen weights are of two bytes there as well, and copies are what
it waits for. Which layers have adapters there is not in our table: one row has them on attention, and one
on all linear layers, which with peft are the stacks of experts as well.

    planned    the plan that the search picks among all axes, of kernels op by op
    compiled   the same of inductor's kernels (`compiled=True`)
    on host    the plan whose weights are on the host, exact, op by op
    bound      of that plan: computing, copies in either direction, or the host's optimizer, the longest
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "foresight"))

from recent_models import Sizes, built  # pyright: ignore[reportMissingImports]

import outsize
from outsize.errors import OutsizeError
from outsize.ir.plan import Plan
from outsize.policies.weights import HOSTED

LENGTH: Final = 2048
# RoundPipe's benchmark accumulates gradients of several batches before a step of the optimizer.
MANY: Final = ("1xrtx4090", "8xrtx4090")


@dataclass(frozen=True)
class Published:
    """A model as it was trained: its sizes, how, and tokens a second by cluster. `sequences` of a step for
    each device are ours, and so is the larger number on one and on eight RTX 4090, `many`.
    """

    name: str
    sizes: Sizes
    precision: str
    tokens_per_s: dict[str, float | None]
    request: outsize.Request
    sequences: int = 2
    many: int = 16

    def batches(self, cluster: str) -> tuple[int, ...]:
        """The sequences of a step on a cluster."""
        devices = int(cluster.partition("x")[0])
        return tuple(n * devices for n in (self.sequences, *([self.many] if cluster in MANY else ())))


def _sizes(name: str, **sizes: Any) -> Sizes:
    return Sizes(name=name, vocabulary=151936, length=LENGTH, **sizes)


FULL: Final = outsize.Request(optimizer="adamw")
ADAPTERS: Final = outsize.Request(optimizer="adamw", lora=outsize.Lora(32, "all-linear"))
ON_ATTENTION: Final = outsize.Request(
    optimizer="adamw", lora=outsize.Lora(32, ["q_proj", "k_proj", "v_proj", "o_proj"])
)
LARGEST: Final = _sizes(
    "Qwen3 235B-A22B",
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_size=128,
    ffn=12288,
    experts=(128, 8, 1536),
)
MODELS: Final = (
    Published(
        "Qwen3 1.7B",
        _sizes(
            "Qwen3 1.7B", layers=28, hidden=2048, heads=16, kv_heads=8, head_size=128, ffn=6144, tied=True
        ),
        "fp16-fp16acc",
        {"1xrtx4090": 8881.0, "4xrtx4090": 33178.0, "8xrtx4090": None, "8xa800-80gb": None},
        FULL,
        sequences=8,
        many=32,
    ),
    Published(
        "Llama 3.1 8B",
        Sizes(
            "Llama 3.1 8B",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocabulary=128256,
            length=LENGTH,
        ),
        "fp16-fp16acc",
        {"1xrtx4090": 3142.0, "4xrtx4090": 12278.0, "8xrtx4090": 24275.0, "8xa800-80gb": None},
        FULL,
    ),
    Published(
        "Qwen3 32B",
        _sizes("Qwen3 32B", layers=64, hidden=5120, heads=64, kv_heads=8, head_size=128, ffn=25600),
        "fp16-fp16acc",
        {"1xrtx4090": 740.0, "8xrtx4090": 5516.0, "8xa800-80gb": 6301.0},
        FULL,
        sequences=1,
        many=8,
    ),
    Published(
        "Qwen3 235B-A22B, LoRA of attention",
        LARGEST,
        "bf16",
        {"8xrtx4090": 1820.0, "8xa800-80gb": 1796.0},
        ON_ATTENTION,
    ),
    Published(
        "Qwen3 235B-A22B, LoRA",
        LARGEST,
        "bf16",
        {"8xrtx4090": 1820.0, "8xa800-80gb": 1796.0},
        ADAPTERS,
    ),
)


ASKED: Final[dict[str, dict[str, Any]]] = {
    "planned": {},
    "compiled": {"kernels": "compiled"},
    "on_host": {"weights": "host"},
}


def rows(only: str = "", kinds: Collection[str] = ASKED) -> Iterator[dict[str, Any]]:
    """A row for each model and cluster; `only` is a part of their names, `kinds` are those of ASKED that are
    planned.
    """
    for model in MODELS:
        for cluster, tokens_per_s in model.tokens_per_s.items():
            for batch in model.batches(cluster):
                if only in f"{model.name} {cluster} {batch * LENGTH}":
                    yield row(model, cluster, batch, tokens_per_s, kinds)


def row(
    model: Published, cluster: str, batch: int, published: float | None, kinds: Collection[str]
) -> dict[str, Any]:
    """What is planned of one model on one cluster, beside what is published."""
    found: dict[str, Any] = {
        "model": model.name,
        "cluster": cluster,
        "precision": model.precision,
        "tokens": batch * LENGTH,
        "published_tokens_per_s": published,
    }
    for name, more in ((name, more) for name, more in ASKED.items() if name in kinds):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        known = found.get("planned", {}).get("weights") in HOSTED
        # Of the plan that was picked where its weights are on the host.
        found[name] = (
            dict(found["planned"]) if name == "on_host" and known else _planned(model, cluster, batch, more)
        )
        found[name]["planning_s"] = round(time.perf_counter() - begin_s, 1)
        found[name]["planning_cpu_s"] = round(time.process_time() - begin_cpu_s, 1)
    return found


def _planned(model: Published, cluster: str, batch: int, more: dict[str, Any]) -> dict[str, Any]:
    made = built(model.sizes)
    args, kwargs = made.example(2)
    fields: dict[str, Any] = {"cluster": cluster, "batch_size": batch, "precision": model.precision, **more}
    try:
        plan = outsize.plan(made.model, args, kwargs, request=replace(model.request, **fields))
    except OutsizeError as refused:
        return {"refused": str(refused).splitlines()[0]}
    return _figures(plan, batch)


def _figures(plan: Plan, batch: int) -> dict[str, Any]:
    assert plan.expected is not None
    step_s = plan.expected.step_s
    own = next((each for each in plan.expected.degrees if each.weights == plan.weights), None)
    return {
        "tokens_per_s": batch * LENGTH / step_s,
        "step_s": step_s,
        "axes": dict(plan.axes.used),
        "stages": len(plan.stages),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "weights": plan.weights,
        "recompute": str(plan.recompute),
        "bound": None if own is None else own.bound.parts,
        "of_bound": None if own is None else own.bound.step_s / step_s,
    }
