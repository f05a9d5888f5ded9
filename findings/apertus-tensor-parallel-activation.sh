#!/usr/bin/env bash
# transformers 5.23.0: with tp_plan="auto" (DistributedConfig) the two learned numbers of Apertus' activation (xIELU's alpha_p and alpha_n) get on
# each rank the gradient of that rank's channels alone. The plan divides up_proj by columns, so each rank's activation sees its
# part; it adds up the gradients of q_norm and k_norm over the ranks ("replicated_with_grad_allreduce") and leaves act_fn out.
# Logits and loss are those of one process, and so are all other gradients: each rank trains copies of its own of these numbers.
#
# Seen (Linux, CPU, gloo, two ranks): loss equal within 1e-6, all other gradients within 1e-4 of their norm; those of the
# activations are 4 to 190 % off, differ between the ranks, and their sum over both ranks is that of one process.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/ranks.py" <<'PY'
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.tensor import DTensor
from transformers import ApertusConfig, ApertusForCausalLM, DistributedConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def tiny():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = ApertusForCausalLM(ApertusConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        for weight in model.parameters():  # no gradient shall be small by chance
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def trained(saved, **how):
    model = ApertusForCausalLM.from_pretrained(saved, dtype=torch.float32, **how)
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    return loss.item(), whole


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def rank_main(rank, port, saved):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    loss, expected = trained(saved)
    loss_of_ranks, found = trained(saved, distributed_config=DistributedConfig(tp_plan="auto"))
    off = {name: distance(found[name], gradient) for name, gradient in expected.items()}
    of_activations = [name for name in off if "act_fn" in name]
    sums = {name: found[name].clone() for name in of_activations}
    for one in sums.values():
        dist.all_reduce(one)
    others = max(share for name, share in off.items() if name not in of_activations)
    if rank == 0:
        print(f"torch {torch.__version__}, transformers {transformers.__version__}: losses {loss:.5f} and {loss_of_ranks:.5f}")
        print(f"  gradients of {len(off) - len(of_activations)} other weights: {others:.0e} off at most")
        for name in of_activations:
            print(f"  {name}: {off[name]:.0%} off on rank 0; both ranks' sum {distance(sums[name], expected[name]):.0e}")
    assert abs(loss - loss_of_ranks) < 1e-5 and others < 1e-4, "the behaviour has changed"
    assert len(of_activations) == 4 and min(off[name] for name in of_activations) > 0.02, "the behaviour has changed"
    assert max(distance(sums[name], expected[name]) for name in of_activations) < 1e-3, "the behaviour has changed"
    dist.destroy_process_group()


if __name__ == "__main__":
    tiny().save_pretrained(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, (port, sys.argv[1]), 2)
PY
"$folder/venv/bin/python" "$folder/ranks.py" "$folder/apertus"
