"""A user's script for transformers' Trainer, plain or split: `trainer_worker.py '{"split": {"stages": 2}}'`.

Rank 0 writes the log history, and what the saved folder holds, to the file `out`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from outsize.capture.models.imports import import_transformers

transformers: Any = import_transformers()
TIMES = ("runtime", "per_second", "preparation")


class Tokens(torch.utils.data.Dataset):
    """Sequences of random tokens; their lengths differ with `ragged`."""

    def __init__(self, count: int, ragged: bool, classes: int) -> None:
        self.count, self.ragged, self.classes = count, ragged, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        length = 12 + index % 3 if self.ragged else 12
        ids = torch.randint(60, (length,), generator=draw)
        if self.classes:
            return {"input_ids": ids, "labels": index % self.classes}
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([i["input_ids"] for i in items], batch_first=True),
        "attention_mask": pad([torch.ones_like(i["input_ids"]) for i in items], batch_first=True),
        "labels": pad([i["labels"] for i in items], batch_first=True, padding_value=-100),
    }


def model_of(job: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if job.get("model") == "bert":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = transformers.BertConfig(
            vocab_size=60, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
        )
        return transformers.BertForSequenceClassification(config)
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if job.get("lora"):
        import peft

        target = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, **target))
    return model


def trainer_class(job: dict[str, Any]) -> Any:
    if "split" not in job:
        base = transformers.Trainer
    else:
        from outsize.integrations.transformers import Trainer as base
    if not job.get("own_loss"):
        return base

    class OwnLoss(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    OwnLoss.loss_is_scaled_for_ga = False
    return OwnLoss


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class CountedBatches:
    """A metric that is told of each batch, and of the last one that it is the last."""

    def __init__(self) -> None:
        self.right, self.seen, self.sizes = 0, 0, list[int]()

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, Any]:
        self.right += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        self.seen += prediction.label_ids.numel()
        self.sizes.append(len(prediction.label_ids))
        if not compute_result:
            return {}
        found = {"accuracy": self.right / self.seen, "sizes": self.sizes}
        self.right, self.seen, self.sizes = 0, 0, []
        return found


def main(job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    arguments = {
        "output_dir": str(folder / "run"), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
        "max_steps": 4, "logging_steps": 2, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "use_cpu": True, **job.get("arguments", {}),
    }  # fmt: skip
    classes = 3 if job.get("model") == "bert" else 0
    data = Tokens(20, bool(job.get("ragged")), classes)
    more: dict[str, Any] = {"outsize": job["split"]} if "split" in job else {}
    if job.get("ragged"):
        more["data_collator"] = padded
    if job.get("metrics", True):
        by_batch = job.get("arguments", {}).get("batch_eval_metrics")
        more["compute_metrics"] = CountedBatches() if by_batch else accuracy
    trainer = trainer_class(job)(
        model=model_of(job),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data,
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=job.get("resume"))
    evaluated = trainer.evaluate()
    predictions = trainer.predict(data).predictions
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        logs = [*trainer.state.log_history, evaluated]
        kept = [{k: v for k, v in log.items() if not any(t in k for t in TIMES)} for log in logs]
        predicted = float(predictions.astype("float64").sum())
        files = sorted(p.name for p in (folder / "model").iterdir() if p.stem != "training_args")
        result = {"logs": kept, "predicted": predicted, "files": files}
        Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
