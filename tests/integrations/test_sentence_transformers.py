"""sentence-transformers' trainer, whose loss owns the model and calls it once for each column of the data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import in_forks
from patience import WHOLE_S, free_port
from tiny_bert import bert_in, text
from trainer_worker import transformers

from outsize.integrations.trainers import split_trainers

st: Any = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed: make test-integrations"
)


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return bert_in(tmp_path / "bert")


def trained(bert: str, folder: Path, kind: str, batches: int = 1) -> list[dict[str, Any]]:
    """What three updates and an evaluation log, without times, and behind them what the model says."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow import Table
    from sentence_transformers.sentence_transformer import losses, modules
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    model = st.SentenceTransformer(modules=[modules.Transformer(bert), modules.Pooling(32)], device="cpu")
    rows: list[dict[str, Any]] = [
        {"anchor": text(5 + i % 3, draws), "positive": text(6 + i % 2, draws)} for i in range(24)
    ]
    if kind == "cosine":
        rows = [row | {"score": (i % 5) / 5} for i, row in enumerate(rows)]
    data = Dataset(InMemoryTable(Table.from_pylist(rows)), fingerprint=kind)
    loss = {
        "pairs": lambda: losses.MultipleNegativesRankingLoss(model),
        "pairs in pieces": lambda: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
        "pairs of all ranks": lambda: losses.MultipleNegativesRankingLoss(model, gather_across_devices=True),
        "cosine": lambda: losses.CosineSimilarityLoss(model),
    }[kind]()
    columns = ([row[name] for row in rows] for name in ("anchor", "positive"))
    evaluator = EmbeddingSimilarityEvaluator(*columns, [i % 5 / 5 for i in range(24)], batch_size=8)
    arguments = st.SentenceTransformerTrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=batches, max_steps=3,
        logging_steps=1, learning_rate=1e-2, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = st.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, loss=loss, evaluator=evaluator
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    times = ("runtime", "per_second")
    logs = [
        {k: v for k, v in log.items() if not any(t in k for t in times)} for log in trainer.state.log_history
    ]
    return [*logs, {"said": model.encode(["w7 w8 w9", "w11"]).tolist()}]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "saved" / "model.safetensors")


def same_weights(one: Path, two: Path) -> bool:
    first, second = weights_in(one), weights_in(two)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sample("pairs", "cosine")  # In pieces over two processes.
@pytest.mark.parametrize(("kind", "batches"), [("pairs", 2), ("pairs in pieces", 1), ("cosine", 1)])
def test_a_split_encoder_has_the_digits_of_the_plain_one(
    kind: str, batches: int, bert: str, tmp_path: Path
) -> None:
    expected = trained(bert, tmp_path / "plain", kind, batches)
    with split_trainers(stages=2):
        assert trained(bert, tmp_path / "split", kind, batches) == expected
    assert same_weights(tmp_path / "plain", tmp_path / "split")


@pytest.mark.dist
@pytest.mark.sample("pairs in pieces", "pairs of all ranks")
@pytest.mark.parametrize("kind", ["pairs", "pairs in pieces", "pairs of all ranks"])
def test_so_has_one_over_two_processes(kind: str, bert: str, tmp_path: Path) -> None:
    expected = trained(bert, tmp_path / "plain", kind)  # First: ranks are forks, which have its imports.
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        folder = tmp_path / f"rank{number}"
        with split_trainers(stages=2):
            found = trained(bert, folder, kind)
        (tmp_path / f"logs{number}.json").write_text(json.dumps(found))

    in_forks(tmp_path, 2, rank, WHOLE_S)
    assert json.loads((tmp_path / "logs0.json").read_text()) == expected
    assert same_weights(tmp_path / "plain", tmp_path / "rank0")
