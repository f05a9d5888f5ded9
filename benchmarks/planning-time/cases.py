"""The models and clusters of the question: captured from their configurations on meta, no weight is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F

from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Precision
from outsize.train.measure.training_case import TrainingCase, as_batch

VOCABULARY: Final = 51200
CLASSES: Final = 1000
# Samples of the batch a model is recorded with before it is resized.
EXAMPLE: Final = 2


@final
@dataclass(frozen=True)
class Case:
    """One planning problem; `sizes` are the samples of a microbatch that the search may choose from.

    `published_s`: seconds that other systems report for a problem of this size, on machines of their own.
    """

    name: str
    build: Callable[[], TrainingCase]
    cluster: str
    batch_size: int
    sizes: tuple[int, ...]
    precision: Precision
    target_s: float
    target_gap: float | None = None
    published_s: dict[str, float] = field(default_factory=dict[str, float])

    def graphs(self, folder: Path) -> dict[int, ModelGraph]:
        """Microbatches of the whole batch -> the model at that size; captured once, then read again."""
        missing = [size for size in self.sizes if not self._path(folder, size).exists()]
        subject = self.build().under(self.precision) if missing else None
        for size in missing:
            assert subject is not None
            graph = subject.captured(size).graph
            self._path(folder, size).write_text(graph.model_dump_json(), encoding="utf-8")
        return {self.batch_size // size: self._read(folder, size) for size in self.sizes}

    def _read(self, folder: Path, size: int) -> ModelGraph:
        return ModelGraph.model_validate_json(self._path(folder, size).read_text(encoding="utf-8"))

    def _path(self, folder: Path, size: int) -> Path:
        return folder / f"{self.name}_{size}.json"


def gpt(layers: int, hidden: int, heads: int, length: int) -> TrainingCase:
    """GPT-2's architecture with its own loss."""
    library: Any = import_transformers()
    config = library.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=length,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return _language(library.GPT2LMHeadModel, config, length)


def llama(length: int, **config: Any) -> TrainingCase:
    """A Llama with its own loss."""
    library: Any = import_transformers()
    return _language(library.LlamaForCausalLM, library.LlamaConfig(use_cache=False, **config), length)


def _language(kind: Callable[[Any], Any], config: Any, length: int) -> TrainingCase:
    with torch.device("meta"):
        model = kind(config)
    # Token numbers are real: what a model decides on them is a guard, on meta it would be a guess.
    ids = torch.zeros(EXAMPLE, length, dtype=torch.long)
    return TrainingCase.of(model, as_batch((), {"input_ids": ids, "labels": ids}, None), None, None)


def wide_resnet(width_per_group: int, side: int = 224) -> TrainingCase:
    """A ResNet-101 whose inner convolutions are wide, on square images."""
    library: Any = import_torchvision().models.resnet
    with torch.device("meta"):
        model = library.ResNet(library.Bottleneck, [3, 4, 23, 3], CLASSES, width_per_group=width_per_group)
        x = torch.empty(EXAMPLE, 3, side, side)
    y = torch.zeros(EXAMPLE, dtype=torch.long)
    return TrainingCase.of(model, as_batch((x,), {}, y), F.cross_entropy, None)


CASES: Final = (
    Case(
        name="1024-layers-8-gpus",
        build=partial(gpt, 1024, 1024, 16, 1024),
        cluster="8xv100-32gb",
        batch_size=512,
        sizes=(1, 2, 4),
        precision="fp16-mixed",
        target_s=5.0,
        published_s={"Aceso": 246.0},
    ),
    Case(
        name="gpt-13b-32-gpus",
        build=partial(gpt, 40, 5120, 40, 2048),
        cluster="4x8xv100-32gb",
        batch_size=1024,
        sizes=(1, 2, 4),
        precision="fp16-mixed",
        target_s=1.0,
        published_s={"Aceso": 201.0, "Alpa": 12821.0},
    ),
    Case(
        name="wide-resnet-13b-32-gpus",
        build=partial(wide_resnet, 1552),
        cluster="4x8xv100-32gb",
        batch_size=1536,
        sizes=(8, 16, 32),
        precision="fp32",
        target_s=2.0,
    ),
    Case(
        name="three-types-768-gpus",
        build=partial(gpt, 1024, 8192, 64, 2048),
        cluster="32x8xh100-80gb+32x8xa100-80gb+32x8xv100-32gb",
        batch_size=4096,
        sizes=(1,),
        precision="fp16-mixed",
        target_s=30.0,
        target_gap=0.02,
    ),
    Case(
        name="llama-405b-16384-gpus",
        build=partial(
            llama,
            8192,
            num_hidden_layers=126,
            hidden_size=16384,
            num_attention_heads=128,
            num_key_value_heads=8,
            intermediate_size=53248,
            vocab_size=128256,
            max_position_embeddings=8192,
        ),
        cluster="2048x8xh100-80gb",
        batch_size=2048,
        sizes=(1, 2),
        precision="bf16-mixed",
        target_s=30.0,
    ),
)
