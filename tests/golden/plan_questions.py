"""The questions whose plans are in tests/golden/plans: a model, one sample's shape, a batch, what is asked.

They meet every axis and pair of axes, every schedule, every policy of memory, optimizers and precisions, one
device and several kinds of them, and questions that have no answer. A group has a model and a shape; its rows
have a batch and what is asked of `plan`.
"""

from __future__ import annotations

from typing import Any, Final

Asked = dict[str, Any]
Rows = dict[str, tuple[int, Asked]]

GROUPS: Final[dict[str, tuple[str, str, Rows]]] = {
    "resnet50": (
        "torchvision:resnet50",
        "3x64x64",
        {
            "on two CPUs": (32, {"cluster": "2xcpu"}),
            "on one CPU": (32, {"cluster": "1xcpu"}),
            "exact": (32, {"cluster": "2xcpu", "exact": True}),
            "3 stages, gpipe": (32, {"cluster": "3xcpu", "schedule": "gpipe", "stages": 3}),
            "interleaved": (32, {"cluster": "2xcpu", "schedule": "interleaved"}),
            "zero-bubble": (32, {"cluster": "4xcpu", "schedule": "zero-bubble", "exact": True}),
            "zero-bubble-v": (32, {"cluster": "2xcpu", "schedule": "zero-bubble-v"}),
            "naive": (32, {"cluster": "3xcpu", "schedule": "naive"}),
            "auto": (16, {"cluster": "2xcpu", "schedule": "auto", "microbatches": 4}),
            "sync": (8, {"cluster": "2xcpu", "bn": "sync"}),
            "deferred": (16, {"cluster": "2xcpu", "bn": "deferred", "stages": 2}),
            "little memory, recompute": (64, {"cluster": "2x1GB", "recompute": "full", "exact": True}),
            "little memory, offload": (64, {"cluster": "2x1GB", "recompute": "offload", "exact": True}),
            "too little memory": (64, {"cluster": "1x0.05GB"}),
            "sgd, one stage": (32, {"cluster": "1xa100-40gb", "optimizer": "sgd"}),
            "replicas": (64, {"cluster": "4xa100-40gb", "axes": {"dp_replicate": 4, "others": 1}}),
            "stages and replicas": (
                64,
                {"cluster": "4xa100-40gb", "axes": {"dp_replicate": 2, "others": 1}, "stages": 2},
            ),
            "sixteen H100": (512, {"cluster": "2x8xh100-80gb"}),
            "eight H100, exact": (256, {"cluster": "8xh100-80gb", "exact": True}),
            "bf16-mixed": (64, {"cluster": "2xa100-40gb", "precision": "bf16-mixed", "exact": True}),
            "inference": (32, {"cluster": "2xcpu", "inference": True}),
            "more stages than devices": (32, {"cluster": "2xcpu", "stages": 5}),
        },
    ),
    "large resnet50": (
        "torchvision:resnet50",
        "3x128x128",
        {"little memory": (64, {"cluster": "2x1.5GB"}), "on one CPU": (32, {"cluster": "1xcpu"})},
    ),
    "deeplab": (
        "torchvision:deeplabv3_resnet50",
        "3x128x128",
        {
            "on three devices": (8, {"cluster": "3x12GB", "exact": True}),
            "little memory": (8, {"cluster": "1x1.2GB"}),
        },
    ),
    "gpt2": (
        "transformers:GPT2Config?n_layer=6&n_embd=256&n_head=4",
        "128",
        {
            "on four GPUs": (64, {"cluster": "4xa100-40gb"}),
            "on one CPU": (8, {"cluster": "1xcpu"}),
            "sgd, bf16": (
                64,
                {"cluster": "2xa100-40gb", "precision": "bf16", "optimizer": "sgd", "exact": True},
            ),
            "adafactor": (64, {"cluster": "2xa100-40gb", "optimizer": "adafactor", "stages": 2}),
            "muon over shards": (
                64,
                {"cluster": "2xa100-40gb", "optimizer": "muon", "axes": {"dp_shard": 2, "others": 1}},
            ),
            "tp": (32, {"cluster": "4xa100-40gb", "axes": {"tp": 2, "others": 1}}),
            "tp and sequence": (
                32,
                {"cluster": "4xa100-40gb", "axes": {"tp": 4, "others": 1}, "sequence_parallel": True},
            ),
            "tp and shards": (32, {"cluster": "4xa100-40gb", "axes": {"tp": 2, "dp_shard": 2, "others": 1}}),
            "tp and replicas": (
                32,
                {"cluster": "4xa100-40gb", "axes": {"tp": 2, "dp_replicate": 2, "others": 1}},
            ),
            "cp beside dropout": (32, {"cluster": "2xa100-40gb", "axes": {"cp": 2, "others": 1}}),
            "replicas": (32, {"cluster": "4xa100-40gb", "axes": {"dp_replicate": 2, "others": 1}}),
            "shards": (
                32,
                {"cluster": "4xa100-40gb", "axes": {"dp_shard": 2, "others": 1}, "weights": "sharded"},
            ),
            "shards, resident": (
                32,
                {"cluster": "4xa100-40gb", "axes": {"dp_shard": 4, "others": 1}, "weights": "resident"},
            ),
            "shards and replicas": (
                32,
                {"cluster": "4xa100-40gb", "axes": {"dp_shard": 2, "dp_replicate": 2, "others": 1}},
            ),
            "full recompute": (64, {"cluster": "2xa100-40gb", "recompute": "full", "stages": 2}),
            "selective recompute": (64, {"cluster": "2x1GB", "recompute": "selective", "exact": True}),
            "activations on the host": (64, {"cluster": "2xa100-40gb", "recompute": "offload", "stages": 2}),
            "loss in pieces": (64, {"cluster": "2xa100-40gb", "loss_pieces": 4, "stages": 2}),
            "modules in pieces": (64, {"cluster": "1xa100-40gb", "module_pieces": 2}),
            "host activations": (16, {"cluster": "1xa100-40gb", "weights": "host-activations"}),
            "1f1b": (
                64,
                {"cluster": "4xa100-40gb", "schedule": "1f1b", "stages": 4, "microbatches": 8, "axes": "pp"},
            ),
            "interleaved": (
                64,
                {"cluster": "2xa100-40gb", "schedule": "interleaved", "microbatches": 4, "axes": "pp"},
            ),
            "lora": (32, {"cluster": "2xa100-40gb", "lora": 8, "stages": 2}),
            "sums in float16": (
                16,
                {"cluster": "2xrtx4090", "precision": "fp16-fp16acc", "weights": "host", "stages": 2},
            ),
            "inference": (16, {"cluster": "2xa100-40gb", "inference": True, "stages": 2}),
            "tp of three": (32, {"cluster": "3xa100-40gb", "axes": {"tp": 3, "others": 1}}),
        },
    ),
    "llama": (
        "transformers:LlamaConfig?num_hidden_layers=12&hidden_size=1024&intermediate_size=2816",
        "128",
        {
            "all axes": (64, {"cluster": "2x4xh100-80gb"}),
            "all axes, exact": (64, {"cluster": "2x4xh100-80gb", "exact": True}),
            "bf16-mixed, all axes": (64, {"cluster": "4xa100-40gb", "precision": "bf16-mixed"}),
            "little memory": (16, {"cluster": "2x3GB"}),
            "little memory, lora": (16, {"cluster": "1x2GB", "lora": 16}),
            "little memory, inference": (8, {"cluster": "2x2GB", "inference": True}),
            "on one small device": (8, {"cluster": "1x3GB"}),
            "host optimizer": (8, {"cluster": "1x8GB", "weights": "host-optimizer"}),
            "host-computed, lora": (
                8,
                {
                    "cluster": "2xrtx4090-24gb",
                    "weights": "host-computed",
                    "lora": 8,
                    "microbatches": 4,
                    "stages": 2,
                },
            ),
            "host, two devices": (8, {"cluster": "2x2GB", "weights": "host"}),
            "four small devices": (32, {"cluster": "4x2GB"}),
            "unequal devices": (16, {"cluster": "1xa100-40gb+2xv100-16gb"}),
            "two kinds": (32, {"cluster": "2xh100-80gb+2xa100-40gb"}),
            "cp": (16, {"cluster": "2xa100-40gb", "axes": {"cp": 2, "others": 1}}),
            "cp and stages": (16, {"cluster": "4xa100-40gb", "axes": {"cp": 2, "others": 1}, "stages": 2}),
            "cp and shards": (
                16,
                {
                    "cluster": "4xa100-40gb",
                    "axes": {"cp": 2, "dp_shard": 2, "others": 1},
                    "weights": "sharded",
                },
            ),
            "cp and tp": (16, {"cluster": "4xa100-40gb", "axes": {"cp": 2, "tp": 2, "others": 1}}),
            "cp and replicas": (
                16,
                {"cluster": "4xa100-40gb", "axes": {"cp": 2, "dp_replicate": 2, "others": 1}},
            ),
            "sgd on small devices": (16, {"cluster": "2x3GB", "optimizer": "sgd"}),
            "too little memory": (8, {"cluster": "1x0.05GB", "weights": "resident"}),
        },
    ),
    "t5": (
        "transformers:T5Config?num_layers=3&d_model=128",
        "128",
        {
            "on three CPUs": (16, {"cluster": "3xcpu", "exact": True}),
            "tp": (16, {"cluster": "2xa100-40gb", "axes": {"tp": 2, "others": 1}}),
            "stages and replicas": (
                16,
                {"cluster": "4xa100-40gb", "stages": 2, "axes": {"dp_replicate": 2, "others": 1}},
            ),
        },
    ),
    "mixtral": (
        "transformers:MixtralConfig?num_hidden_layers=4&hidden_size=256&intermediate_size=512",
        "128",
        {
            "two stages": (16, {"cluster": "2xa100-40gb", "stages": 2}),
            "all axes": (32, {"cluster": "4xh100-80gb"}),
            "ep": (16, {"cluster": "2xa100-40gb", "axes": {"ep": 2, "others": 1}}),
            "ep and stages": (16, {"cluster": "4xa100-40gb", "axes": {"ep": 2, "others": 1}, "stages": 2}),
            "ep and shards": (16, {"cluster": "4xa100-40gb", "axes": {"ep": 2, "dp_shard": 2, "others": 1}}),
            "ep and tp": (16, {"cluster": "4xa100-40gb", "axes": {"ep": 2, "tp": 2, "others": 1}}),
            "ep and cp": (16, {"cluster": "4xa100-40gb", "axes": {"ep": 2, "cp": 2, "others": 1}}),
            "ep and replicas": (
                16,
                {"cluster": "4xa100-40gb", "axes": {"ep": 2, "dp_replicate": 2, "others": 1}},
            ),
        },
    ),
    "bert": (
        "transformers:BertConfig?num_hidden_layers=4&hidden_size=256&num_attention_heads=4&intermediate_size=512",
        "128",
        {
            "on two CPUs": (16, {"cluster": "2xcpu"}),
            "tp and stages": (16, {"cluster": "4xa100-40gb", "axes": {"tp": 2, "others": 1}, "stages": 2}),
            "shards, all axes": (64, {"cluster": "8xa100-40gb"}),
        },
    ),
    "vit": (
        "torchvision:vit_b_16",
        "3x224x224",
        {
            "on two GPUs": (32, {"cluster": "2xa100-40gb", "exact": True}),
            "tp": (32, {"cluster": "2xa100-40gb", "axes": {"tp": 2, "others": 1}}),
            "little memory": (32, {"cluster": "2x2GB"}),
        },
    ),
}

QUICK: Final = {
    "resnet50 on two CPUs", "resnet50 3 stages, gpipe", "resnet50 zero-bubble", "resnet50 too little memory",
    "gpt2 tp", "gpt2 replicas", "gpt2 shards", "llama cp", "llama little memory", "llama host optimizer",
}  # fmt: skip
"""What `make test` asks: a second or two each. With --all the others, before the planner changes."""

QUESTIONS: Final = {
    f"{group} {name}": (model, shape, batch, asked)
    for group, (model, shape, rows) in GROUPS.items()
    for name, (batch, asked) in rows.items()
}
