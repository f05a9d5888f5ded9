"""Losses as people write them into a Trainer of transformers: what they ask of models and where they put
tensors is in a split run what it is in the plain one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from accelerate.utils import broadcast_object_list
from forked import in_forks
from patience import free_port
from torch import nn
from torch.nn import functional as F
from trainer_worker import TIMES, transformers

from outsize.errors import BadOption
from outsize.integrations.trainers import split_trainers
from outsize.integrations.transformers import Trainer

BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}


class Rows(torch.utils.data.Dataset[Any]):
    """Random tokens, with a class or with an answer of other tokens."""

    def __init__(self, count: int, *, answers: bool = False) -> None:
        self.count, self.answers = count, answers

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        tokens, answer = (
            torch.randint(3, 60, (9,), generator=draw),
            torch.randint(3, 60, (5,), generator=draw),
        )
        return {"input_ids": tokens, "labels": answer if self.answers else index % 3}


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        rows = Rows(12)
        return (rows[n] for n in range(len(rows)))


def bert(**more: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=60, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0, hidden_size=32,
        intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, **more,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def trainer_of(folder: Path, kind: Any = None, model: Any = None, data: Any = None, **more: Any) -> Any:
    kind = kind or transformers.Trainer
    arguments = transformers.Seq2SeqTrainingArguments(
        str(folder), **BATCH, max_steps=2, logging_steps=1, learning_rate=1e-2, report_to="none",
        use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False, **more,
    )  # fmt: skip
    answers = issubclass(kind, transformers.Seq2SeqTrainer)
    rows = {"train_dataset": data or Rows(12, answers=answers), "eval_dataset": Rows(4, answers=answers)}
    return kind(model=model or bert(), args=arguments, **rows)


class ClassWeights(transformers.Trainer):
    """Weights of classes lie where the model is."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 3.0], device=model.device)
        assert next(self.model.parameters()).device.type == self.args.device.type
        loss = nn.CrossEntropyLoss(weight=weight)(
            outputs.logits.view(-1, self.model.config.num_labels), labels
        )
        return (loss, outputs) if return_outputs else loss


class HiddenStates(transformers.Trainer):
    """A teacher, held by the trainer, whose hidden states the student's follow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = bert().eval()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            wanted = self.teacher(**inputs, output_hidden_states=True).hidden_states
        assert len(outputs.hidden_states) == len(wanted) == 4
        pairs = zip(outputs.hidden_states, wanted, strict=True)
        loss = outputs.loss + sum(F.mse_loss(own, other) for own, other in pairs)
        return (loss, outputs.logits) if return_outputs else loss


class TwoViews(transformers.Trainer):
    """Two views of each sample in one call, which is of twice as many rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        ids = inputs["input_ids"]
        first, second = model(input_ids=torch.cat([ids, ids.flip(1)])).logits.chunk(2)
        like = F.cosine_similarity(first[:, None], second[None], dim=-1) / 0.1
        loss = F.cross_entropy(like, torch.arange(len(like), device=like.device))
        return (loss, {"loss": loss, "logits": first}) if return_outputs else loss


class Told(transformers.Trainer):
    """Weighs losses by what the main process draws and tells the others."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        drawn = [random.random() if self.accelerator.is_main_process else 0.0]
        outputs = model(**inputs)
        loss = outputs.loss * (1 + broadcast_object_list(drawn)[0])
        return (loss, outputs) if return_outputs else loss


class CallsAPart(transformers.Trainer):
    """Calls the encoder, and the head by its weights."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        pooled = model.bert(inputs["input_ids"]).pooler_output
        return F.cross_entropy(F.linear(pooled, model.classifier.weight), inputs["labels"])


class AsksForAdapters(transformers.Trainer):
    """Computes something else where the model has no adapters; that is all it asks."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        import peft

        outputs = model(**inputs)
        loss = outputs.loss if isinstance(model, peft.PeftModel) else 10 * outputs.loss
        return (loss, outputs) if return_outputs else loss


def with_adapters(folder: Path, kind: Any = None, **more: Any) -> Any:
    import peft

    adapters = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["query"], task_type="SEQ_CLS")
    return trainer_of(folder, kind, peft.get_peft_model(bert(), adapters), **more)


def generating(folder: Path) -> Any:
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    more = {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}
    return trainer_of(folder, transformers.Seq2SeqTrainer, model, **more)


KINDS: dict[str, Callable[[Path], Any]] = {
    "class weights": lambda folder: trainer_of(folder, ClassWeights),
    "hidden states": lambda folder: trainer_of(folder, HiddenStates),
    "two views": lambda folder: trainer_of(folder, TwoViews),
    "asks for adapters": lambda folder: with_adapters(folder, AsksForAdapters),
    "smoothed labels of adapters": lambda folder: with_adapters(folder, label_smoothing_factor=0.1),
    "generates": generating,
    "a stream, told": lambda folder: trainer_of(folder, Told, data=Stream()),
}
RECORDED = ("asks for adapters", "smoothed labels of adapters", "generates")


def ran(kind: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = KINDS[kind](folder)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.evaluate()
    predictions = torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions)
    is_split = isinstance(trainer, Trainer)
    weights = trainer.engine.weights.full_state_dict() if is_split else trainer.model.state_dict()
    return {
        "logs": [
            {name: value for name, value in log.items() if not any(time in name for time in TIMES)}
            for log in trainer.state.log_history
        ],
        "predictions": predictions,
        "weights": {name: weight.clone() for name, weight in weights.items()},
        "records": is_split and trainer.records,
    }


@cache
def plain(kind: str) -> dict[str, Any]:
    return ran(kind, Path(mkdtemp()))


def insist_on_equal(found: dict[str, Any], kind: str) -> None:
    expected = plain(kind)
    assert found["logs"] == expected["logs"]
    assert torch.equal(found["predictions"], expected["predictions"])
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
    assert found["records"] is (kind in RECORDED)


@pytest.mark.sample("two views", "smoothed labels of adapters")  # All kinds run over two processes.
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_has_the_numbers_of_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    with split_trainers(stages=2):
        insist_on_equal(ran(kind, tmp_path), kind)


def test_a_loss_that_calls_parts_of_the_model_is_told_of_it(tmp_path: Path) -> None:
    wanted = (
        r"the loss calls parts of the model .*2 losses of CallsAPart .* Next: outputs = model\(\*\*inputs"
    )
    with split_trainers(stages=2), pytest.raises(BadOption, match=wanted):
        trainer_of(tmp_path, CallsAPart).train()


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_so_have_two_processes(kind: str, tmp_path: Path) -> None:
    plain(kind)  # First: ranks are forks, which have imported by then what it imports.
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        with split_trainers(stages=2):
            torch.save(ran(kind, tmp_path), tmp_path / f"found{number}.pt")

    in_forks(tmp_path, 2, rank)
    found, other = (torch.load(tmp_path / f"found{n}.pt", weights_only=False) for n in (0, 1))
    insist_on_equal(found, kind)
    assert [log.get("loss") for log in other["logs"]] == [log.get("loss") for log in found["logs"]]
    assert torch.equal(other["predictions"], found["predictions"])
