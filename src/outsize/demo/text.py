"""Real text to learn: Python's own help topics, byte by byte, and a GPT-2 of 9 M parameters to learn them.

`pydoc_data.topics` (what `help("LAMBDAS")` shows) ships with every CPython, so nothing is downloaded.
Guessing bytes by their frequency alone costs 3.26 nats each: a loss below 3.0 needs a look at the context.
"""

from __future__ import annotations

from functools import cached_property
from pydoc_data.topics import topics
from typing import final

import torch
from torch import Tensor, nn

from outsize.capture.providers import import_transformers
from outsize.demo.job import Batch, Job, Recipe, seeded
from outsize.demo.quiet import quiet

BYTES = 256


@final
class TextJob(Job):
    """GPT2LMHeadModel of transformers, embeddings tied, labels inside the model."""

    name = "gpt2"

    def __init__(
        self, *, layers: int, width: int, context: int, recipe: Recipe, goal: float | None = None
    ) -> None:
        self._layers, self._width, self._context = layers, width, context
        self.recipe, self.goal = recipe, goal
        self.checked_over_processes = goal is not None
        self.title, self.source = "GPT-2 on bytes", "Python's help topics"
        self.about = (
            f"transformers' GPT2LMHeadModel, {layers} layers of width {width}, embeddings tied; "
            f"windows of {context} bytes of the text behind help(), which ships with Python"
        )

    def model(self) -> nn.Module:
        """A byte-level GPT-2 with seeded random weights; dropout off, since nothing is seen twice."""
        with quiet():
            transformers = import_transformers()
            config = transformers.GPT2Config(
                vocab_size=BYTES,
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
        # Said aloud, or transformers warns in each process that it falls back to just this loss.
        model.loss_type = "ForCausalLM"
        return model

    def batch(self, step: int) -> Batch:
        """`batch_size` random windows of `context` bytes; GPT-2 shifts the labels itself."""
        last = len(self._text) - self._context
        starts = torch.randint(0, last, (self.recipe.batch_size,), generator=seeded(step)).tolist()
        windows = torch.stack([self._text[i : i + self._context] for i in starts]).long()
        return Batch(kwargs={"input_ids": windows, "labels": windows})

    @cached_property
    def _text(self) -> Tensor:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
