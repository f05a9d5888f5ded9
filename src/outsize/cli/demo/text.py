"""The text job: a GPT-2 of 3 M parameters learns Python's own help topics byte by byte.

`pydoc_data.topics` (what `help("LAMBDAS")` shows) is part of every CPython, so nothing is downloaded.
Guessing each byte by its frequency alone costs 3.26 nats, so a loss below 3.0 needs the context.
"""

from __future__ import annotations

from functools import cached_property
from pydoc_data.topics import topics
from typing import final

import torch
from torch import Tensor, nn

from outsize.capture.models.imports import import_transformers
from outsize.cli.demo.job import DemoBatch, DemoJob, TrainingRecipe, library_messages_off, seeded

BYTE_VALUES = 256


def text_job(*, quick: bool) -> DemoJob:
    """Returns the job; `quick` returns a tiny model with a few steps."""
    if quick:
        recipe = TrainingRecipe(batch_size=4, steps=6, learning_rate=5e-3, warmup=2)
        return TextJob(layers=2, width=64, context=32, recipe=recipe)
    recipe = TrainingRecipe(batch_size=8, steps=130, learning_rate=3e-3, warmup=10)
    return TextJob(layers=4, width=256, context=128, recipe=recipe, goal=3.0)


@final
class TextJob(DemoJob):
    """transformers' GPT2LMHeadModel with tied embeddings and the loss computed inside the model."""

    name = "gpt2"

    def __init__(
        self, *, layers: int, width: int, context: int, recipe: TrainingRecipe, goal: float | None = None
    ) -> None:
        self._layers, self._width, self._context = layers, width, context
        self.recipe, self.goal = recipe, goal
        self.checked_over_processes = goal is not None
        self.title, self.data = "GPT-2 on bytes", "Python's help topics"
        self.about = (
            f"transformers' GPT2LMHeadModel, {layers} layers of width {width}, tied embeddings; "
            f"windows of {context} bytes of the text that help() shows, which is part of Python"
        )

    def model(self) -> nn.Module:
        """Returns a GPT-2 over bytes with seeded random weights; no dropout, since no window repeats."""
        with library_messages_off():
            transformers = import_transformers()
            config = transformers.GPT2Config(
                vocab_size=BYTE_VALUES,
                n_positions=self._context,
                n_embd=self._width,
                n_layer=self._layers,
                n_head=self._width // 64,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
            torch.manual_seed(0)
            model = transformers.GPT2LMHeadModel(config).train()
        # Without it transformers warns in each process that it falls back to exactly this loss.
        model.loss_type = "ForCausalLM"
        return model

    def batch(self, step: int) -> DemoBatch:
        """Returns random windows of bytes; GPT-2 shifts the labels itself."""
        last = len(self._text) - self._context
        starts = torch.randint(0, last, (self.recipe.batch_size,), generator=seeded(step)).tolist()
        windows = torch.stack([self._text[i : i + self._context] for i in starts]).long()
        return DemoBatch(kwargs={"input_ids": windows, "labels": windows})

    @cached_property
    def _text(self) -> Tensor:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
