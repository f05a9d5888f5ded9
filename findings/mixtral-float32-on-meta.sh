#!/usr/bin/env bash
# The experts of Mixtral in transformers 5.23 compute on a CPU in float32, float16 and bfloat16 by torch.nn.functional.grouped_mm, and
# their shapes can be asked on meta in bfloat16 alone: the function has kernels for the three types, and a rule for tensors without
# storage that accepts one. So a mixture of experts in float32 cannot be planned or exported from meta as it is.
#
# Seen (Linux, Python 3.11, torch 2.13.0, transformers 5.23.0): float32 and float16 "computes; on meta: Expected inputs of BF16
# type", bfloat16 "computes; on meta: has a shape".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cat > "$folder/shapes.py" <<'PY'
import sys

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

dtype = getattr(torch, sys.argv[1])
config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4)
config._experts_implementation = "grouped_mm"


def said(device: str) -> str:
    with torch.device(device), torch.no_grad():
        experts = MixtralExperts(config).to(dtype)
        for weight in experts.parameters():
            weight.fill_(0.1)
        chosen, shares = torch.zeros(8, 2, dtype=torch.long), torch.ones(8, 2, dtype=dtype)
        try:
            rows = experts(torch.ones(8, 32, dtype=dtype), chosen, shares)
        except RuntimeError as error:
            return " ".join(str(error).split())
    return "has a shape" if rows.is_meta else "computes" if rows.isfinite().all() else "no numbers"


print(f"{said('cpu')}; on meta: {said('meta')}")
PY
failed=0
for pair in "float32|computes; on meta: Expected inputs of BF16 type" "float16|computes; on meta: Expected inputs of BF16 type" \
    "bfloat16|computes; on meta: has a shape"; do
    said=$("$folder/venv/bin/python" "$folder/shapes.py" "${pair%%|*}" 2>/dev/null | tail -n 1)
    echo "${pair%%|*}: ${said:0:160}"
    [[ "$said" == *"${pair##*|}"* ]] || failed=1
done
[ "$failed" = 0 ] || { echo "the behaviour has changed"; exit 1; }
