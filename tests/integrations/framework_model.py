"""Writes what a fine-tuning framework reads, without a hub: a random Llama, its tokenizer, and samples.

It runs in the framework's own environment: `python framework_model.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace

WORDS = 60


def text(count: int, draw: torch.Generator) -> str:
    return " ".join(f"w{int(i)}" for i in torch.randint(3, WORDS, (count,), generator=draw))


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        summary_dropout_prob=0.0,  # of a value head, whose draws would be outsize's
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    special = ["<pad>", "</s>", "<unk>"]
    words = {special[i] if i < len(special) else f"w{i}": i for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    write_rows(folder)


def write_rows(folder: Path) -> None:
    """24 samples: instructions with answers, with a second answer (pairs and talks), and with a verdict."""
    draw = torch.Generator().manual_seed(0)
    asked = [{"instruction": text(4 + i % 3, draw), "input": ""} for i in range(24)]
    answers = [text(5 + i % 4, draw) for i in range(24)]
    others = [text(5 + i % 4, draw) for i in range(24)]
    both = list(zip(asked, answers, others, strict=True))
    files = {
        "rows": [row | {"output": answer} for row, answer, _ in both],
        "pairs": [row | {"chosen": answer, "rejected": other} for row, answer, other in both],
        "talks": [
            {"system": "", "input": row["instruction"], "chosen": answer, "rejected": other}
            for row, answer, other in both
        ],
        "verdicts": [row | {"output": a, "kto_tag": i % 2 == 0} for i, (row, a, _) in enumerate(both)],
    }
    columns = {"prompt": "instruction", "query": "input"}
    info: dict[str, Any] = {name: {"file_name": f"{name}.json"} for name in files}
    info["pairs"] |= {"ranking": True, "columns": columns | {"chosen": "chosen", "rejected": "rejected"}}
    info["verdicts"]["columns"] = columns | {"response": "output", "kto_tag": "kto_tag"}
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps(info))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
