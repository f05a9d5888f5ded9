"""Memory: each row of a file of published peaks, predicted by the product.

Each row becomes a model with weights on meta, and the bytes are the product's. What the software of a row
holds and outsize's engine does not is added with its reason: torch's DDP and Megatron-LM's precision
(`held_by_ddp`, `megatron_states`). Like is compared with like: the rows that can be built say the peak of
allocated bytes, which is P50 without the context and without what allocator and cuDNN keep.

Halves are of models (of tests, for Megatron-LM), by a hash, as everywhere in this folder. Only half 0 was
looked at while constants were set.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import megatron_tests
import torch
from image_models import Segmenter
from megatron_tests import MegatronTest
from priced import Division, Shape, priced
from rows import HALVES, NODE, Row, Skip, half_of
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.capture.models.imports import import_torchvision
from outsize.errors import OutsizeError
from outsize.ir.answers.fit import DeviceFit
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import Parameter
from outsize.planner.memory.optimizer_states import (
    MASTER_FLOAT32_GRADIENTS,
    optimizer_bytes,
)

MIB, GIB = 1 << 20, 1 << 30
# mmcv logs MiB, and the tables have thousands of them; MONeT's authors divide by 2^30.
UNITS = {"mmseg": 1000 * MIB, "monet": GIB}
CLASSES = {"Cityscapes": 19, "ADE20K": 150, "Pascal VOC 2012 + Aug": 21, "Pascal Context": 60}
SEGMENTER = re.compile(r"(FCN|DeepLabV3\+?|PSPNet) R-(18|50|101)(b?)-D8")
GPU = "v100-32gb"
Told = dict[str, Any]


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


def without_kept(held: DeviceFit) -> float:
    """P50 without the driver's context and what is kept; cuBLAS's workspaces are allocated."""
    matmul = parse_cluster(f"1x{GPU}").devices[0].matmul_bytes
    return held.p50_bytes - held.kept_bytes - held.context_bytes + matmul


# -- Megatron-LM -----------------------------------------------------------------------------------------


def golden_bytes(row: Row) -> tuple[float, float]:
    """(predicted, measured) peak of allocated bytes on the last rank."""
    test = megatron_tests.read(row)
    held = held_by_last(shape_of(test), division_of(test))
    states = megatron_states(held["weights"] // 2, test.dp if "dist-opt" in row["parallelism"] else 1)
    device = parse_cluster(f"1x{test.gpu}").devices[0]
    return states + held["moving"] + device.matmul_bytes, float(row["mem_value"])


@lru_cache(maxsize=256)
def held_by_last(shape: Shape, division: Division) -> dict[str, int]:
    """Bytes of the last rank's stages together: weights, and what comes and goes.

    The optimizer is the one without states; `megatron_states` adds them.
    """
    own = priced(shape, division, "sgd").stages[division.pp - 1 :: division.pp]
    return {
        "weights": sum(stage.weights_bytes for stage in own),
        "moving": sum(stage.activations_bytes + stage.boundary_bytes for stage in own),
    }


def shape_of(test: MegatronTest) -> Shape:
    """What the model is made from."""
    return Shape(
        family="bert" if test.family == "bert" else "neox" if test.rotary else "gpt",
        layers=test.layers,
        hidden=test.number("hidden-size"),
        heads=test.number("num-attention-heads"),
        length=int(re.findall(r"\d+", test.row["seq_or_input"])[0]),
        vocabulary=test.vocabulary,
        tied=not test.on("untie-embeddings-and-output-weights"),
        fused=test.fused,
        dropout=0.0 if test.options.get("hidden-dropout") == "0.0" else 0.1,
        activation="gelu",
        scaled=True,
        loss="half",
    )


def division_of(test: MegatronTest) -> Division:
    """How it is divided; a batch that grows is taken as four microbatches for each stage.

    Replicas divide no more than the states, which are added.
    """
    pp, tp = test.axis("PP"), test.axis("TP")
    count = test.batch // (test.microbatch * test.dp) if test.batch else 4 * pp
    nodes = f"{-(-pp * tp // NODE)}x{NODE}" if pp * tp > NODE else f"{pp * tp}"
    return Division(
        tp=tp,
        pp=pp,
        chunks=test.chunks,
        dp=1,
        microbatch=test.microbatch,
        microbatches=max(1, count),
        sequence_parallel=test.on("sequence-parallel"),
        recompute="full" if test.row["act_ckpt"] == "full" else "none",
        cluster=f"{nodes}x{test.gpu}",
    )


def megatron_states(parameters: int, shards: int) -> float:
    """Bytes of a rank's weights, float32 gradients, copies and moments, the last two over `shards` replicas.

    No option of `fit` asks for this precision; its account of optimizers knows it.
    """
    whole = Parameter(names=("all",), shape=(parameters,), dtype="bfloat16", size_bytes=0, trainable=True)
    held = optimizer_bytes("adam", MASTER_FLOAT32_GRADIENTS).held(whole)
    return held.weight + held.gradient + (held.master + held.state) / shards


# -- all rows --------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Row], tuple[float, float]]] = {"images": image_bytes, "Megatron-LM": golden_bytes}


def judged(rows: Sequence[Row]) -> tuple[list[Told], Counter[str]]:
    """A result for each row that can be built, and how many others by reason."""
    results, skipped = list[Told](), Counter[str]()
    for row in rows:
        kind = "Megatron-LM" if row["id"] == "megatron-golden" else "images"
        try:
            predicted, measured = KINDS[kind](row)
        except Skip as reason:
            skipped[str(reason)] += 1
            continue
        except OutsizeError as refusal:
            skipped[f"{kind}: {type(refusal).__name__}: {str(refusal)[:90]}"] += 1
            continue
        except (ValueError, ArithmeticError):
            skipped[f"{kind}: a number is no number, or out of range"] += 1
            continue
        part = row["id"] if kind == "images" else "tp 1" if "TP1" in row["parallelism"] else "tp 2 to 8"
        results.append(
            {
                "kind": kind,
                "part": part,
                "model": row["model"],
                "half": HALVES[half_of([row["model"]])],
                "hardware": row["hardware"],
                "what": " ".join(
                    (row["task"][:24], row["parallelism"], row["seq_or_input"], row["act_ckpt"])
                ),
                "predicted_bytes": round(predicted),
                "measured_bytes": round(measured),
                "error": round(predicted / measured - 1, 4),
            }
        )
    return results, skipped


def errors_of(rows: Sequence[Told]) -> dict[str, dict[str, float]]:
    """By kind, part of it, and half: median and 95 % of |error|, bias, and the share of rows within 10 %."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name in (row["kind"], f"{row['kind']} {row['part']}"):
            groups[f"{name}, {row['half']}"].append(row["error"])
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
