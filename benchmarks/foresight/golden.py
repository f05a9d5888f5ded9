"""Peak bytes that Megatron-LM's functional tests record (allocated, of the last rank), by formula.

A row says its options in `parallelism`, `notes` and, where a flag is written nowhere else, in the name of
its test. The formulas are transformer_bytes; what stands here is how Megatron-LM and its
libraries use memory beside them, each with its reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from transformer import (
    Recompute,
    Sharding,
    Transformer,
    dense_parameters,
    embedding_parameters,
    expert_parameters,
    head_parameters,
    layer_saved_bytes,
)
from transformer_bytes import (
    StateBytes,
    activation_bytes,
    head_bytes,
    in_flight,
    workspace_bytes,
)

MIB = 1 << 20
NODE = 8
# The vocabularies of the tests' own tokenizers: GPT-2's BPE, and BERT's with T5's 100 sentinels.
VOCABULARY = {"bert": 28996, "t5": 29096}
POSITIONS: dict[str, Literal["rotary", "none"]] = {"rope": "rotary", "none": "none"}
RECOMPUTE: dict[str, Recompute] = {"full": "full", "selective": "selective"}
DECODERS = ("gpt", "moe", "mixtral")
FP16 = StateBytes(gradient=2)  # their float32 copy comes with the optimizer step, when no activation lives
BF16 = StateBytes(gradient=4)  # main gradients in float32
FP32 = StateBytes(weight=4, gradient=4, master=0)


class Skip(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class Test:
    """One row, read."""

    row: dict[str, str]
    options: dict[str, str]

    @property
    def name(self) -> str:
        return self.row["model"]

    @property
    def family(self) -> str:
        return self.row["family"]

    def on(self, option: str) -> bool:
        """Is a flag given?"""
        return self.options.get(option) == "True"

    def number(self, option: str, default: int = 0) -> int:
        """The value of an option."""
        return int(self.options.get(option, default))

    def axis(self, name: str, default: int = 1) -> int:
        """`TP2` of the column `parallelism`."""
        found = re.search(rf"(?<![A-Z]){name}(\d+)", self.row["parallelism"])
        return int(found[1]) if found else default

    @property
    def te(self) -> bool:
        """Layers of TransformerEngine."""
        return self.options.get("transformer-impl", "transformer_engine") == "transformer_engine"

    @property
    def hopper(self) -> bool:
        return "H100" in self.row["hardware"]

    @property
    def microbatch(self) -> int:
        return int(re.findall(r"mbs (\d+)", self.row["batch_per_device"])[0])

    @property
    def devices(self) -> int:
        """Tests run on one node of 8 unless they say otherwise; releases run on more, and do not say."""
        if self.row["num_devices"].isdigit():
            return int(self.row["num_devices"])
        if "release" in self.name and "dist-opt" in self.row["parallelism"]:
            raise Skip("number of devices not given")
        return max(NODE, self.axis("TP") * self.axis("PP") * self.axis("CP"))

    @property
    def batch(self) -> int:
        """Samples of a step; 0 where it grows during the run."""
        found = re.search(r"gbs (\d+)", self.row["batch_per_device"])
        return int(found[1]) if found else 0

    @property
    def dp(self) -> int:
        """Replicas: as many as devices allow, and no more than there are microbatches."""
        most = max(1, self.devices // (self.axis("TP") * self.axis("PP") * self.axis("CP")))
        return min(most, self.batch // self.microbatch) if self.batch else most

    @property
    def fused(self) -> bool:
        """Does attention spare the s x s matrices? Unless told, TransformerEngine picks a fused kernel."""
        backend = self.options.get("attention-backend", "")
        if backend in ("flash", "fused") or self.on("use-flash-attn"):
            return True
        old = self.old_image and self.on("deterministic-mode")
        return self.te and not old and backend not in ("unfused", "local")

    @property
    def old_image(self) -> bool:
        """Values from before TransformerEngine had a deterministic fused kernel: those of the first machines,
        and those of the long-term image that no list of tests (which says the devices) names any more."""
        retired = "lts_dgx" in self.row["source"] and not self.row["num_devices"]
        return retired or "dracooci" in self.row["source"]


def read(row: dict[str, str]) -> Test:
    """The options of a row; Skip says what the formulas do not know."""
    options = dict(re.findall(r"([a-z0-9][a-z0-9-]*)=([^ ;]+)", row["notes"]))
    test = Test(row, options)
    if test.family not in (*DECODERS, "bert", "t5"):
        raise Skip(f"family {test.family}: a part that is no transformer of known dimensions")
    if "layout=" in row["parallelism"] or test.on("multi-latent-attention"):
        raise Skip("pipeline layout or latent attention whose dimensions are not given")
    layers = test.number("encoder-num-layers" if test.family == "t5" else "num-layers")
    if not (layers and test.number("hidden-size") and test.number("num-attention-heads")):
        raise Skip("layers, hidden size or heads not given")
    if not re.search(r"mbs \d+", row["batch_per_device"]) or not re.search(r"\d", row["seq_or_input"]):
        raise Skip("microbatch or sequence length not given")
    if not row["mem_value"]:
        raise Skip("no peak given")
    return test


def peak_bytes(test: Test) -> float:
    """Predicted peak of allocated bytes on the last rank."""
    model, sharding = _model(test), _sharding(test)
    if test.family == "t5":
        return (
            _states(test, *_t5_parameters(model, sharding))
            + _t5_moving(model, sharding)
            + _fixed(test, model)
        )
    layers = _layers(test, model)
    moving = activation_bytes(model, sharding, _layers_in_flight(test, model, layers)) + _head(
        test, model, sharding
    )
    return _states(test, *_parameters(test, model, sharding, layers)) + moving + _fixed(test, model)


def _model(test: Test) -> Transformer:
    hidden, gated = test.number("hidden-size"), test.on("swiglu")
    narrow = int(4 * hidden * 2 / 3 / 64) * 64  # Megatron-LM's default width of a gated layer
    ffn = test.number("ffn-hidden-size") or (narrow if gated else 4 * hidden)
    return Transformer(
        layers=test.number("num-layers") or test.number("encoder-num-layers"),
        hidden=hidden,
        heads=test.number("num-attention-heads"),
        seq_len=int(re.findall(r"\d+", test.row["seq_or_input"])[0]),
        vocabulary=_vocabulary(test),
        kv_heads=test.number("num-query-groups"),
        ffn=ffn,
        head_dim=test.number("kv-channels"),
        positions=POSITIONS.get(test.options.get("position-embedding-type", ""), "learned"),
        norm="rmsnorm" if test.options.get("normalization") == "RMSNorm" else "layernorm",
        gated=gated,
        bias=not test.on("disable-bias-linear"),
        tied=not test.on("untie-embeddings-and-output-weights"),
        dropout=test.options.get("hidden-dropout") != "0.0",
        experts=test.number("num-experts"),
        active=test.number("moe-router-topk", 1),
        expert_ffn=test.number("moe-ffn-hidden-size"),
        shared_ffn=test.number("moe-shared-expert-intermediate-size"),
    )


def _vocabulary(test: Test) -> int:
    """Padded to a multiple of 128 tp."""
    multiple = test.number("make-vocab-size-divisible-by", 128) * test.axis("TP")
    size = test.number("vocab-size") or VOCABULARY.get(test.family, 50257)
    return -(-size // multiple) * multiple


def _sharding(test: Test) -> Sharding:
    return Sharding(
        microbatch=test.microbatch,
        tp=test.axis("TP"),
        cp=test.axis("CP"),
        ep=test.axis("EP"),
        sequence_parallel=test.on("sequence-parallel"),
        fused=test.fused,
        recompute=RECOMPUTE.get(test.row["act_ckpt"], "none"),
        dtype={"fp16": "float16", "fp32": "float32"}.get(
            (test.row["precision"].split() or ["bf16"])[0], "bfloat16"
        ),
    )


def _layers(test: Test, model: Transformer) -> float:
    """Layers of the last stage. An uneven pipeline spares it one; or head and embedding count as layers."""
    stages = test.axis("PP")
    if "uneven_pipeline" in test.name:
        return model.layers / stages - 1
    if "account_for_embedding_loss" in test.name:
        return (model.layers + 2) / stages - 1
    return model.layers / stages


def _layers_in_flight(test: Test, model: Transformer, layers: float) -> float:
    """Microbatches in flight, in layers."""
    stages, chunks = test.axis("PP"), _chunks(test, model)
    if chunks == 1:
        return layers
    microbatches = max(1, test.batch // (test.microbatch * test.dp))
    wide = (n for n in range(stages, microbatches) if microbatches % n == 0)
    group = next(wide, microbatches)  # the smallest that divides the microbatches
    held = in_flight(stages - 1, stages, chunks, microbatches, group)
    if "account_for_embedding_loss" in test.name:
        return (held - 1) * layers / (chunks - 1)  # the last chunk is the head alone
    return held * layers / chunks


def _chunks(test: Test, model: Transformer) -> int:
    if chunks := test.axis("vstages=", 0):
        return chunks
    each = test.axis("layers/vstage=", 0)
    return max(1, model.layers // test.axis("PP") // each) if each else 1


def _parameters(test: Test, model: Transformer, sharding: Sharding, layers: float) -> tuple[float, float]:
    """On the last rank: (those that dp replicates, experts)."""
    own = test.axis("PP") > 1 or not model.tied
    dense = layers * dense_parameters(model, sharding) + head_parameters(model, sharding, own)
    if test.axis("PP") == 1:
        dense += embedding_parameters(model, sharding)
    if test.family == "bert":
        dense += (model.hidden + 4) * model.hidden  # the transform before the head
    experts = sharding.model_copy(update={"tp": test.axis("ETP", sharding.tp)})
    return dense, layers * expert_parameters(model, experts)


def _states(test: Test, dense: float, experts: float) -> int:
    """Weights, gradients, optimizer; a distributed Adam shares its own, Muon's layers are not cut."""
    each = {"float16": FP16, "float32": FP32}.get(_sharding(test).dtype, BF16)
    shared = "dist-opt" in test.row["parallelism"] and test.options.get("optimizer") != "muon"
    if shared:
        each = each.model_copy(update={"zero": 3 if test.on("use-megatron-fsdp") else 1})
    instances = 2 if "multi_dist_optimizer_instances" in test.name else 1
    expert_tp = test.axis("ETP", test.axis("TP"))
    expert_dp = max(1, test.devices // (expert_tp * test.axis("PP") * test.axis("EP")))
    replicas = max(1, test.dp * test.axis("CP") // instances)
    return each.held(int(dense), replicas) + each.held(int(experts), max(1, expert_dp // instances))


def _head(test: Test, model: Transformer, sharding: Sharding) -> float:
    """Logits. A fused loss copies them once more, a deferred gradient keeps those of pp microbatches."""
    copies = 1 if test.on("cross-entropy-loss-fusion") else 0
    tokens = sharding.microbatch * model.seq_len / sharding.cp
    deferred = test.axis("PP") if "defer_embedding_wgrad" in test.name else 0
    kept = deferred * tokens * (model.vocabulary / sharding.tp + model.hidden) * sharding.element_bytes
    return workspace_bytes(model, sharding, copies) + kept


def _fixed(test: Test, model: Transformer) -> float:
    """What libraries keep: cuBLAS a workspace for the thread of each pass (32 MiB under deterministic mode's
    `:4096:8` and on Hopper, else 8.125), TransformerEngine one of 4, since Hopper 32 MiB; Megatron-LM's own
    attention a buffer for the scores."""
    workspace = 32.0 if test.on("deterministic-mode") or test.hopper else 8.125
    kept = 2 * workspace * MIB
    if test.te:
        streams = 1 + (4 if "groupedGEMM" in test.name else 0)  # a grouped matmul runs on four more
        return kept + streams * (4 if "A100" in test.row["hardware"] else 32) * MIB
    scores = test.microbatch * model.heads / test.axis("TP") * model.seq_len**2
    return kept + scores * 2


def _t5_parameters(model: Transformer, sharding: Sharding) -> tuple[float, float]:
    """As many encoder as decoder layers; a decoder layer has a second attention."""
    layer = dense_parameters(model, sharding)
    cross = 4 * model.query * model.hidden / sharding.tp + 6 * model.hidden
    ends = embedding_parameters(model, sharding) + 2 * head_parameters(model, sharding, own=False)
    return model.layers * (2 * layer + cross) + ends + model.vocabulary / sharding.tp, 0.0


def _t5_moving(model: Transformer, sharding: Sharding) -> float:
    """Encoder layers on the long sequence, decoder layers on the short one (a quarter) and on both."""
    short = model.model_copy(update={"seq_len": model.seq_len // 4})
    encoder, decoder = layer_saved_bytes(model, sharding), layer_saved_bytes(short, sharding)
    tokens, size = sharding.microbatch * short.seq_len, sharding.element_bytes
    keys = 2 * sharding.microbatch * model.seq_len * model.query / sharding.tp * size
    scores = 0 if sharding.fused else tokens * model.heads / sharding.tp * model.seq_len * (2 * size + 1)
    cross = keys + scores + tokens * model.hidden * (2 * size + 1 + 2 * size / sharding.tp)
    return model.layers * (encoder + decoder + cross) + head_bytes(short, sharding)
