"""Is the predicted peak of a QLoRA step what two processes really hold? See README.md.

    python benchmarks/memory/qlora_slice.py                   # two layers of Llama-3.1-70B's sizes
    python benchmarks/memory/qlora_slice.py --hidden 512 --vocabulary 512   # small, in seconds
    python benchmarks/memory/qlora_slice.py --recompute full --out results/<date>_qlora.json

The plan is that of `outsize plan ... --quantize nf4 --lora r=16`, made without bitsandbytes; the step is of
bitsandbytes' layers with random weights, quantized one at a time, and peft's adapters in bfloat16. Each
process counts what it holds of the model, scales included, and all that is born in it (`meter.py`), in the
third step. Messages between processes of one machine lie in memory that both have mapped; it counts for both.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, final
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from meter import Meter

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.program.values.wrapper_tensors import plain_parts
from outsize.program.weights.beside import beside_weights
from outsize.run.transport.shared_memory import Slot
from outsize.run.transport.wire_layout import WireLayout
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

Recompute = Literal["none", "full"]
RANK = 16
# Of Llama-3.1-70B; another hidden size has the rest in proportion.
HIDDEN, INTERMEDIATE, HEADS, SHARED_HEADS, VOCABULARY = 8192, 28672, 64, 8, 128256
STAGES = MICROBATCHES = 2


@final
@dataclass(frozen=True)
class Sizes:
    """What is run: two layers of such sizes, and a batch of `microbatches` sequences."""

    hidden: int = HIDDEN
    vocabulary: int = VOCABULARY
    tokens: int = 256
    recompute: Recompute = "none"

    def config(self) -> Any:
        """The configuration of the model."""
        return import_transformers().LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=INTERMEDIATE * self.hidden // HIDDEN,
            num_hidden_layers=STAGES,
            num_attention_heads=HEADS * self.hidden // HIDDEN,
            num_key_value_heads=max(1, SHARED_HEADS * self.hidden // HIDDEN),
            vocab_size=self.vocabulary,
            max_position_embeddings=self.tokens,
        )

    def batch(self) -> dict[str, Any]:
        """The arguments of the model: ids, which are the labels too."""
        draw = torch.Generator().manual_seed(3)
        ids = torch.randint(0, self.vocabulary, (MICROBATCHES, self.tokens), generator=draw)
        return {"input_ids": ids, "labels": ids, "use_cache": False}


@final
@dataclass(frozen=True)
class Row:
    """One stage, which is a process."""

    stage: int
    predicted_bytes: int
    real_bytes: int
    sent_bytes: int  # of the real ones: messages that it has sent, in memory that the receiver counts, too

    @property
    def real_over_plan(self) -> float:
        """What is to be at most 1.02."""
        return self.real_bytes / self.predicted_bytes


def llama(sizes: Sizes, device: str) -> Any:
    """The model in bfloat16."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return import_transformers().LlamaForCausalLM(sizes.config())
    finally:
        torch.set_default_dtype(default)


def plan_of(sizes: Sizes) -> outsize.Plan:
    """The plan of the request, without the library and without weights."""
    asked = outsize.Request(quantize="nf4", lora=outsize.Lora(RANK, "all-linear"))
    return outsize.plan(
        llama(sizes, "meta"),
        (),
        sizes.batch(),
        cluster=f"{STAGES}xcpu",
        stages=STAGES,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        optimizer="adamw",
        recompute=sizes.recompute,
        precision="bf16",
        request=asked,
    )


def quantized(sizes: Sizes) -> nn.Module:
    """The model of bitsandbytes with random weights, one in 16 bits at a time, and peft's adapters."""
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]
    import peft

    torch.manual_seed(0)
    model = llama(sizes, "meta")
    how: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
    for name, layer in [*model.named_modules()]:
        if type(layer) is not nn.Linear or name == "lm_head":
            continue
        made = bnb.nn.Linear4bit(1, 1, bias=False, compute_dtype=torch.bfloat16, **how)
        made.in_features, made.out_features = layer.in_features, layer.out_features
        values = torch.empty(layer.weight.shape, dtype=torch.bfloat16).normal_(std=0.02)
        made.weight = bnb.nn.Params4bit(values, requires_grad=False, module=made, **how)
        del values
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made.to("cpu"))
    for name, weight in [*model.named_parameters()]:
        if weight.is_meta:
            parent, _, last = name.rpartition(".")
            values = torch.empty(weight.shape, dtype=weight.dtype).normal_(std=0.02)
            setattr(model.get_submodule(parent), last, nn.Parameter(values))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.requires_grad_(False)
    lora = peft.LoraConfig(r=RANK, target_modules="all-linear")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).bfloat16().train()


def compare(sizes: Sizes) -> list[Row]:
    """The predicted and the real peak of each stage; processes are forks of the one that has the model."""
    plan, model = plan_of(sizes), quantized(sizes)
    with TemporaryDirectory() as folder:

        def work() -> None:
            world = join()
            torch.set_num_threads(1)
            row = held(plan, model, sizes.batch(), world.rank)
            Path(folder, f"{world.rank}.json").write_text(json.dumps(asdict(row)), encoding="utf-8")
            leave(world)

        run_in_forks(STAGES, work)
        files = [Path(folder, f"{rank}.json") for rank in range(STAGES)]
        return [Row(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def held(plan: outsize.Plan, model: nn.Module, batch: dict[str, Any], rank: int) -> Row:
    """What this process holds in its third step."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-4)

    engine = outsize.parallelize(model, (), batch, plan=plan, optimizer=adamw)
    assert engine.optimizer is not None
    with sent_slots() as slots:
        for _ in range(2):
            engine.step(**batch)
    gc.collect()
    meter = Meter(1)
    with meter:
        meter.hold(0, [*of_model(model), *of_optimizer(engine.optimizer)])
        meter.share([batch["input_ids"]])
        meter.stage, meter.doing = 0, "step"
        engine.step(**batch)
    expected = plan.expected
    assert expected is not None
    sent_bytes = sum(slot.tensor.untyped_storage().nbytes() for slot in slots if meter.has_met(slot.tensor))
    return Row(rank, expected.stages[rank].peak_bytes, meter.peaks[0], sent_bytes)


@contextlib.contextmanager
def sent_slots() -> Iterator[list[Slot]]:
    """Yields the slots of shared memory that this process makes to send messages."""
    made, make = list[Slot](), Slot.make

    def listed(layout: WireLayout) -> Slot:
        made.append(make(layout))
        return made[-1]

    with mock.patch.object(Slot, "make", listed):
        yield made


def of_model(model: nn.Module) -> list[Tensor]:
    """All that this process has of a model: weights, buffers, and what is beside weights of codes."""
    beside = (each.tensor for each in beside_weights(model))
    tensors = (*model.parameters(), *model.buffers(), *beside)
    return [part for each in tensors for part in plain_parts(each).values() if not part.is_meta]


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The states of an optimizer."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each stage; writes the results."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--hidden", type=int, default=HIDDEN, help="a multiple of 128")
    asked.add_argument("--vocabulary", type=int, default=VOCABULARY)
    asked.add_argument("--tokens", type=int, default=Sizes.tokens)
    asked.add_argument("--recompute", default="none", choices=["none", "full"])
    asked.add_argument("--out", type=Path)
    options = vars(asked.parse_args(arguments))
    out = options.pop("out")
    warnings.simplefilter("ignore")
    sizes = Sizes(**options)
    rows = compare(sizes)
    for row in rows:
        both = f"plan {row.predicted_bytes / 2**20:9.1f} MiB  real {row.real_bytes / 2**20:9.1f} MiB"
        sent = f"{row.sent_bytes / 2**20:.1f} MiB of it sent"
        print(f"stage {row.stage}  {both} ({sent})  real / plan {row.real_over_plan:.4f}", flush=True)
    found = {"sizes": asdict(sizes), "machine": f"{platform.machine()}, torch {torch.__version__}"}
    found |= {"rows": [asdict(row) | {"real_over_plan": row.real_over_plan} for row in rows]}
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
