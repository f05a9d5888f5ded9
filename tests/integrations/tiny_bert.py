"""A BERT of four layers with random weights, the tokenizer of its words, and texts of them."""

from __future__ import annotations

from pathlib import Path

import torch
from trainer_worker import transformers

WORDS = 60
SPECIAL = ("<pad>", "</s>", "<unk>")


def bert_in(folder: Path) -> str:
    """The folder, with the model and its tokenizer."""
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import Whitespace

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    special = dict(enumerate(SPECIAL))
    words = Tokenizer(models.WordLevel({special.get(i, f"w{i}"): i for i in range(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    transformers.BertModel(config).save_pretrained(str(folder))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names)
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def text(length: int, draws: torch.Generator) -> str:
    """So many words."""
    return " ".join(f"w{int(i)}" for i in torch.randint(len(SPECIAL), WORDS, (length,), generator=draws))
