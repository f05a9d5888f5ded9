#!/usr/bin/env bash
# Axolotl 0.19.0: `seed:` does not reach the first weights of LoRA adapters. The model is loaded and gets its adapters before anything
# is seeded; the seed is set later, by the Trainer. So two runs of one file with one seed end in different adapters, while two runs of
# full fine-tuning, whose first weights come from the folder of the model, end in equal ones. A comparison of two settings of an adapter
# by one seed compares two draws as well. A plug-in that seeds in `pre_lora_load` makes the runs equal.
#
# Seen (Linux, Python 3.11, torch 2.13.0, no GPU): three steps of a random Llama of two layers. Full fine-tuning twice: every weight
# equal. LoRA twice: all 28 weights of the adapters differ. LoRA twice with the plug-in: every weight equal.
# Installs 4.3 GB in a temporary folder.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 axolotl==0.19.0
cd "$folder"
cat > make.py <<'PY'
import json
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(62)} | {"<s>": 62, "</s>": 63}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="w0", bos_token="<s>", eos_token="</s>", pad_token="w0"
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=62, eos_token_id=63,
    )
)
model.save_pretrained("model")
tokenizer.save_pretrained("model")
with open("rows.jsonl", "w") as file:
    for i in range(24):
        row = {"instruction": f"w{i} w{i + 1}", "input": "", "output": f"w{2 * i} w{i + 3} w{i + 7}"}
        print(json.dumps(row), file=file)
common = """base_model: model
datasets: [{path: rows.jsonl, ds_type: json, type: alpaca}]
dataset_prepared_path: prepared
sequence_len: 64
micro_batch_size: 2
max_steps: 3
learning_rate: 1.0e-2
lr_scheduler: constant
optimizer: adamw_torch
bf16: false
fp16: false
tf32: false
flash_attention: false
save_strategy: "no"
seed: 1
"""
adapter = """adapter: lora
lora_r: 4
lora_alpha: 8
lora_dropout: 0.0
lora_target_linear: true
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
"""
for kind, more in (("full", ""), ("lora", adapter), ("seeded", adapter + "plugins: [seeding.Seeding]\n")):
    for turn in "ab":
        open(f"{kind}_{turn}.yaml", "w").write(f"{common}{more}output_dir: out_{kind}_{turn}\n")
open("seeding.py", "w").write(
    "import torch\nfrom axolotl.integrations.base import BasePlugin\n\n\nclass Seeding(BasePlugin):\n"
    "    def pre_lora_load(self, cfg, model):\n        torch.manual_seed(cfg.seed)\n"
)
PY
cat > compare.py <<'PY'
from importlib.metadata import version
from pathlib import Path
from safetensors.torch import load_file

found = {}
for kind in ("full", "lora", "seeded"):
    first, second = (load_file(next(Path(f"out_{kind}_{turn}").glob("*model.safetensors"))) for turn in "ab")
    assert first.keys() == second.keys()
    found[kind] = [name for name in first if not first[name].equal(second[name])], len(first)
print(f"axolotl {version('axolotl')}: weights that differ between two runs of one file:",
      {kind: f"{len(names)} of {count}" for kind, (names, count) in found.items()})
assert not found["full"][0] and not found["seeded"][0], "the behaviour has changed"
assert sum("lora_A" in name for name in found["lora"][0]) * 2 == found["lora"][1], "the behaviour has changed"
PY
export PYTHONPATH=$folder OMP_NUM_THREADS=1 AXOLOTL_DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
"$folder/venv/bin/python" make.py
for kind in full lora seeded; do for turn in a b; do
    "$folder/venv/bin/python" -m axolotl.cli.train "${kind}_$turn.yaml" > "$kind$turn.log" 2>&1 || { tail -20 "$kind$turn.log"; exit 2; }
done; done
"$folder/venv/bin/python" compare.py
