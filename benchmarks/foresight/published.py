"""Well-known published runs, planned by `outsize.plan` in the layout that they had.

Each is a model on meta; what is compared is the tokens a second and device that follow from the plan's step.
The rows are facts with their source; none was used to set a constant of the product. Where a paper gives
FLOP/s of the model, tokens follow from its own formula.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

import outsize
from outsize.api.records import AXES
from outsize.capture.models.load import load
from outsize.errors import OutsizeError

LLAMA_7B = (
    "transformers:LlamaConfig?hidden_size=4096&num_hidden_layers=32&num_attention_heads=32"
    "&intermediate_size=11008&vocab_size=32000"
)
LLAMA_405B = (
    "transformers:LlamaConfig?hidden_size=16384&num_hidden_layers=126&num_attention_heads=128"
    "&num_key_value_heads=8&intermediate_size=53248&vocab_size=128256"
)
MPT_7B = (
    "transformers:GPT2Config?n_embd=4096&n_layer=32&n_head=32&n_positions=2048&vocab_size=50368"
    "&activation_function=gelu_pytorch_tanh&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
)
GPT_175B = (
    "transformers:GPT2Config?n_embd=12288&n_layer=96&n_head=96&n_positions=2048&vocab_size=51200"
    "&activation_function=gelu_pytorch_tanh&attn_implementation=eager"
)


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run: samples of `tokens` tokens, and what its authors measured, in tokens a second and device."""

    name: str
    source: str
    model: str
    cluster: str
    batch: int
    tokens: int
    tokens_per_s: float
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def of_flops(flops_per_s: float, parameters: float, layers: int, hidden: int, tokens: int) -> float:
    """Tokens a second: a token takes 6 N + 12 L h s FLOPs (PaLM, arXiv 2204.02311, appendix B)."""
    return flops_per_s / (6 * parameters + 12 * layers * hidden * tokens)


def of_megatron_flops(flops_per_s: float) -> float:
    """Tokens a second of GPT 175B with full recompute: FLOPs of a token by arXiv 2104.04473, eq. 3."""
    inner = 1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)
    return flops_per_s / (96 * 96 * 12288**2 * inner)


RUNS = (
    PublishedRun(
        "Llama-3 405B, 16,384 H100",
        "arXiv 2407.21783, table 4: tp 8, pp 16, dp 128, 400 TFLOP/s, 16 sequences a replica",
        LLAMA_405B,
        "2048x8xh100-80gb",
        2048,
        8192,
        of_flops(400e12, 405e9, 126, 16384, 8192),
        {
            "tp": 8,
            "stages": 16,
            "dp_shard": 128,
            "weights": "resident",
            "microbatches": 16,
            "schedule": "interleaved",
        },
    ),
    PublishedRun(
        "Llama-3 405B, 8,192 H100",
        "arXiv 2407.21783, table 4: tp 8, pp 16, dp 64, 430 TFLOP/s, 32 sequences a replica",
        LLAMA_405B,
        "1024x8xh100-80gb",
        2048,
        8192,
        of_flops(430e12, 405e9, 126, 16384, 8192),
        {
            "tp": 8,
            "stages": 16,
            "dp_shard": 64,
            "weights": "resident",
            "microbatches": 32,
            "schedule": "interleaved",
        },
    ),
    PublishedRun(
        "Llama-2 7B, 128 A100, FSDP",
        "foundation-model-stack/fms-fsdp, README of 2024: HSDP, no recompute, 2 samples, 400 Gb/s a node",
        LLAMA_7B,
        "16x8xa100-80gb@4xib100",
        256,
        4096,
        3700,
        {"dp_replicate": 16, "dp_shard": 8, "weights": "sharded", "stages": 1, "microbatches": 1},
    ),
    PublishedRun(
        "Llama-2 7B, 96 H100, FSDP",
        "foundation-model-stack/fms-fsdp, README of 2024: HSDP, no recompute, 2 samples, 800 Gb/s a node",
        LLAMA_7B,
        "12x8xh100-80gb@8xib100",
        192,
        4096,
        7500,
        {"dp_replicate": 12, "dp_shard": 8, "weights": "sharded", "stages": 1, "microbatches": 1},
    ),
    PublishedRun(
        "MPT 7B, 8 A100, FSDP",
        "mosaicml/llm-foundry, scripts/train/benchmarking: FULL_SHARD, 2 x 6 samples, no recompute",
        MPT_7B,
        "8xa100-80gb",
        96,
        2048,
        4641,
        {"dp_shard": 8, "weights": "sharded", "stages": 1, "microbatches": 2},
    ),
    PublishedRun(
        "GPT 175B, 64 A100",
        "arXiv 2205.05198, table 5: tp 8, pp 8 (3 chunks), sequence parallel, selective, 13.75 s",
        GPT_175B,
        "8x8xa100-80gb",
        64,
        2048,
        64 * 2048 / 13.75 / 64,
        {
            "tp": 8,
            "stages": 8,
            "microbatches": 64,
            "schedule": "interleaved",
            "sequence_parallel": True,
            "recompute": "selective",
        },
    ),
    *(
        PublishedRun(
            f"GPT 175B, {gpus:,} A100",
            "arXiv 2104.04473, table 2: 96 GPUs a replica (tp 8), microbatches of 1, full recompute",
            GPT_175B,
            f"{gpus // 8}x8xa100-80gb",
            1536,
            2048,
            of_megatron_flops(flops_per_s),
            {
                "tp": 8,
                "stages": 12,
                "dp_replicate": gpus // 96,
                "microbatches": 1536 * 96 // gpus,
                "schedule": "1f1b",
                "recompute": "full",
            },
        )
        for gpus, flops_per_s in ((768, 149e12), (1536, 141e12))
    ),
    PublishedRun(
        "GPT 175B, 1,024 A100",
        "arXiv 2104.04473, sec. 5.1: 1,536 samples, 140 TFLOP/s, with full recompute; the layout is not said:"
        " microbatches and schedule of its table 2, tp 8, pp 8 and dp 16 of its 145.6B (table 1)",
        GPT_175B,
        "128x8xa100-80gb",
        1536,
        2048,
        of_megatron_flops(140e12),
        {
            "tp": 8,
            "stages": 8,
            "dp_replicate": 16,
            "microbatches": 96,
            "schedule": "1f1b",
            "recompute": "full",
        },
    ),
)


def request_of(options: dict[str, Any]) -> outsize.Request:
    """The request of a published run, whose axes stand among its other options."""
    mesh = {axis: options[axis] for axis in AXES if axis in options}
    rest = {name: value for name, value in options.items() if name not in AXES}
    return outsize.Request(axes=mesh or None, **rest)


def predicted(run: PublishedRun) -> outsize.Plan:
    """The plan of a run. Raises OutsizeError."""
    with torch.device("meta"):
        model = load(run.model)
    ids = torch.zeros(run.batch, run.tokens, dtype=torch.long, device="meta")
    return outsize.plan(
        model,
        (),
        {"input_ids": ids, "labels": ids},
        cluster=run.cluster,
        precision="bf16",
        request=request_of(run.options),
    )


def row_of(run: PublishedRun) -> dict[str, Any]:
    """What was published, and what the product predicts."""
    start_s = time.process_time()
    row: dict[str, Any] = {"name": run.name, "source": run.source, "published_tokens_per_s": run.tokens_per_s}
    try:
        plan = predicted(run)
    except OutsizeError as refused:
        return {**row, "refused": str(refused)}
    assert plan.expected is not None
    devices = plan.axes.world_size
    row["predicted_tokens_per_s"] = run.batch * run.tokens / plan.expected.step_s / devices
    row["step_s"], row["update_s"] = plan.expected.step_s, plan.expected.update_s
    row["published_s"] = run.batch * run.tokens / run.tokens_per_s / devices
    row["error"] = round(plan.expected.step_s / row["published_s"] - 1, 4)
    row["cpu_s"] = round(time.process_time() - start_s, 1)
    return row
