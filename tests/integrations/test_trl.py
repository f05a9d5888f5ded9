"""TRL's SFTTrainer with this package's Trainer before it: SFTTrainer's numbers, its metrics too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_worker
from forked import in_forks
from patience import free_port
from trainer_worker import transformers

from outsize.integrations.transformers import Trainer

trl: Any = pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")
KEPT = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "learning_rate")


def trained(folder: Path, **more: Any) -> list[dict[str, float]]:
    """The logs of three updates of two batches, and of an evaluation."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models

    class Split(Trainer, trl.SFTTrainer):
        pass

    torch.manual_seed(0)
    model = trainer_worker.model_of({})
    tokens = trainer_worker.Tokens(20, False, 0)
    rows = [{name: value.tolist() for name, value in tokens[i].items()} for i in range(20)]
    data = Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="rows")
    words = Tokenizer(models.WordLevel({str(i): i for i in range(60)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0"
    )
    args = trl.SFTConfig(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, learning_rate=1e-2,
    )  # fmt: skip
    kind = Split if more else trl.SFTTrainer
    trainer = kind(
        model=model, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer, **more
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.evaluate()
    return [{k: v for k, v in log.items() if k in KEPT} for log in trainer.state.log_history]


def test_one_process_has_the_numbers_of_the_plain_trainer(tmp_path: Path) -> None:
    assert trained(tmp_path, outsize={"stages": 2}) == trained(tmp_path)


@pytest.mark.dist
def test_so_have_two_processes(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        logs = trained(tmp_path, outsize={"stages": 2})
        (tmp_path / f"logs{number}.json").write_text(json.dumps(logs))

    in_forks(tmp_path, 2, rank)
    expected = trained(tmp_path)
    assert json.loads((tmp_path / "logs0.json").read_text()) == expected
    assert len(expected) == 5
