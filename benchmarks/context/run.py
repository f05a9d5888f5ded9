"""Context parallelism: what ranks send, how long their steps are, and how far torch's own goes.

python benchmarks/context/run.py            two processes over gloo, as JSON
python benchmarks/context/run.py --million  the plan of an 8B Llama, a million tokens, eight H100, as JSON
python benchmarks/context/run.py --slices   the same as a pipeline of eight stages, in slices

A two-layer Llama of 512 tokens trains over two ranks. Bytes are counted by the collectives (of whole tensors:
each rank sends its half), seconds are those of a step on each rank. Then torch's experimental
context_parallel is asked for the same attention; where an operator of it does not run, its error is the
result, and its bytes follow from torch 2.13's source (_context_parallel/_attention.py): keys and values are
gathered in the forward, gathered again in the backward (`kv_rotater`), and their gradients go round once for
each rank (`dkv_rotater`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

RANKS, TOKENS, LAYERS, HEADS, KEY_HEADS, WIDTH, STEPS = 2, 512, 2, 4, 2, 64, 6
_KINDS = (("heads repeated", HEADS), ("heads of keys", KEY_HEADS))
MILLION = (
    "transformers:LlamaConfig?hidden_size=4096&intermediate_size=14336&num_hidden_layers=32&num_attention_heads=32"
    "&num_key_value_heads=8&vocab_size=128256&max_position_embeddings=1048576"
)


def llama() -> nn.Module:
    torch.manual_seed(0)
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def torch_says(rank: int) -> str:
    """What torch's context_parallel answers to one causal attention with its backward."""
    experimental: Any = __import__("torch.distributed.tensor.experimental", fromlist=["context_parallel"])
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    product, x = nn.Linear(WIDTH, 3 * WIDTH), torch.randn(1, TOKENS, WIDTH)
    try:
        with experimental.context_parallel(mesh, buffers=(x,), buffer_seq_dims=(1,)):
            q, k, v = product(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "runs"


def work(folder: Path) -> None:
    """Trains, counts, and asks torch; each rank writes its figures."""
    world, model = join(), llama()
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    engine = outsize.parallelize(
        model, (), batch, stages=1, microbatches=1, axes={"cp": RANKS}, plan=outsize.Request(recompute="none")
    )
    engine.step(**batch)
    executor: Any = engine._executor  # pyright: ignore[reportPrivateUsage]  the counter of collectives
    sent = executor.variants._options.context.group.group.collectives.sent
    before, seconds = dict(sent), list[float]()
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step(**batch)
        seconds.append(time.perf_counter() - start)
    per_step = {kind: (count - before.get(kind, 0)) // STEPS for kind, count in sent.items()}
    figures = {"rank": world.rank, "sent_bytes": per_step, "step_s": statistics.median(seconds)}
    figures["torch"] = torch_says(world.rank)
    (folder / f"{world.rank}.json").write_text(json.dumps(figures))
    leave(world)


def two_ranks() -> dict[str, Any]:
    """The figures of both ranks, with the bytes that torch's ring would send."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_in_forks(RANKS, lambda: work(folder))
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    own = 2 * (TOKENS // RANKS) * (WIDTH // HEADS) * 4 * LAYERS
    sends = {"forward": RANKS - 1, "backward": 2 * RANKS - 1}
    of_torch = {when: {heads: own * n * times for heads, n in _KINDS} for when, times in sends.items()}
    return {
        "case": {"ranks": RANKS, "tokens": TOKENS, "layers": LAYERS, "torch": torch.__version__},
        "ranks": ranks,
        "torch_sends_bytes": of_torch,
    }


AXES: Final = ("--axes", "cp=8")
# Other counts of slices fill the pipeline less, or do not fit.
SLICES: Final = ("--axes", "pp", "--stages", "8", "--slices", "256", "--recompute", "full")


def million(how: Sequence[str]) -> dict[str, Any]:
    """The plan of the million tokens: its step, memory and what it does for it."""
    options = [
        "--cluster",
        "8xh100-80gb",
        "--batch",
        "1",
        "--input",
        "1048576",
        "--precision",
        "bf16",
        *how,
    ]
    command = [str(Path(sys.executable).with_name("outsize")), "plan", MILLION, *options, "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    plan = json.loads(said)
    plan = plan.get("plan", plan)
    expected = plan["expected"]
    kept = ("p50_bytes", "p95_bytes", "activations_bytes", "device_bytes")
    return {
        "step_s": expected["step_s"],
        "bubble": expected["bubble"],
        "limited_by": expected["limited_by"],
        "pieces": {name: plan[name] for name in ("loss_pieces", "module_pieces")},
        "memory": {name: max(stage[name] for stage in expected["stages"]) for name in kept},
        "published": {"step_s": 380, "gigabytes": 56},
    }


if __name__ == "__main__":
    pieces = ("--loss-pieces", "4", "--module-pieces", "4")
    asked = {"--million": AXES, "--slices": (*SLICES, *pieces)}
    of_million = next((how for flag, how in asked.items() if flag in sys.argv), None)
    print(json.dumps(two_ranks() if of_million is None else million(of_million), indent=1))
