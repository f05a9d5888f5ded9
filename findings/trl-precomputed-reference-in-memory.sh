#!/usr/bin/env bash
# TRL 1.16.0: DPO with `precompute_ref_log_probs=True` over two processes wants a dataset that lies in files. All ranks compute the
# reference's values, the first one writes them to the dataset's cache, and all ranks read that file. The cache of a dataset that was made
# in memory (`Dataset.from_list`) is a temporary folder, one for each process. So every rank but the first looks for a file that nobody
# writes, raises an error before the first step, and torchrun ends the run. The same rows saved and loaded again (`save_to_disk`,
# `load_from_disk`) train.
#
# Seen (Linux, Python 3.11, torch 2.13.0 over gloo, transformers 5.23.0, no GPU): FileNotFoundError on rank 1 from memory; two steps from
# the folder. Installs 1.5 GB in a temporary folder.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 trl==1.16.0 transformers==5.23.0
cd "$folder"
cat > train.py <<'PY'
import sys

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(62)} | {"<s>": 62, "</s>": 63}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="w0", bos_token="<s>", eos_token="</s>", pad_token="w0"
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=62, eos_token_id=63, pad_token_id=0,
    )
)
rows = datasets.Dataset.from_list(
    [{"prompt": f"w{i} w1", "chosen": f" w{i + 2} w3", "rejected": f" w{i + 4} w5"} for i in range(16)]
)
if sys.argv[1] == "saves":
    rows.save_to_disk("rows")
    sys.exit()
trainer = trl.DPOTrainer(
    model=model,
    args=trl.DPOConfig(
        "out", per_device_train_batch_size=2, max_steps=2, precompute_ref_log_probs=True, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    ),
    train_dataset=rows if sys.argv[1] == "memory" else datasets.load_from_disk("rows"),
    processing_class=tokenizer,
)
trainer.train()
print("steps:", trainer.state.global_step)
PY
export OMP_NUM_THREADS=1
run() { timeout 150 "$folder/venv/bin/torchrun" --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$1" train.py "$2"; }
"$folder/venv/bin/python" train.py saves > saves.txt 2>&1
if run 29871 memory > memory.txt 2>&1; then echo "from memory: it trains now"; exit 1; fi
grep -q "FileNotFoundError" memory.txt || { tail -30 memory.txt; exit 1; }
echo "from memory: $(grep -m 1 -o "FileNotFoundError.*" memory.txt | cut -c1-60)"
run 29872 folder > folder.txt 2>&1 || { tail -30 folder.txt; exit 1; }
echo "from a folder: $(grep -m 1 -o "steps: 2" folder.txt)"
