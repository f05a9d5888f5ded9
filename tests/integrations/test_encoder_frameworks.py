"""Frameworks whose trainer is transformers', and whose own code calls the model behind the training."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import in_forks
from patience import WHOLE_S, free_port
from tiny_bert import bert_in, text

from outsize.integrations.trainers import split_trainers

TIMES = ("runtime", "per_second")


def setfit(bert: str, folder: Path) -> list[dict[str, Any]]:
    """Trains the encoder on pairs, fits a classifier to what it says, and evaluates both."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow import Table
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from sklearn.linear_model import LogisticRegression

    package = pytest.importorskip("setfit", reason="setfit is not installed: make test-integrations")
    draws = torch.Generator().manual_seed(0)
    encoder = SentenceTransformer(modules=[modules.Transformer(bert), modules.Pooling(32)], device="cpu")
    model = package.SetFitModel(model_body=encoder, model_head=LogisticRegression(), labels=["a", "b", "c"])
    rows = [{"text": text(5 + i % 3, draws), "label": i % 3} for i in range(24)]
    data = Dataset(InMemoryTable(Table.from_pylist(rows)), fingerprint="rows")
    arguments = package.TrainingArguments(
        str(folder), batch_size=8, max_steps=3, logging_steps=1, report_to="none", show_progress_bar=False,
        body_learning_rate=1e-3, save_strategy="no",
    )  # fmt: skip
    trainer = package.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data,
        metric=lambda found, labels: {"right": float((torch.as_tensor(found) == torch.tensor(labels)).sum())},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    said = model.predict_proba(["w7 w8 w9", "w11"]).tolist()
    return [*trainer.st_trainer.state.log_history, metrics, {"said": said}]


def gliner(bert: str, folder: Path, kind: str = "markerV0") -> list[dict[str, Any]]:
    """Trains a model that finds names, with labels among its inputs, and lets it find some."""
    package = pytest.importorskip("gliner", reason="gliner is not installed: make test-integrations")
    config = package.GLiNERConfig(
        model_name=bert, hidden_size=32, dropout=0.0, max_width=4, span_mode=kind, max_len=32
    )
    model = package.GLiNER.from_config(config, load_tokenizer=True, resize_token_embeddings=True)
    draws = torch.Generator().manual_seed(0)
    names = [[0, 1, "w9"]]  # One label: Python goes through a set of several in an order of its own.
    rows = [{"tokenized_text": text(6 + i % 3, draws).split(), "ner": names} for i in range(24)]
    arguments = model.create_training_args(
        str(folder), per_device_train_batch_size=4, max_steps=3, logging_steps=1, use_cpu=True,
        dataloader_num_workers=0, learning_rate=1e-3, gradient_accumulation_steps=2, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = model.train_model(rows, rows[:8], training_args=arguments)
    trainer.evaluate()
    found = model.predict_entities("w7 w8 w9 w10", ["w9"], threshold=0.1)
    trainer.save_model(str(folder / "saved"))
    return [*trainer.state.log_history, *found]


FRAMEWORKS: dict[str, Callable[[str, Path], list[dict[str, Any]]]] = {
    "setfit": setfit,
    "gliner, spans": gliner,
    "gliner, tokens": lambda bert, folder: gliner(bert, folder, "token_level"),
}


def told(framework: str, bert: str, folder: Path) -> list[dict[str, Any]]:
    """What a framework's training has told, without times."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    found = FRAMEWORKS[framework](bert, folder)
    plain = json.loads(json.dumps(found))
    return [{k: v for k, v in each.items() if not any(t in k for t in TIMES)} for each in plain]


@pytest.mark.dist
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_has_the_digits_of_one_process_over_two(framework: str, tmp_path: Path) -> None:
    bert = bert_in(tmp_path / "bert")
    expected = told(framework, bert, tmp_path / "plain")  # First: ranks are forks, which have its imports.
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        with split_trainers(stages=2):
            found = told(framework, bert, tmp_path / "split")
        (tmp_path / f"told{number}.json").write_text(json.dumps(found))

    in_forks(tmp_path, 2, rank, WHOLE_S)
    for number in range(2):
        assert json.loads((tmp_path / f"told{number}.json").read_text()) == expected
    for plain in (tmp_path / "plain").rglob("*.bin"):
        saved = [torch.load(each) for each in (plain, tmp_path / "split" / "saved" / plain.name)]
        assert saved[0].keys() == saved[1].keys()
        assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
