"""Example batches: the shapes asked for, and batches that the models themselves accept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.models.load import example, load
from outsize.errors import BadOption, ExampleRejected

pytestmark = pytest.mark.filterwarnings("ignore:torchvision .* is built for another torch")

TINY = "num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=16"
SMALL = "d_model=16&encoder_layers=1&decoder_layers=1&encoder_attention_heads=2&decoder_attention_heads=2"


def shapes(batch: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[Any, tuple[int, ...]]:
    args, kwargs = batch
    return {key: tuple(t.shape) for key, t in [*enumerate(args), *kwargs.items()]}


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        (nn.Linear(7, 3), None, {0: (4, 7)}),
        (nn.Linear(7, 3), "5x7", {0: (4, 5, 7)}),
        (nn.Conv2d(3, 4, 3), None, {0: (4, 3, 224, 224)}),
        (nn.Conv2d(1, 4, 3), "1x28x28", {0: (4, 1, 28, 28)}),
        (nn.Conv3d(3, 4, 3), None, {0: (4, 3, 16, 224, 224)}),
        (nn.Conv1d(2, 4, 3), None, {0: (4, 2, 128)}),
        (nn.Embedding(9, 3), None, {0: (4, 128)}),
        (nn.Embedding(9, 3), "12", {0: (4, 12)}),
        (nn.Identity(), "3x8x8,3x8x8", {0: (4, 3, 8, 8), 1: (4, 3, 8, 8)}),
    ],
)
def test_one_samples_shape_or_a_guess_from_the_first_layer(
    model: nn.Module, text: str | None, expected: dict[int, tuple[int, ...]]
) -> None:
    assert shapes(example(model, text, 4)) == expected


def test_token_ids_are_below_the_vocabulary_and_floats_are_normal() -> None:
    ids = example(nn.Embedding(9, 3), "100", 4)[0][0]
    assert ids.dtype == torch.int64
    assert (int(ids.min()), int(ids.max())) == (0, 8)
    floats = example(nn.Linear(7, 3), "1000", 4)[0][0]
    assert floats.dtype == torch.float32
    assert abs(float(floats.std()) - 1) < 0.1


def test_the_seed_decides_and_the_caller_keeps_its_generator() -> None:
    model = nn.Linear(7, 3)
    before = torch.get_rng_state()
    first, again, other = (example(model, None, 4, seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("text", ["3x", "0x3", "-1", "3x224x224px", "", "3,"])
def test_a_bad_shape_is_a_bad_option(text: str) -> None:
    with pytest.raises(BadOption, match=r"E106.*--input 3x224x224"):
        example(nn.Linear(7, 3), text, 4)


def test_no_guess_and_no_sample_are_bad_options() -> None:
    with pytest.raises(BadOption, match="can be guessed for LSTM"):
        example(nn.LSTM(3, 3), None, 4)
    with pytest.raises(BadOption, match="--batch 0"):
        example(nn.Linear(7, 3), None, 0)


@pytest.mark.parametrize(
    ("name", "images", "keys"),
    [
        ("raft_small", [(2, 3, 224, 224)] * 2, ()),
        ("quantized_inception_v3", [(2, 3, 299, 299)], ()),
        ("ssd300_vgg16", [(3, 300, 300)] * 2, ("boxes", "labels")),
        ("retinanet_resnet50_fpn", [(3, 800, 800)] * 2, ("boxes", "labels")),
        ("maskrcnn_resnet50_fpn", [(3, 800, 800)] * 2, ("boxes", "labels", "masks")),
        ("keypointrcnn_resnet50_fpn", [(3, 800, 800)] * 2, ("boxes", "labels", "keypoints")),
    ],
)
def test_torchvisions_families_get_what_their_training_takes(
    name: str, images: list[tuple[int, ...]], keys: tuple[str, ...]
) -> None:
    args, _ = example(
        load(f"torchvision:{name}?num_classes=4" if keys else f"torchvision:{name}", meta=True), None, 2
    )
    assert [tuple(t.shape) for t in (args[0] if keys else args)] == images
    for target in args[1] if keys else ():
        assert tuple(target) == keys
        left, top, right, bottom = target["boxes"][0]
        assert left < right
        assert top < bottom
        assert all(t.shape[0] == 1 for t in target.values())


def test_a_detector_trains_on_its_example() -> None:
    model = load("torchvision:ssdlite320_mobilenet_v3_large?num_classes=4")
    args, _ = example(model, "3x64x64", 2)
    losses = model.train()(*args)
    assert sorted(losses) == ["bbox_regression", "classification"]
    assert all(bool(torch.isfinite(loss)) for loss in losses.values())


# -- transformers ----------------------------------------------------------------------------------

TOKENS = {"input_ids": (2, 24), "labels": (2, 24)}


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        (f"LlamaConfig?{TINY}", "24", TOKENS),
        (f"LlamaConfig?{TINY}", None, {"input_ids": (2, 128), "labels": (2, 128)}),
        ("GPT2Config?n_layer=1&n_embd=16&n_head=2&n_positions=24", None, TOKENS),
        (f"BertConfig?{TINY}", "24", TOKENS),
        (
            f"BertConfig?{TINY}&class=BertForSequenceClassification",
            "24",
            {"input_ids": (2, 24), "labels": (2,)},
        ),
        (f"BertConfig?{TINY}&class=BertForTokenClassification", "24", TOKENS),
        (f"BertConfig?{TINY}&class=BertModel", "24", {"input_ids": (2, 24)}),
        ("T5Config?d_model=16&num_layers=1&num_heads=2&d_kv=8&d_ff=16", "24", TOKENS),
        (
            "T5Config?d_model=16&num_layers=1&num_heads=2&d_kv=8&d_ff=16&class=T5Model",
            "24",
            {"input_ids": (2, 24), "decoder_input_ids": (2, 24)},
        ),
        (f"BartConfig?{SMALL}", "24", TOKENS),
        (f"ViTConfig?{TINY}", None, {"pixel_values": (2, 3, 224, 224), "labels": (2,)}),
        (f"ViTConfig?{TINY}&image_size=64", "3x64x64", {"pixel_values": (2, 3, 64, 64), "labels": (2,)}),
        (
            f"WhisperConfig?{SMALL}&max_source_positions=50&max_target_positions=24",
            None,
            {"input_features": (2, 80, 100), "labels": (2, 24)},
        ),
        ("MambaConfig?num_hidden_layers=1&hidden_size=16", "24", TOKENS),
    ],
)
def test_transformers_batches_run_and_have_a_loss_where_the_class_has_one(
    spec: str, text: str | None, expected: dict[Any, tuple[int, ...]]
) -> None:
    model = load(f"transformers:{spec}")
    batch = example(model, text, 2)
    assert shapes(batch) == expected
    output = model(**batch[1])
    assert ("labels" in expected) == (getattr(output, "loss", None) is not None)
    if "labels" in expected:
        assert isinstance(output.loss, Tensor)
        assert torch.isfinite(output.loss)


# -- the builder's own -----------------------------------------------------------------------------

BUILDER = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 4)

def example_batch({parameters}):
    {body}
"""


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, body: str) -> nn.Module:
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "with_example", raising=False)
    (folder / "with_example.py").write_text(BUILDER.format(parameters=parameters, body=body))
    return load("with_example:build")


def test_the_builders_own_batch_wins_over_the_guess_but_not_over_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "return (torch.ones(batch, 9, 3),), {'scale': 2.0}"
    model = own(tmp_path, monkeypatch, "batch", body)
    args, kwargs = example(model, None, 4, spec="with_example:build")
    assert (tuple(args[0].shape), kwargs) == ((4, 9, 3), {"scale": 2.0})
    assert shapes(example(model, "3", 4, spec="with_example:build")) == {0: (4, 3)}


def test_the_builders_own_batch_may_be_fixed_wrong_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own(tmp_path, monkeypatch, "", "return (torch.ones(6, 3),), {}")
    assert shapes(example(model, None, 4, spec="with_example:build")) == {0: (6, 3)}
    model = own(tmp_path, monkeypatch, "", "return [torch.ones(6, 3)]  # a list")
    with pytest.raises(BadOption, match=r"example_batch returns a list.*return \(args, kwargs\)"):
        example(model, None, 4, spec="with_example:build")
    model = own(tmp_path, monkeypatch, "", "raise OSError('no such file: data.bin')")
    with pytest.raises(ExampleRejected, match=r"E103.*OSError: no such file: data.bin"):
        example(model, None, 4, spec="with_example:build")
