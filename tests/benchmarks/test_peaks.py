"""The benchmark of published peaks, on rows made up here: what is built, what is left out, what is added."""

from __future__ import annotations

from collections import defaultdict

import megatron_tests
import peaks
import pytest
import torch
from image_models import Segmenter
from torch import nn

from outsize.capture.models.imports import import_torchvision

GOLDEN = {
    "id": "megatron-golden",
    "family": "gpt",
    "model": "small",
    "hardware": "A100 DGX",
    "num_devices": "8",
    "parallelism": "TP1 PP2",
    "precision": "bf16",
    "batch_per_device": "mbs 2 gbs 32",
    "seq_or_input": "seq 32",
    "act_ckpt": "none",
    "mem_value": "100000000",
    "notes": "num-layers=4 hidden-size=64 num-attention-heads=4 vocab-size=256",
}


def row(**changes: str) -> dict[str, str]:
    return defaultdict(str, GOLDEN | changes)


def test_a_row_of_megatron_is_weights_states_and_what_moves() -> None:
    predicted, measured = peaks.golden_bytes(row())
    test = megatron_tests.read(row())
    shape, division = peaks.shape_of(test), peaks.division_of(test)
    held = peaks.held_by_last(shape, division)
    hidden, layers, vocabulary = 64, 2, 256  # the last of two stages; the head's weights are tied
    parameters = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + vocabulary * hidden
    assert held["weights"] == 2 * parameters
    assert (division.microbatches, division.pp, measured) == (32 // 2 // 4, 2, 1e8)
    # 2 + 4 + 4 + 8 bytes a parameter, and the optimizer's counter; cuBLAS has two workspaces.
    assert predicted == 18 * parameters + 4 + held["moving"] + 2 * 8320 * 1024
    shared = peaks.golden_bytes(row(parallelism="TP1 PP2 dist-opt"))[0]
    assert predicted - shared == pytest.approx((12 * parameters + 4) * 3 / 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "moe"},
        {"precision": "fp16"},
        {"notes": GOLDEN["notes"] + " swiglu=True"},
        {"notes": GOLDEN["notes"] + " num-query-groups=2"},
        {"parallelism": "TP1 PP5"},
        {"model": "small_uneven_pipeline"},
    ],
)
def test_what_cannot_be_built_is_counted_with_its_reason(changes: dict[str, str]) -> None:
    results, skipped = peaks.judged([row(**changes)])
    assert not results
    assert sum(skipped.values()) == 1
    assert next(iter(skipped)).startswith(("golden: ", "Megatron-LM: BadOption"))


def test_figures_are_by_kind_part_and_half() -> None:
    rows = [
        {"kind": "Megatron-LM", "part": part, "half": half, "error": error}
        for part, half, error in (
            ("tp 1", "tuned", 0.02),
            ("tp 1", "held out", -0.04),
            ("tp 2 to 8", "held out", 0.2),
        )
    ]
    found = peaks.errors_of(rows)
    assert found["Megatron-LM, all"] == {
        "rows": 3,
        "median": 0.04,
        "p95": 0.2,
        "bias": pytest.approx(0.06),
        "within_10": pytest.approx(2 / 3),
    }
    assert (found["Megatron-LM tp 1, tuned"]["rows"], found["Megatron-LM tp 2 to 8, held out"]["bias"]) == (
        1,
        0.2,
    )


@pytest.mark.parametrize(
    ("kind", "depth"), [("FCN", 18), ("PSPNet", 50), ("DeepLabV3", 18), ("DeepLabV3+", 50)]
)
def test_segmenters_have_the_sizes_of_mmsegmentation(kind: str, depth: int) -> None:
    with torch.device("meta"):
        model = Segmenter(kind, depth, True, 19)
        loss = model(torch.empty(2, 3, 64, 128), torch.zeros(2, 64, 128, dtype=torch.long))
        features = model.backbone(torch.empty(2, 3, 64, 128))
    assert loss.shape == ()
    # D8: an eighth of the image from the second stage on.
    assert [f.shape[-1] for f in features] == [32, 16, 16, 16]


@pytest.mark.parametrize("depth", [18, 50, 101])
def test_the_backbone_is_torchvisions_where_its_stem_is(depth: int) -> None:
    with torch.device("meta"):
        known = import_torchvision().models.get_model(f"resnet{depth}", weights=None)
        backbone = Segmenter("FCN", depth, False, 19).backbone
    known.fc = nn.Identity()
    shapes = [sorted(tuple(p.shape) for p in model.parameters()) for model in (backbone, known)]
    assert shapes[0] == shapes[1]


def test_the_head_of_deeplab_has_its_weights() -> None:
    with torch.device("meta"):
        head = Segmenter("DeepLabV3", 50, True, 19).head
    branches = 5 * 512 * 2 + 2048 * 512 * (1 + 3 * 9 + 1)  # 1x1, three dilated 3x3, 1x1 of the pool
    joined = 5 * 512 * 512 * 9 + 512 * 2
    assert sum(p.numel() for p in head.parameters()) == branches + joined + 512 * 19 + 19


def test_relu6_of_an_old_torch_keeps_its_result_alone() -> None:
    model = peaks.with_relu(nn.Sequential(nn.ReLU6(), nn.Sequential(nn.ReLU6(inplace=True))))
    assert [type(m) for m in model.modules()].count(nn.ReLU) == 2
