#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.pipelining finds out the shapes between stages by a forward of each PipelineStage in training
# mode, at the first step. Random numbers are put back behind it, buffers are not: BatchNorm counts one microbatch more than ran.
# The first stage sees the first microbatch twice, each later one memory that nobody has written (an empty tensor), so its
# running statistics begin as anything: NaN under use_deterministic_algorithms, which fills such memory, and 8e23 was seen without.
# They stay: training goes on with right losses, and evaluation is wrong. With input_args and output_args given nothing is run.
#
# Seen (Linux, CPU, one process with two stages, three steps of four microbatches): 13 batches counted where 12 ran; the first
# stage's running mean is off, the second's is NaN; losses are those of the plain loop. With the shapes given all is equal.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6
cat > "$folder/stages.py" <<'PY'
import socket

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STEPS, MICROBATCHES = 3, 4
drawn = torch.Generator().manual_seed(1)
x, y = torch.randn(16, 8, generator=drawn) + 3, torch.randint(4, (16,), generator=drawn)


def parts():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    return first, nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))


def plain():
    first, second = parts()
    losses = [[F.cross_entropy(second(first(a)), b) for a, b in zip(x.chunk(4), y.chunk(4))] for _ in range(STEPS)]
    return torch.tensor(losses), (first[1], second[0])


def pipelined(**shapes):
    first, second = parts()
    device = torch.device("cpu")
    stages = [PipelineStage(part, at, 2, device, **shapes.get(str(at), {})) for at, part in enumerate((first, second))]
    schedule, losses = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.cross_entropy), []
    for _ in range(STEPS):
        schedule.step(x, target=y, losses=(of_step := []))
        losses.append(of_step)
    return torch.tensor(losses), (first[1], second[0])


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
torch.use_deterministic_algorithms(True)
between, end = torch.ones(4, 8, requires_grad=True), torch.ones(4, 4, requires_grad=True)
given = {"0": {"input_args": x[:4], "output_args": between}, "1": {"input_args": between, "output_args": end}}
expected, norms = plain()
for name, (losses, found) in {"shapes found": pipelined(), "shapes given": pipelined(**given)}.items():
    print(f"torch {torch.__version__}, {name}: losses {'equal' if torch.allclose(losses, expected) else 'differ'}")
    for at, (norm, own) in enumerate(zip(norms, found, strict=True)):
        counted, ran = own.num_batches_tracked.item(), norm.num_batches_tracked.item()
        print(f"  stage {at}: {counted} batches counted, {ran} ran; running mean {own.running_mean[0]:.4f}, plain {norm.running_mean[0]:.4f}")
    assert torch.allclose(losses, expected), "the behaviour has changed"
    if name == "shapes given":
        assert all(torch.allclose(a.running_mean, b.running_mean) for a, b in zip(norms, found)), "the behaviour has changed"
    else:
        assert all(a.num_batches_tracked + 1 == b.num_batches_tracked for a, b in zip(norms, found)), "the behaviour has changed"
        assert not torch.allclose(norms[0].running_mean, found[0].running_mean), "the behaviour has changed"
        assert found[1].running_mean.isnan().all(), "the behaviour has changed"
dist.destroy_process_group()
PY
"$folder/venv/bin/python" "$folder/stages.py"
