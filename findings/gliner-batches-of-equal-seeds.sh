#!/usr/bin/env bash
# GLiNER 0.2.29: equal seeds do not make equal batches. Its collator gathers the labels of a sample in a set of texts and numbers them
# as it goes through that set, and Python draws the order of texts in a set for each process. So two processes with every generator
# seeded alike get other labels at other places from the same rows: two runs of `train_model` with one seed log other losses, and
# processes that ought to have one batch (a model that is divided among them) have several, without an error. With one value of
# PYTHONHASHSEED for all of them the batches are equal.
#
# Seen (Linux, Python 3.11, torch 2.13.0, transformers 5.16.0, no GPU): four rows with three labels; of eight processes with seeds of
# their own for texts, at least two had another order of labels; two processes with one had the same order and equal tensors.
# Installs about 1 GB in a temporary folder.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.16.0 gliner==0.2.29
cd "$folder"
cat > batch.py <<'PY'
import hashlib
import random

import numpy as np
import torch
from gliner import GLiNERConfig
from gliner.data_processing import UniEncoderSpanProcessor
from gliner.data_processing.collator import UniEncoderSpanDataCollator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

random.seed(0), np.random.seed(0), torch.manual_seed(0)
special = ("<pad>", "<unk>", "<<ENT>>", "<<SEP>>")
words = Tokenizer(models.WordLevel({**{t: i for i, t in enumerate(special)}, **{f"w{i}": i + 4 for i in range(40)}}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
config = GLiNERConfig(model_name="none", max_width=4, max_len=32)
processor = UniEncoderSpanProcessor(config, tokenizer, None)
rows = [
    {"tokenized_text": [f"w{i + j}" for j in range(6)], "ner": [[0, 0, "person"], [2, 3, "place"], [5, 5, "date"]]}
    for i in range(4)
]
batch = UniEncoderSpanDataCollator(config, data_processor=processor, prepare_labels=True)(rows)
bits = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "labels"))
print(hashlib.sha256(bits).hexdigest()[:12])
PY
several=$(for seed in 1 2 3 4 5 6 7 8; do PYTHONHASHSEED=$seed venv/bin/python batch.py 2>/dev/null; done | sort -u | wc -l)
one=$(for _ in 1 2; do PYTHONHASHSEED=1 venv/bin/python batch.py 2>/dev/null; done | sort -u | wc -l)
echo "batches of equal rows and seeds: $several with eight orders of texts, $one with one"
[ "$several" -gt 1 ] && [ "$one" -eq 1 ]
