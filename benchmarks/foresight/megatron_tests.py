"""Rows of published peaks that Megatron-LM's functional tests record (allocated, of the last rank), as read.

A row says its options in `parallelism`, `notes` and, where a flag is written nowhere else, in the name of
its test.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rows import GPT2_VOCABULARY, NODE, Row, Skip

# The vocabularies of the tests' own tokenizers where it is not GPT-2's BPE.
VOCABULARY = {"bert": 28996}


@dataclass(frozen=True)
class MegatronTest:
    """One row, read."""

    row: Row
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
    def microbatch(self) -> int:
        return int(re.findall(r"mbs (\d+)", self.row["batch_per_device"])[0])

    @property
    def devices(self) -> int:
        """Tests run on one node of 8 unless they say otherwise; releases run on more, and do not say."""
        if self.row["num_devices"].isdigit():
            return int(self.row["num_devices"])
        if "release" in self.name and "dist-opt" in self.row["parallelism"]:
            raise Skip("golden: number of devices not given")
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
    def gpu(self) -> str:
        """The kind of device in outsize's table."""
        names = {"A100": "a100-80gb", "H100": "h100-80gb", "GB200": "b200-180gb"}
        known = next((kind for name, kind in names.items() if name in self.row["hardware"]), None)
        if known is None:
            raise Skip(f"golden: hardware {self.row['hardware']!r} is not in the table of devices")
        return known

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return self.number("num-layers")

    @property
    def rotary(self) -> bool:
        """Whether positions are turned, not added."""
        return self.options.get("position-embedding-type") == "rope"

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        if chunks := self.axis("vstages=", 0):
            return chunks
        each = self.axis("layers/vstage=", 0)
        return max(1, self.layers // self.axis("PP") // each) if each else 1

    @property
    def vocabulary(self) -> int:
        """Padded to a multiple of 128 tp."""
        multiple = self.number("make-vocab-size-divisible-by", 128) * self.axis("TP")
        size = self.number("vocab-size") or VOCABULARY.get(self.family, GPT2_VOCABULARY)
        return -(-size // multiple) * multiple

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


def read(row: Row) -> MegatronTest:
    """The options of a row. Raises Skip for what no configuration tells."""
    options = dict(re.findall(r"([a-z0-9][a-z0-9-]*)=([^ ;]+)", row["notes"]))
    test = MegatronTest(row, options)
    if test.family not in ("gpt", "bert"):
        raise Skip(f"golden: family {test.family} is not built")
    if not (test.number("num-layers") and test.number("hidden-size") and test.number("num-attention-heads")):
        raise Skip("golden: layers, hidden size or heads not given")
    if not re.search(r"mbs \d+", row["batch_per_device"]) or not re.search(r"\d", row["seq_or_input"]):
        raise Skip("golden: microbatch or sequence length not given")
    if not (row["mem_value"] and 0 < float(row["mem_value"]) < math.inf):
        raise Skip("golden: no peak given")
    _insist_on_layers(test)
    _insist_on_layout(test)
    return test


def _insist_on_layers(test: MegatronTest) -> None:
    """Raises Skip for what no configuration of Hugging Face has."""
    if test.on("swiglu") or test.on("disable-bias-linear") or test.options.get("normalization") == "RMSNorm":
        raise Skip("golden: a layer between GPT-2's and Llama's")
    if test.number("num-query-groups") or (test.rotary and not test.fused):
        raise Skip("golden: grouped queries, or a float32 softmax that GPT-NeoX has and this test has not")
    if test.on("multi-latent-attention"):
        raise Skip("golden: latent attention whose dimensions are not given")
    if test.on("cross-entropy-loss-fusion"):
        raise Skip("golden: a fused loss, which holds more than `in_half`")


def _insist_on_layout(test: MegatronTest) -> None:
    """Raises Skip for what no layout of outsize has."""
    if "layout=" in test.row["parallelism"] or test.axis("CP") > 1 or test.axis("EP") > 1:
        raise Skip("golden: a pipeline layout, context or expert parallelism")
    if test.on("use-megatron-fsdp"):
        raise Skip("golden: Megatron's FSDP")
    if not test.row["precision"].startswith("bf16") or "fp8" in test.row["precision"]:
        raise Skip("golden: precision other than bf16 with float32 copies")
    odd = ("uneven", "account_for", "defer_embedding", "multi_dist", "frozen", "muon", "mup", "mtp")
    if any(word in test.name for word in odd) or "optimizer" in test.options:
        raise Skip("golden: an option that a layout has no word for")
