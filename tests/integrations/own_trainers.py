"""A user's program with a Trainer of its own, right or wrong in a way that has a name: `FILE KIND`.

The wrong ones compute something else where batches of an update run together, or where several ranks compute.
"""

from __future__ import annotations

import random
import sys
import tempfile
from typing import Any

import torch
import trainer_worker
from trainer_worker import transformers

DRAWS = random.Random(random.getrandbits(32))  # Begins by chance, as Python's own does.


class Pairs(transformers.Trainer):
    """Right: two calls of the model, and a number that it reads and logs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first, second = model(**inputs), model(**(inputs | {"input_ids": inputs["input_ids"].flip(1)}))
        self.gap = float((first.loss - second.loss).detach())
        loss = first.loss - 0.1 * second.loss
        return (loss, first) if return_outputs else loss

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["gap"] = self.gap
        super().log(logs, *args, **kwargs)


class MovingScale(Pairs):
    """Scales by a running mean of losses, which it reads before the calls of a batch and writes behind."""

    mean = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        scale = self.mean
        loss = super().compute_loss(*args, **kwargs)
        self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
        return loss / scale


class PythonsDraws(Pairs):
    """Weighs by a number of Python's generator, of which each rank has its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * (1 + DRAWS.random())


class DividesByCount(Pairs):
    """Divides by the microbatches that have come so far, which it counts before the calls of each."""

    count = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().compute_loss(*args, **kwargs) / self.count


KINDS = {"right": Pairs, "divides": DividesByCount, "scale": MovingScale, "draws": PythonsDraws}


def trainer_of(name: str, kind: Any = None, **more: Any) -> Any:
    """`kind` is the trainer's class where it is another than that of the name."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=9,
        learning_rate=1e-2, report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = trainer_worker.Tokens(24, False, 0)
    model = transformers.GPT2LMHeadModel(config)
    return (kind or KINDS[name])(model=model, args=arguments, train_dataset=data, **more)


if __name__ == "__main__":
    trainer_of(sys.argv[1]).train()
    raise AssertionError("the check ends the program at its call of train")
