"""Codes and scales in files become the values that they mean, box by box, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outsize.errors import BadWeights
from outsize.run.weights.dequantized import DequantizedWeights
from outsize.run.weights.load import load_weights, source_for
from outsize.run.weights.safetensors import SINGLE, WeightFiles

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def source(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> WeightFiles:
    save_file(tensors, folder / SINGLE)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return WeightFiles(folder)


def codes(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-100, 100, (6, 8), generator=generator).float().to(dtype)


def by_blocks(numbers: Tensor, rows: int, columns: int) -> Tensor:
    return numbers.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:6, :8]


GRID, GROUPS = torch.rand(2, 2) + 1, torch.rand(6, 4) + 1
OF_ROWS = torch.tensor(0, dtype=torch.uint8)
CASES: dict[str, tuple[dict[str, Tensor], dict[str, Any] | None, Tensor]] = {
    "blocks": ({"weight": codes(FP8), "weight_scale_inv": GRID}, None, by_blocks(GRID, 3, 4)),
    "blocks that the size is no multiple of": (
        {"weight": codes(FP8), "weight_scale_inv": GRID},
        {"weight_block_size": [4, 5]},
        by_blocks(GRID, 4, 5),
    ),
    "one number": ({"weight": codes(FP8), "weight_scale": torch.tensor(0.25)}, None, torch.tensor(0.25)),
    "rows": (
        {"weight": codes(torch.int8), "weight_scale": torch.arange(1.0, 7).unsqueeze(1)},
        None,
        torch.arange(1.0, 7).unsqueeze(1),
    ),
    "groups of columns": (
        {"weight": codes(torch.int8), "weight_scale": GROUPS},
        None,
        by_blocks(GROUPS, 1, 2),
    ),
    "powers of two": (
        {"weight": codes(FP8), "weight_scale_inv": torch.full((6, 1), 129, dtype=torch.uint8)},
        None,
        torch.tensor(4.0),
    ),
    "maxima of rows": (
        {"weight": codes(torch.int8), "SCB": torch.full((6,), 63.5), "weight_format": OF_ROWS},
        None,
        torch.tensor(0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_codes_become_values_and_scales_are_gone(tmp_path: Path, case: str) -> None:
    tensors, config, scale = CASES[case]
    made = DequantizedWeights(source(tmp_path, tensors, config), ("weight",))
    wanted = tensors["weight"].float() * scale
    assert made.names == ("weight",)
    assert made.described(["weight"])["weight"].dtype == torch.float32
    assert torch.allclose(made.box("weight"), wanted, rtol=1e-6, atol=0)
    assert torch.equal(made.box("weight", (1, 3), (4, 5)), made.box("weight")[1:5, 3:])
    assert "1 weights are codes with scales" in made.notes[0]


def test_a_zero_point_is_subtracted(tmp_path: Path) -> None:
    points = torch.arange(6, dtype=torch.int8).unsqueeze(1)
    tensors = {
        "weight": codes(torch.int8),
        "weight_scale": torch.full((6, 1), 0.5),
        "weight_zero_point": points,
    }
    made = DequantizedWeights(source(tmp_path, tensors), ("weight",))
    assert torch.equal(made.box("weight"), (codes(torch.int8).float() - points) * 0.5)


def test_scales_of_the_model_itself_stay(tmp_path: Path) -> None:
    files = source(tmp_path, {"weight": codes(FP8), "weight_scale": torch.ones(())})
    made = DequantizedWeights(files, ("weight", "weight_scale"))
    assert made.box("weight").dtype == FP8
    assert made.names == ("weight", "weight_scale")


def test_a_model_gets_the_values_in_its_dtype(tmp_path: Path) -> None:
    files = source(tmp_path, {"weight": codes(FP8), "weight_scale_inv": GRID, "bias": torch.ones(6)})
    with torch.device("meta"):
        model = nn.Linear(8, 6).bfloat16()
    load_weights(model, source_for(model, files), CPU, set())
    assert torch.equal(model.weight, (codes(FP8).float() * by_blocks(GRID, 3, 4)).bfloat16())


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"weight": codes(torch.int8)}, "weight is saved in .* as codes.*1 weights are int8: weight"),
        (
            {"weight": codes(FP8), "weight_table": GRID},
            "1 weights are float8_e4m3fn: weight; quant_method odd",
        ),
        (
            {"weight": codes(FP8), "weight_scale_inv": torch.ones(4, 3)},
            r"unclear; codes \[6, 8\], scales \[4, 3\]",
        ),
    ],
)
def test_what_codes_mean_is_not_guessed(tmp_path: Path, tensors: dict[str, Tensor], said: str) -> None:
    files = source(tmp_path, {**tensors, "bias": torch.ones(6)}, {"quant_method": "odd"})
    model = nn.Linear(8, 6)
    before = model.weight.clone()
    with pytest.raises(BadWeights, match=rf"E107.*{said}"):
        load_weights(model, source_for(model, files), CPU, set())
    assert torch.equal(model.weight, before)


def test_plain_numbers_of_one_byte_are_values(tmp_path: Path) -> None:
    files = source(tmp_path, {"weight": codes(FP8), "bias": torch.ones(6)})
    model = nn.Linear(8, 6)
    notes = load_weights(model, source_for(model, files), CPU, set())
    assert torch.equal(model.weight, codes(FP8).float())
    assert notes == ("1 weights are float8_e4m3fn in the file and were copied into the model's float32",)
