"""Question: how far are `outsize.fit` and `outsize.api.price` from published peaks of memory?

    python benchmarks/foresight/product_memory.py --memory CSV               # a table
    python benchmarks/foresight/product_memory.py --memory CSV --json        # one JSON, with every row
    python benchmarks/foresight/product_memory.py --memory CSV --only images

Each row becomes a model with weights on meta, and the bytes are the product's. What the software of a row
holds and outsize's engine does not is added with its reason: torch's DDP and Megatron-LM's precision
(`held_by_ddp`, `megatron_states`). Like is compared with like: the rows that can be built say the peak of
allocated bytes, which is P50 without the context and without what allocator and cuDNN keep.

Halves are of models (of tests, for Megatron-LM), by a hash, as everywhere in this folder. Only half 0 was
looked at while constants were set.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import statistics
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from image_models import Segmenter
from runs import half_of, read_rows
from torch import Tensor, nn
from torch.nn import functional

import golden
import outsize
from outsize.api import price
from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.errors import OutsizeError
from outsize.ir.answers.fit import DeviceFit
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph, Parameter
from outsize.ir.plan import Axes, Plan, Stage, StageFigures
from outsize.ir.units.names import compress_units
from outsize.planner.memory.optimizer_states import (
    MASTER_FLOAT32_GRADIENTS,
    optimizer_bytes,
)

HERE = Path(__file__).parent
MIB, GIB = 1 << 20, 1 << 30
# mmcv logs MiB, and the tables have thousands of them; MONeT's authors divide by 2^30.
UNITS = {"mmseg": 1000 * MIB, "monet": GIB}
CLASSES = {"Cityscapes": 19, "ADE20K": 150, "Pascal VOC 2012 + Aug": 21, "Pascal Context": 60}
SEGMENTER = re.compile(r"(FCN|DeepLabV3\+?|PSPNet) R-(18|50|101)(b?)-D8")
GPU = "v100-32gb"
LAYER = re.compile(r"\.(?:h|layers|layer)\.(\d+)(?:[.:]|$)")
Row = dict[str, str]


class Skip(Exception):
    """Why a row is not predicted."""


# -- images ----------------------------------------------------------------------------------------------


def image_bytes(row: Row) -> tuple[float, float]:
    """(predicted, measured) peak of allocated bytes."""
    if row["id"] == "mmseg":
        found = segmentation(row)
    elif row["id"] == "monet":
        found = classification(row)
    else:
        raise Skip(f"{row['id']}: a model or a training that is not known in every part")
    return found, float(row["mem_value"]) * UNITS[row["id"]]


def classification(row: Row) -> float:
    """A row of MONeT: the plain loop, forward and backward."""
    if row["act_ckpt"] != "PyTorch":
        raise Skip("monet: memory that MONeT was told to keep to")
    models, size = import_torchvision().models, int(row["batch_per_device"])
    makers: dict[str, Callable[[], nn.Module]] = {
        "ResNet-50": models.resnet50,
        "GoogleNet": lambda: models.googlenet(aux_logits=False, init_weights=False),
        "VGG-16": models.vgg16,
        "Mobilenet": lambda: with_relu(models.mobilenet_v2()),
    }
    if row["model"] not in makers:
        raise Skip("monet: input of the U-Net not printed")
    with torch.device("meta"):
        model = makers[row["model"]]().train()
        images, labels = torch.empty(size, 3, 224, 224), torch.zeros(size, dtype=torch.long)
    return allocated(model, (images,), "sgd", target=labels, loss_fn=functional.cross_entropy)


def with_relu(model: nn.Module) -> nn.Module:
    """In the torch of the row (1.5.1) ReLU6 in place saved its result, as ReLU does; now it saves a copy."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(parent, name, nn.ReLU(inplace=True))
    return model


def segmentation(row: Row) -> float:
    """A row of mmsegmentation: a process of DDP on one of four V100."""
    found, batch = SEGMENTER.fullmatch(row["model"]), row["batch_per_device"]
    if found is None:
        raise Skip("mmseg: another backbone or head than those of image_models.py")
    if row["precision"] != "fp32" or not batch.isdigit():
        raise Skip("mmseg: half precision of its own, or batch not given")
    kind, depth, bare = found.groups()
    height, width = map(int, re.findall(r"\d+", row["seq_or_input"]))
    with torch.device("meta"):
        model = Segmenter(kind, int(depth), not bare, CLASSES[row["task"]]).train()
        images = torch.empty(int(batch), 3, height, width)
        labels = torch.zeros(int(batch), height, width, dtype=torch.long)
    return allocated(model, (images, labels), "momentum") + held_by_ddp(model)


def held_by_ddp(model: nn.Module) -> int:
    """Gradients stay between steps (`zero_grad` of torch before 2.0), and DDP's buckets hold them again."""
    return 2 * sum(p.numel() * p.itemsize for p in model.parameters())


def allocated(model: nn.Module, args: tuple[Tensor, ...], optimizer: str, **options: Any) -> float:
    """What `fit` predicts of allocated bytes: P50 without context and what is kept."""
    answer = outsize.fit(
        model, args, cluster=f"1x{GPU}", microbatches=1, optimizer=optimizer, axes="pp", **options
    )
    return without_kept(answer.devices[0])


def without_kept(held: DeviceFit | StageFigures) -> float:
    """P50 without the driver's context and what is kept; cuBLAS's workspaces are allocated."""
    matmul = parse_cluster(f"1x{GPU}").devices[0].matmul_bytes
    return held.p50_bytes - held.kept_bytes - held.context_bytes + matmul


# -- Megatron-LM -----------------------------------------------------------------------------------------


def golden_bytes(row: Row) -> tuple[float, float]:
    """(predicted, measured) peak of allocated bytes on the last rank."""
    try:
        test = golden.read(row)
        dp = test.dp
    except golden.Skip as reason:
        raise Skip(f"golden: {reason}") from None
    check(test)
    figures = priced(shape_of(test), division_of(test))
    states = megatron_states(figures.weights_bytes // 2, dp if "dist-opt" in row["parallelism"] else 1)
    device = parse_cluster(f"1x{gpu_of(test)}").devices[0]
    moving = figures.activations_bytes + figures.boundary_bytes
    return states + moving + device.matmul_bytes, float(row["mem_value"])


def check(test: golden.Test) -> None:
    """Raises Skip for what no configuration of Hugging Face and no layout of outsize has."""
    if test.family not in ("gpt", "bert"):
        raise Skip(f"golden: family {test.family} is not built")
    if test.on("swiglu") or test.on("disable-bias-linear") or test.options.get("normalization") == "RMSNorm":
        raise Skip("golden: a layer between GPT-2's and Llama's")
    rotary = test.options.get("position-embedding-type") == "rope"
    if test.number("num-query-groups") or (rotary and not test.fused):
        raise Skip("golden: grouped queries, or a float32 softmax that GPT-NeoX has and this test has not")
    if test.on("cross-entropy-loss-fusion"):
        raise Skip("golden: a fused loss, which holds more than `in_half`")
    if test.axis("CP") > 1 or test.axis("EP") > 1 or test.on("use-megatron-fsdp"):
        raise Skip("golden: context or expert parallelism, or Megatron's FSDP")
    if not test.row["precision"].startswith("bf16") or "fp8" in test.row["precision"]:
        raise Skip("golden: precision other than bf16 with float32 copies")
    odd = ("uneven", "account_for", "defer_embedding", "multi_dist", "frozen", "muon", "mup", "mtp")
    if any(word in test.name for word in odd) or "optimizer" in test.options:
        raise Skip("golden: an option that a layout has no word for")


def gpu_of(test: golden.Test) -> str:
    """The kind of device in outsize's table."""
    names = {"A100": "a100-80gb", "H100": "h100-80gb", "GB200": "b200-180gb"}
    return next(kind for name, kind in names.items() if name in test.row["hardware"])


@dataclass(frozen=True)
class Shape:
    """What a model is made from."""

    family: str
    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    rotary: bool
    tied: bool
    fused: bool
    dropout: float


@dataclass(frozen=True)
class Division:
    """How a model is divided, and on which devices; `blockwise`: each layer is recomputed."""

    tp: int
    pp: int
    chunks: int
    microbatch: int
    microbatches: int
    sequence_parallel: bool
    blockwise: bool
    gpu: str


def shape_of(test: golden.Test) -> Shape:
    """What the model is made from."""
    model, sharding = golden._model(test), golden._sharding(test)
    return Shape(
        family=test.family,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        length=model.seq_len,
        vocabulary=model.vocabulary,
        rotary=model.positions == "rotary",
        tied=model.tied,
        fused=sharding.fused,
        dropout=0.1 if model.dropout else 0.0,
    )


def division_of(test: golden.Test) -> Division:
    """How it is divided; a batch that grows is taken as four microbatches for each stage."""
    count = test.batch // (test.microbatch * test.dp) if test.batch else 4 * test.axis("PP")
    return Division(
        tp=test.axis("TP"),
        pp=test.axis("PP"),
        chunks=golden._chunks(test, golden._model(test)),
        microbatch=test.microbatch,
        microbatches=max(1, count),
        sequence_parallel=test.on("sequence-parallel"),
        blockwise=test.row["act_ckpt"] == "full",
        gpu=gpu_of(test),
    )


@lru_cache(maxsize=1)
def transformer(shape: Shape) -> nn.Module:
    """The model of Hugging Face, on meta in bfloat16."""
    found = import_transformers()
    common: dict[str, Any] = {
        "attn_implementation": "sdpa" if shape.fused else "eager",
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
    }
    if shape.family == "bert" or shape.rotary:
        common |= {
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "intermediate_size": 4 * shape.hidden,
            "max_position_embeddings": shape.length,
        }
    with torch.device("meta"):
        if shape.family == "bert":
            model = found.BertForPreTraining(found.BertConfig(**common))
        elif shape.rotary:
            config = found.GPTNeoXConfig(
                rotary_pct=1.0,
                hidden_dropout=shape.dropout,
                attention_dropout=shape.dropout,
                use_parallel_residual=False,
                **common,
            )
            model = found.GPTNeoXForCausalLM(config)
        else:
            config = found.GPT2Config(
                n_layer=shape.layers,
                n_embd=shape.hidden,
                n_head=shape.heads,
                n_positions=shape.length,
                activation_function="gelu",
                embd_pdrop=shape.dropout,
                resid_pdrop=shape.dropout,
                attn_pdrop=shape.dropout,
                **common,
            )
            model = found.GPT2LMHeadModel(config)
    return model.to(torch.bfloat16).train()


def in_half(output: Any, labels: Tensor) -> Tensor:
    """The loss in bfloat16, which holds as much as Megatron-LM's does.

    That is a softmax in float32, over which its gradient is written, and the copy of it in bfloat16: the
    bytes of three tensors in bfloat16, as here (result, its gradient, that of the logits). Hugging Face's own
    loss computes in float32 and holds 2.5 times as much.
    """
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@lru_cache(maxsize=256)
def priced(shape: Shape, division: Division) -> StageFigures:
    """What the product expects of the last rank's stages together: as many layers in each stage."""
    model, pp, tp = transformer(shape), division.pp, division.tp
    ids = torch.zeros(division.microbatch * division.microbatches, shape.length, dtype=torch.long)
    one = {"input_ids": ids[: division.microbatch]}
    graph = outsize.capture(model, (), one, loss_fn=in_half, target=ids[: division.microbatch])
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{-(-pp * tp // 8)}x8x{division.gpu}" if pp * tp > 8 else f"{pp * tp}x{division.gpu}",
        axes=Axes(pp=pp, tp=tp),
        batch_size=len(ids),
        microbatches=division.microbatches,
        schedule="interleaved" if division.chunks > 1 else "1f1b",
        stages=tuple(stages_of(graph, shape.layers, division)),
        optimizer="sgd",  # the states are added by `megatron_states`
        sequence_parallel=division.sequence_parallel,
        precision="bf16",
    )
    found, _, _ = price(plan, model, (), {"input_ids": ids}, loss_fn=in_half, target=ids)
    assert found.expected is not None
    own = found.expected.stages[pp - 1 :: pp]
    names = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "boundary_bytes")
    return own[-1].model_copy(update={name: sum(getattr(s, name) for s in own) for name in names})


def stages_of(graph: ModelGraph, layers: int, division: Division) -> Iterator[Stage]:
    """Stages of equally many layers; what is before the first or after the last belongs to it."""
    count, names, place = division.pp * division.chunks, [u.name for u in graph.units], 0
    if layers % count:
        raise Skip("golden: layers are no multiple of the stages")
    members: list[list[int]] = [[] for _ in range(count)]
    inside: list[list[int]] = [[] for _ in range(count)]
    for index, name in enumerate(names):
        found = LAYER.search(name)
        place = int(found[1]) * count // layers if found else (count - 1 if any(inside) else 0)
        members[place].append(index)
        inside[place] += [index] if found else []
    for stage, units in enumerate(members):
        yield Stage(
            units=compress_units(names, units),
            device=f"cuda:{stage % division.pp * division.tp}",
            recompute="selective" if division.blockwise else "none",
            recomputed=compress_units(names, inside[stage]) if division.blockwise else (),
        )


def megatron_states(parameters: int, shards: int) -> float:
    """Bytes of a rank's weights, float32 gradients, copies and moments, the last two over `shards` replicas.

    No option of `fit` asks for this precision; its account of optimizers knows it.
    """
    whole = Parameter(names=("all",), shape=(parameters,), dtype="bfloat16", size_bytes=0, trainable=True)
    held = optimizer_bytes("adam", MASTER_FLOAT32_GRADIENTS).held(whole)
    return held.weight + held.gradient + (held.master + held.state) / shards


# -- all rows --------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Row], tuple[float, float]]] = {"images": image_bytes, "golden": golden_bytes}


def judged(rows: Sequence[Row], only: str | None, *, progress: bool) -> tuple[list[dict[str, Any]], Any]:
    """A result for each row that can be built, and how many others by reason."""
    results, skipped = list[dict[str, Any]](), Counter[str]()
    for row in rows:
        kind = "golden" if row["id"] == "megatron-golden" else "images"
        if only not in (None, kind):
            continue
        try:
            predicted, measured = KINDS[kind](row)
        except Skip as reason:
            skipped[str(reason)] += 1
            continue
        except (OutsizeError, ValueError) as refusal:
            skipped[f"{kind}: {type(refusal).__name__}: {str(refusal)[:90]}"] += 1
            continue
        result = {
            "kind": kind,
            "part": row["id"] if kind == "images" else "tp 1" if "TP1" in row["parallelism"] else "tp 2 to 8",
            "model": row["model"],
            "half": half_of([row["model"]]),
            "hardware": row["hardware"],
            "what": " ".join((row["task"][:24], row["parallelism"], row["seq_or_input"], row["act_ckpt"])),
            "predicted_bytes": round(predicted),
            "measured_bytes": round(measured),
            "error": round(predicted / measured - 1, 4),
        }
        results.append(result)
        if progress:
            print(json.dumps(result), file=sys.stderr, flush=True)
    return results, skipped


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By kind, part of it, and half: median and 95 % of |error|, bias, and the share of rows within 10 %."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name in (row["kind"], f"{row['kind']} {row['part']}"):
            groups[f"{name}, {'reported' if row['half'] else 'tuned'}"].append(row["error"])
            groups[f"{name}, all"].append(row["error"])
    return {
        name: {
            "rows": len(errors),
            "median": statistics.median(map(abs, errors)),
            "p95": sorted(map(abs, errors))[-(-95 * len(errors) // 100) - 1],
            "bias": statistics.mean(errors),
            "within_10": sum(abs(error) <= 0.1 for error in errors) / len(errors),
        }
        for name, errors in sorted(groups.items())
    }


TARGETS = {
    "images": "P50 within 10 % for 80 % of the rows; P95: no row says the memory of the device",
    "golden": "median 3 %, 95 % within 10 %",
}


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'rows of':26} {'rows':>5} {'median':>7} {'95 %':>7} {'bias':>7} {'within 10 %':>12}  target"]
    lines += [
        f"{name:26} {f['rows']:5d} {f['median']:7.1%} {f['p95']:7.1%} {f['bias']:+7.1%}"
        f" {f['within_10']:12.0%}"
        f"  {TARGETS[re.split(' |,', name)[0]]}"
        for name, f in result["figures"].items()
    ]
    lines.append("left out:")
    lines += [f"{count:6}  {reason}" for reason, count in Counter(result["skipped"]).most_common()]
    return "\n".join(lines)


def main() -> int:
    """The table, and results/<date>_product_memory_<machine>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    if options.memory is None or not options.memory.exists():
        print("No published memory: --memory names a CSV (README.md says which columns).")
        return 2
    warnings.simplefilter("ignore")
    rows, skipped = judged(read_rows(options.memory), options.only, progress=options.progress)
    result = {
        "date": str(datetime.date.today()),
        "figures": figures(rows),
        "targets": TARGETS,
        "skipped": dict(skipped),
        "rows": rows,
    }
    if options.only is None:
        machine = f"{platform.machine()}-{platform.system().lower()}"
        path = HERE / "results" / f"{result['date']}_product_memory_{machine}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
