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
from trainer_worker import transformers

from outsize.integrations.trainers import split_trainers

st: Any = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed: make test-integrations"
)
WORDS = 60


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """The folder of a BERT of four layers with random weights and of its tokenizer."""
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import Whitespace

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    special = dict(enumerate(("<pad>", "</s>", "<unk>")))
    words = Tokenizer(models.WordLevel({special.get(i, f"w{i}"): i for i in range(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    folder = str(tmp_path / "bert")
    transformers.BertModel(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    ).save_pretrained(folder)
    return folder


def text(length: int, draws: torch.Generator) -> str:
    return " ".join(f"w{int(i)}" for i in torch.randint(3, WORDS, (length,), generator=draws))


def trained(bert: str, folder: Path, kind: str, batches: int = 1) -> list[dict[str, Any]]:
    """What three updates and an evaluation log, without times."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow import Table
    from sentence_transformers.sentence_transformer import losses, modules

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
        "cosine": lambda: losses.CosineSimilarityLoss(model),
    }[kind]()
    arguments = st.SentenceTransformerTrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=batches, max_steps=3,
        logging_steps=1, learning_rate=1e-2, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = st.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, loss=loss
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    times = ("runtime", "per_second")
    return [
        {k: v for k, v in log.items() if not any(t in k for t in times)} for log in trainer.state.log_history
    ]


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
@pytest.mark.sample("pairs in pieces")
@pytest.mark.parametrize("kind", ["pairs", "pairs in pieces"])
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
