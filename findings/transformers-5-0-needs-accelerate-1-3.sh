#!/usr/bin/env bash
# transformers 5.0.0 declares accelerate>=1.1.0, and does not import a model beside accelerate 1.1.0; beside 1.2.0 it imports, and
# Trainer.train() ends in a TypeError about unwrap_model. Beside 1.3.0 both work.
#
# Seen (Linux, Python 3.11, torch 2.13.0): 1.1.0 "cannot import name 'get_module_size_with_ties'", 1.2.0 "unexpected keyword
# argument 'keep_torch_compile'", 1.3.0 trains.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6 transformers==5.0.0 accelerate==1.3.0 psutil==7.0.0
cat > "$folder/train.py" <<'PY'
import tempfile
import warnings

warnings.simplefilter("ignore")
try:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(out, max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
        Trainer(model, arguments, train_dataset=rows).train()
    print("trains")
except (ImportError, RuntimeError, TypeError) as error:
    print(" ".join(str(error).split()))
PY
failed=0
for pair in "1.1.0|get_module_size_with_ties" "1.2.0|keep_torch_compile" "1.3.0|trains"; do
    "$folder/venv/bin/pip" install -qq --no-deps "accelerate==${pair%%|*}"
    said=$("$folder/venv/bin/python" "$folder/train.py" 2>/dev/null | tail -n 1)
    echo "accelerate ${pair%%|*}: ${said:0:160}"
    [[ "$said" == *"${pair##*|}"* ]] || failed=1
done
[ "$failed" = 0 ] || { echo "the behaviour has changed"; exit 1; }
