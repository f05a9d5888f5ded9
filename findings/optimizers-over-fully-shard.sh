#!/usr/bin/env bash
# torch 2.13.0 with pytorch_optimizer 4.1.0: which optimizers step weights that fully_shard divided (DTensors)?
#
# Seen (Linux, CPU, gloo, two ranks, two steps): AdamW, Lion, ScheduleFreeAdamW, Ranger21 and APOLLO step as over whole weights.
# Adafactor of torch, Lamb, CAME, AdaFactor and StableAdamW end in a RuntimeError: an in-place op would change a placement (partial
# norm or mean). SOAP and Shampoo mix plain tensors with DTensors (RuntimeError). Adan and LARS need aten._foreach_copy_, which has
# no sharding strategy (NotImplementedError).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install -qq --no-deps pytorch_optimizer==4.1.0
cat > "$folder/steps.py" <<'PY'
import socket
import warnings

import pytorch_optimizer as published
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
EQUAL, PLACEMENT, MIXED, STRATEGY = "equal", "placement changes", "mixed torch.Tensor and DTensor", "sharding strategy"
EXPECTED = {
    torch.optim.AdamW: EQUAL,
    published.Lion: EQUAL,
    published.ScheduleFreeAdamW: EQUAL,
    published.Ranger21: EQUAL,
    published.APOLLO: EQUAL,
    torch.optim.Adafactor: PLACEMENT,
    published.Lamb: PLACEMENT,
    published.CAME: PLACEMENT,
    published.AdaFactor: PLACEMENT,
    published.StableAdamW: PLACEMENT,
    published.SOAP: MIXED,
    published.Shampoo: MIXED,
    published.Adan: STRATEGY,
    published.LARS: STRATEGY,
}


def trained(kind, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96, bias=False), nn.Tanh(), nn.Linear(96, 32, bias=False))
    if sharded:
        fully_shard(model)
    more = {"num_iterations": 10} if kind is published.Ranger21 else {}
    optimizer = kind(model.parameters(), lr=0.01, **more)
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 48, generator=draw), torch.randn(16, 32, generator=draw)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return [(w.full_tensor() if sharded else w).detach() for w in model.parameters()]


def seen(kind):
    whole = trained(kind, False)
    try:
        parts = trained(kind, True)
    except (RuntimeError, NotImplementedError) as error:
        known = [text for text in (PLACEMENT, MIXED, STRATEGY) if text in str(error)]
        return known[0] if known else f"{type(error).__name__}: {error}"
    same = all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))
    return EQUAL if same else "other numbers"


def rank_main(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {kind: seen(kind) for kind in EXPECTED}
    if rank == 0:
        for kind, text in found.items():
            print(f"{kind.__module__.split('.')[0]}.{kind.__name__}: {text}")
    dist.destroy_process_group()
    assert found == EXPECTED, "the behaviour has changed"


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, (port,), 2)
PY
"$folder/venv/bin/python" "$folder/steps.py"
