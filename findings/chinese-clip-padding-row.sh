#!/usr/bin/env bash
# transformers 5.23.0: ChineseCLIPModel.from_pretrained does not give back what save_pretrained wrote. The row of the padding token
# (padding_idx) of its word embeddings is set to zeros after it was read; BertModel, whose embeddings are alike, reads its row back.
#
# Seen (Linux, CPU): row 0 of 40 differs for ChineseCLIPModel, and is all zeros; no row differs for BertModel.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cat > "$folder/save_and_load.py" <<'PY'
import tempfile
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
text = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
vision = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
}


def rows_that_differ(model, embeddings):
    with torch.no_grad():
        embeddings(model).weight.normal_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder)
    one, other = embeddings(model).weight, embeddings(loaded).weight
    rows = (one != other).any(1).nonzero().flatten().tolist()
    return rows, bool((other[rows] == 0).all())


clip = transformers.ChineseCLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
found = rows_that_differ(transformers.ChineseCLIPModel(clip), lambda m: m.text_model.embeddings.word_embeddings)
bert = rows_that_differ(transformers.BertModel(transformers.BertConfig(**text)), lambda m: m.embeddings.word_embeddings)
print(f"transformers {transformers.__version__}: ChineseCLIPModel rows {found[0]}, all zeros {found[1]}; BertModel rows {bert[0]}")
assert found == ([0], True) and bert[0] == [], "the behaviour has changed"
PY
"$folder/venv/bin/python" "$folder/save_and_load.py"
