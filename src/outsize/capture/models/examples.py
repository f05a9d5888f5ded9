"""Makes the example batch of a model when the user gives no tensors: `--input` and `--batch` are enough.

`--input` is the shape of one sample: `3x224x224`; several inputs are separated by commas: `3x64x64,3x64x64`.
For a transformers model one number is the sequence length (for an image model the side of the image). Without
`--input` the batch is what `example_batch` of the builder's module returns; for transformers it has the
config's own sizes, at most 128 tokens; else it is a guess from the first layer: 3x224x224 before a Conv2d of
three channels. torchvision's detectors get lists of images and of targets with one box each, its RAFT two
images. Values are drawn from a separate generator: normal floats, uniform token ids and classes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.models.transformers_classes import labels_of
from outsize.errors import BadOption, ExampleRejected
from outsize.errors.interruptions import raise_interruption
from outsize.ir.formatting import whole_number

Example = tuple[tuple[Any, ...], dict[str, Any]]
Shape = tuple[int, ...]

TOKENS = 128
_IMAGE_SIDE = 224
_IMAGE_SIDES = {"Inception3": 299}  # This is torchvision's own minimum with the auxiliary head.
_AUDIO_SAMPLES = 16_000  # The length is one second.


def example(
    model: nn.Module, spec_input: str | None, batch: int, seed: int = 0, *, spec: str = ""
) -> Example:
    """Returns `(args, kwargs)` of `batch` samples on the CPU; `spec` is the MODEL spec of the model.

    `example_batch` of a builder's module is called with the batch size if it takes an argument. Raises
    BadOption (no such shape, or none can be guessed) and ExampleRejected (`example_batch` raised).
    """
    if batch < 1:
        raise BadOption(f"--batch {batch}", next_step="give at least one sample, --batch 8")
    shapes = _shapes(spec_input)
    example_batch = None if shapes else _own_example(model, spec)
    if example_batch is not None:
        return _call_own(example_batch, batch)
    draw = _Draw(batch, torch.Generator().manual_seed(seed))
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return (), _transformers_example(model, shapes[0] if shapes else (), draw)
    if type(model).__module__.startswith("torchvision.models.detection."):
        return _detection_example(model, shapes[0] if shapes else None, draw), {}
    return _plain_example(model, shapes, draw), {}


def _shapes(text: str | None) -> list[Shape]:
    if text is None:
        return []
    shapes = text.replace(" ", "").split(",")
    sizes = [tuple(whole_number(size) or 0 for size in shape.split("x")) for shape in shapes]
    if not all(map(all, sizes)):
        raise BadOption(f"--input {text!r} is no shape", next_step="--input 3x224x224, or --input 128")
    return sizes


@final
@dataclass(frozen=True)
class _Draw:
    """Draws random tensors of one batch."""

    batch: int
    generator: torch.Generator

    def normal(self, shape: Shape) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator)

    def below(self, high: int, shape: Shape) -> Tensor:
        return torch.randint(0, high, (self.batch, *shape), generator=self.generator)


# -- the builder's own -----------------------------------------------------------------------------


def _own_example(model: nn.Module, spec: str) -> Callable[..., Any] | None:
    for name in (spec.partition(":")[0], type(model).__module__):
        function = getattr(sys.modules.get(name), "example_batch", None)
        if callable(function):
            return function
    return None


def _call_own(function: Callable[..., Any], batch: int) -> Example:
    try:
        made = function(batch) if inspect.signature(function).parameters else function()
    except Exception as error:
        raise_interruption(error)
        raise ExampleRejected(
            "example_batch raised",
            numbers=f"{type(error).__name__}: {error}",
            next_step="give --input, or fix example_batch",
        ) from error
    match made:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
    raise BadOption(
        f"example_batch returns a {type(made).__name__} instead of (args, kwargs)",
        next_step="return (args, kwargs) from it",
    )


# -- any module ------------------------------------------------------------------------------------


def _plain_example(model: nn.Module, shapes: list[Shape], draw: _Draw) -> tuple[Tensor, ...]:
    first = _first_layer(model)
    if isinstance(first, nn.Embedding):
        return tuple(draw.below(first.num_embeddings, shape) for shape in shapes or [(TOKENS,)])
    shapes = shapes or [_guess(model, first)]
    images = 2 if type(model).__name__ == "RAFT" and len(shapes) == 1 else 1
    return tuple(draw.normal(shape) for shape in shapes * images)


def _detection_example(model: Any, shape: Shape | None, draw: _Draw) -> tuple[Any, ...]:
    """Returns images of the size that the model resizes to, each with one box in its middle."""
    resize, roi = model.transform, getattr(model, "roi_heads", None)
    channels, height, width = shape or (3, *(resize.fixed_size or 2 * resize.min_size[-1:]))
    box = torch.tensor([[width / 4, height / 4, 3 * width / 4, 3 * height / 4]])
    target = {"boxes": box, "labels": torch.ones(1, dtype=torch.int64)}
    if roi is not None and roi.has_mask():
        target["masks"] = torch.ones(1, height, width, dtype=torch.uint8)
    if roi is not None and roi.has_keypoint():
        points = roi.keypoint_predictor.kps_score_lowres.out_channels
        target["keypoints"] = torch.cat([box.reshape(2, 2).mean(0), torch.ones(1)]).expand(1, points, 3)
    return [*draw.normal((channels, height, width))], [dict(target) for _ in range(draw.batch)]


def _first_layer(model: nn.Module) -> nn.Module | None:
    kinds = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
    return next((module for module in model.modules() if isinstance(module, kinds)), None)


def _guess(model: nn.Module, first: nn.Module | None) -> Shape:
    known_sides = (
        _IMAGE_SIDES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _IMAGE_SIDES
    )
    side = getattr(model, "image_size", next(known_sides, _IMAGE_SIDE))
    match first:
        case nn.Linear():
            return (first.in_features,)
        case nn.Conv1d():
            return (first.in_channels, TOKENS)
        case nn.Conv2d():
            return (first.in_channels, side, side)
        case nn.Conv3d():
            return (first.in_channels, 16, side, side)
    raise BadOption(
        f"no input shape can be guessed for {type(model).__name__}",
        next_step="give the shape of one sample, --input 3x224x224, or example_batch() beside the builder",
    )


# -- transformers ----------------------------------------------------------------------------------


def _transformers_example(model: Any, shape: Shape, draw: _Draw) -> dict[str, Tensor]:
    name, text = model.main_input_name, model.config.get_text_config(decoder=True)
    length = shape[0] if len(shape) == 1 else min(TOKENS, _positions(text))
    vocabulary: int = getattr(text, "vocab_size", None) or 0
    if name == "input_ids":
        inputs = {name: draw.below(vocabulary, (length,))}
    else:
        inputs = {name: draw.normal(_signal_shape(name, model.config, shape))}
    accepted = inspect.signature(model.forward).parameters
    labels = _labels(model, vocabulary, length, draw) if "labels" in accepted else None
    if labels is not None:
        return {**inputs, "labels": labels}
    if model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": draw.below(vocabulary, (length,))}
    return inputs


def _labels(model: Any, vocabulary: int, length: int, draw: _Draw) -> Tensor | None:
    classes = model.config.num_labels
    match labels_of(model):
        case "tokens" if vocabulary:
            return draw.below(vocabulary, (length,))
        case "class" if classes == 1:
            return draw.normal(())  # transformers takes one label for a regression
        case "class":
            return draw.below(classes, ())
        case "class per token":
            return draw.below(classes, (length,))
    return None


def most_tokens(model: nn.Module) -> int | None:
    """Returns the longest sequence that a model of transformers has positions for; None: no bound."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    longest = _positions(config.get_text_config(decoder=True))
    return None if longest == sys.maxsize else longest


def _positions(config: Any) -> int:
    """Returns the longest sequence that the position embeddings hold; no bound where there are none."""
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    bounds = [getattr(config, name, None) for name in names]
    return min([b for b in bounds if isinstance(b, int) and b > 0], default=sys.maxsize)


def _signal_shape(name: str, config: Any, shape: Shape) -> Shape:
    """Returns the shape of one sample of pixels, mel features or audio; `shape` wins where it is complete."""
    if len(shape) > 1:
        return shape
    match name:
        case "pixel_values":
            return _image_shape(config, shape)
        case "input_features" if hasattr(config, "max_source_positions"):
            return (config.num_mel_bins, 2 * config.max_source_positions)
        case "input_values" if hasattr(config, "num_mel_bins"):
            return (config.max_length, config.num_mel_bins)
        case "input_values":
            return shape or (_AUDIO_SAMPLES,)
    raise BadOption(
        f"no shape can be guessed for {name!r} of {type(config).__name__}",
        next_step="give the shape of one sample, --input 80x3000",
    )


def _image_shape(config: Any, shape: Shape) -> Shape:
    config = getattr(config, "vision_config", config)
    size = shape or getattr(config, "image_size", _IMAGE_SIDE)
    sides = (size, size) if isinstance(size, int) else tuple(size) * (2 // len(tuple(size)))
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return (*frames, getattr(config, "num_channels", 3), *sides)
