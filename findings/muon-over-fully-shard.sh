#!/usr/bin/env bash
# torch 2.13.0: torch.optim.Muon steps weights that fully_shard divided (DTensors) without an error, but moves them
# elsewhere than on one device. Its Newton-Schulz iterations multiply in bfloat16; over shards each product is a sum of
# bfloat16 parts, and the quintic iteration amplifies what that rounds away. AdamW in the same script is bit-equal.
#
# Seen (Linux, CPU, gloo, two ranks, three steps): AdamW 0.0 %, Muon 11 % of the movement of the weights.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6
cat > "$folder/compare.py" <<'PY'
import socket
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96, bias=False), nn.Tanh(), nn.Linear(96, 32, bias=False))


def trained(make, sharded):
    model = net()
    if sharded:
        fully_shard(model)
    optimizer = make(model.parameters())
    for step in range(3):
        draw = torch.Generator().manual_seed(step)  # the same samples on both ranks: equal gradients
        x, y = torch.randn(16, 48, generator=draw), torch.randn(16, 32, generator=draw)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return [(w.full_tensor() if sharded else w).detach() for w in model.parameters()]


def apart(make):
    start = [w.detach() for w in net().parameters()]
    pairs = zip(start, trained(make, False), trained(make, True), strict=True)
    return max(((one - two).norm() / (one - begin).norm()).item() for begin, one, two in pairs)


def rank_main(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    adamw = apart(lambda weights: torch.optim.AdamW(weights, lr=0.02))
    muon = apart(lambda weights: torch.optim.Muon(weights, lr=0.02))
    if rank == 0:
        print(f"torch {torch.__version__}: AdamW {adamw:.1%}, Muon {muon:.1%} of the movement")
    dist.destroy_process_group()
    assert adamw == 0.0 and muon > 0.01, "the behaviour has changed"


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, (port,), 2)
PY
"$folder/venv/bin/python" "$folder/compare.py"
