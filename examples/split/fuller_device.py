"""One device is fuller than the other, as where another program runs on it: the cut moves, the loop stays.

python examples/split/fuller_device.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import outsize


def two_devices(free_bytes: int) -> outsize.Cluster:
    """Two like devices, of which the first has so many bytes left."""
    like = {"kind": "cpu", "flops_per_s": {"float32": 1e11}, "bytes_per_s": 2e10, "source": "this example"}
    devices = [
        {"name": f"cpu:{n}", "memory_bytes": free, **like} for n, free in enumerate((free_bytes, 64 << 20))
    ]
    link = {"name": "memory", "bytes_per_s": 1e10, "latency_s": 1e-5, "source": "this example"}
    whole = {"name": "2xcpu", "devices": devices, "devices_per_node": 2, "inner": link, "outer": link}
    return outsize.Cluster.model_validate(whole)


torch.manual_seed(0)
net = nn.Sequential(
    *(layer for _ in range(10) for layer in (nn.Linear(256, 256), nn.ReLU())), nn.Linear(256, 8)
)
x, y = torch.randn(64, 256), torch.randint(0, 8, (64,))
for free_bytes in (64 << 20, 4 << 20):
    plan = outsize.plan(
        net,
        (x,),
        cluster=two_devices(free_bytes),
        stages=2,
        microbatches=4,
        request=outsize.Request(loop=True),
    )
    model = outsize.split(copy.deepcopy(net), (x,), plan=plan)
    layers = ", ".join(f"{stage.device} has layers {'-'.join(stage.units)}" for stage in plan.stages)
    print(f"{free_bytes >> 20} MiB free on cpu:0: {layers}")
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    print(f"loss {loss:.4f}")
