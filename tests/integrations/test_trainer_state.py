"""What a trainer's own code writes into Python, and asks of its model, is what it is in the plain trainer."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import in_forks
from patience import free_port
from trainer_worker import Tokens, model_of, padded, transformers

from outsize.integrations.transformers import Trainer


class Counts:
    """What a trainer's own Python counts, in all kinds of objects."""

    def __init__(self) -> None:
        self.calls, self.lengths, self.latest = 0, list[int](), deque[int](maxlen=3)
        self.by_mode: dict[str, list[int]] = {}
        self.tokens = torch.zeros((), dtype=torch.long)

    def count(self, inputs: dict[str, torch.Tensor], mode: str) -> None:
        self.calls += 1
        self.lengths.append(inputs["input_ids"].numel())
        self.latest.append(self.calls)
        self.by_mode.setdefault(mode, []).append(self.calls)
        self.tokens += (inputs["labels"] != -100).sum()

    def seen(self) -> list[Any]:
        return [self.calls, self.lengths, list(self.latest), self.by_mode, int(self.tokens)]


def before_the_call(base: Any) -> Any:
    class Before(base):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts.count(inputs, "train" if model.training else "eval")
            if not hasattr(self.state, "tokens"):  # As Axolotl does.
                self.state.tokens = {"all": torch.zeros(())}
            self.state.tokens["all"] = self.state.tokens["all"] + inputs["labels"].numel()
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Before


def behind_the_call(base: Any) -> Any:
    class Behind(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            self.counts.count(inputs, "any")
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return Behind


def while_preparing(base: Any) -> Any:
    """Its loss writes nothing, and is recorded."""

    class Preparing(base):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            self.counts.count(inputs, "any")
            return inputs

    return Preparing


def asking_the_model(base: Any) -> Any:
    """Its loss asks the model that it is given for more than an output, and writes nothing."""

    class Asking(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss * (2 if hasattr(model, "get_input_embeddings") else 1)
            loss = loss * (3 if isinstance(model, transformers.PreTrainedModel) else 1)
            return (loss, outputs) if return_outputs else loss

    return Asking


OF = (before_the_call, behind_the_call, while_preparing, asking_the_model)
KINDS = {each.__name__: each for each in OF}


def ran(kind: str, folder: Path, split: dict[str, Any] | None = None) -> list[Any]:
    """What is logged and counted, with lengths that differ from batch to batch."""
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        per_device_eval_batch_size=4, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    data = Tokens(12, True, 0)
    own = {} if split is None else {"outsize": split}
    trainer = KINDS[kind](transformers.Trainer if split is None else Trainer)(
        model=model_of({}), args=arguments, train_dataset=data, eval_dataset=data, data_collator=padded, **own
    )
    trainer.counts = Counts()
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.evaluate()
    names = ("loss", "grad_norm", "eval_loss")
    logs = [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]
    if split is not None:
        assert trainer.records == (kind == "while_preparing")
    return [logs, trainer.counts.seen(), getattr(trainer.state, "tokens", None)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_counts_as_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    assert ran(kind, tmp_path, {"stages": 2}) == ran(kind, tmp_path)


@pytest.mark.dist
def test_so_does_each_of_two_processes(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    expected = {kind: ran(kind, tmp_path) for kind in KINDS}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        found = {kind: ran(kind, tmp_path, {"stages": 2}) for kind in KINDS}
        assert found == expected

    in_forks(tmp_path, 2, rank)
