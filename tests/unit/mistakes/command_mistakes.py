"""Command lines that are wrong: the words of other tools, values, files and models that are not there."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path

from mistake import Mistake

from outsize.cli.app import run

_TOY = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
"""


def said_by(line: str) -> str:
    """Returns the error that `outsize LINE` shows in a folder with a toy.py and a train.py."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("toy.py").write_text(_TOY)
        Path("train.py").write_text("import outsize\n")
        err = io.StringIO()
        sys.modules.pop("toy", None)
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            assert run(shlex.split(line))
        sys.modules.pop("toy", None)
    return next(text for text in err.getvalue().splitlines() if "]: " in text)


_HUB = "AutoConfig as C; C.from_pretrained('{}').save_pretrained('.')\", then transformers:./config.json"
# The command line, a part of the answer, and a part of the next step.
_LINES = (
    ("plan toy:build --gpus 8", "No such option: --gpus", "--cluster 2xh100-80gb"),
    ("plan toy:build --num-gpus 8", "No such option: --num-gpus", "--cluster 2xh100-80gb"),
    ("plan toy:build --fsdp 2", "No such option: --fsdp", "--axes dp_shard=2"),
    ("plan toy:build --zero-stage 3", "No such option: --zero-stage", "--axes dp_shard=2"),
    ("plan toy:build --dp 2", "No such option: --dp", "--axes dp_replicate=2"),
    ("plan toy:build --pp 2", "No such option: --pp", "--stages 2"),
    ("plan toy:build --pipeline-model-parallel-size 2", "No such option", "--stages 2"),
    ("plan toy:build --tensor-model-parallel-size 2", "No such option", "--axes tp=2"),
    ("plan toy:build --context-parallel-size 2", "No such option", "--axes cp=2"),
    ("plan toy:build --batch-size 8", "No such option: --batch-size", "--batch 32"),
    ("plan toy:build --gradient-accumulation-steps 4", "No such option", "--microbatches 4"),
    ("plan toy:build --seq-len 128", "No such option: --seq-len", "--input 4096"),
    ("plan toy:build --bf16", "No such option: --bf16", "--precision bf16-mixed"),
    ("plan toy:build --cpu-offload", "No such option: --cpu-offload", "--weights host"),
    ("plan toy:build --peft", "No such option: --peft", "--lora r=8"),
    ("plan toy:build -o plan.json", "No such option: -o", "--out plan.json"),
    ("plan toy:build --stage 2", "No such option: --stage", "--stages"),
    ("fit toy:build --gradient-checkpointing", "No such option", "--recompute full"),
    ("plan toy:build --config ds.json", "No such option: --config", "outsize plan --help"),
    ("plan toy:build --deepspeed ds.json", "No such option: --deepspeed", "--axes dp_shard=2"),
    ("plan toy:build --flash-attention", "No such option: --flash-attention", "in its config"),
    ("plan toy:build --format json", "No such option: --format", "--json"),
    ("plan toy:build --model gpt2", "No such option: --model", "outsize plan MODEL"),
    ("plan toy:build --devices 2", "No such option: --devices", "--cluster 2xh100-80gb"),
    ("plan toy:build --num-layers-per-virtual-pipeline-stage 2", "No such option", "--schedule interleaved"),
    ("fit toy:build --load-in-4bit", "No such option: --load-in-4bit", "--quantize nf4"),
    ("check toy:build --tolerance 1e-5", "No such option: --tolerance", "bits are compared"),
    ("plan toy:build --precision fp16", "'fp16' is not one of", "--precision fp16-mixed"),
    ("plan toy:build --precision bfloat16", "'bfloat16' is not one of", "--precision bf16"),
    ("plan toy:build --recompute true", "'true' is not one of", "--recompute full"),
    ("plan toy:build --weights cpu", "'cpu' is not one of", "--weights host"),
    ("plan toy:build --axes tp", "'tp' says no size", "--axes tp=2"),
    ("plan toy:build --axes tp=two", "'tp=two' says no size", "--axes tp=2"),
    ("plan toy:build --axes fsdp=4", "'fsdp' is no axis of a mesh", "--axes dp_shard=4"),
    ("plan toy:build --axes pp=4", "'pp' is no axis of a mesh", "--stages 4"),
    ("fit toy:build --axes tpp=2", "'tpp' is no axis of a mesh", "--axes tp=2"),
    ("plan toy:build --dp-shrad 2", "No such option: --dp-shrad", "--axes dp_shard=..."),
    ("plan toy:build --schedule 1F1B", "neither a schedule nor a file", "--schedule 1f1b"),
    ("plan toy:build --schedule zbv", "neither a schedule nor a file", "--schedule zero-bubble-v"),
    ("plan toy:build --optimizer AdamW", "optimizer 'AdamW' is not known", "--optimizer adamw"),
    ("plan toy:build --optimizer lion", "optimizer 'lion' is not known", "--optimizer momentum"),
    ("plan toy:build --cluster h100x8", "cluster 'h100x8' is not known", "--cluster 8xh100-80gb"),
    ("plan toy:build --cluster '8 H100'", "cluster '8 H100' is not known", "--cluster 8xh100-80gb"),
    ("plan toy:build --cluster a100:8", "cluster 'a100:8' is not known", "--cluster 8xa100-80gb"),
    ("plan toy:build --cluster 8x4090", "cluster '8x4090' is not known", "--cluster 8xrtx4090-24gb"),
    ("plan toy:build --cluster cuda", "cluster 'cuda' is not known", "--cluster local"),
    ("plan toy:build --cluster gpu", "cluster 'gpu' is not known", "--cluster local"),
    ("plan toy:build --cluster 2xtpu9", "cluster '2xtpu9' is not known", "2x32GB, by the memory"),
    ("plan toy:build --cluster 24GB", "cluster '24GB' is not known", "--cluster 2x24GB"),
    ("plan toy:build --cluster 4", "cluster '4' is not known", "--cluster 4x24GB, 4 devices by their memory"),
    ("plan toy:build --cluster 2xh100@ib", "a network that is not known: 'ib'", "--cluster 2xh100@ib400"),
    ("plan toy:build --cluster 0xcpu", "has no device", "--cluster 2xcpu"),
    ("plan toy:build --microbatches 0", "Invalid value for '--microbatches'", "outsize plan --help"),
    ("plan toy:build --input 3x", "", "--input"),
    ("plan toy.py:build", "'toy.py' is a path", "write toy:build"),
    ("plan gpt2", "'gpt2' is no model spec", _HUB.format("gpt2")),
    ("plan ./config.json", "is no model spec", "write transformers:./config.json"),
    ("plan nowhere:build", "nowhere:build cannot be built", "run from the folder of the module"),
    ("plan toy:biuld", "module toy has no 'biuld'", "toy:build"),
    ("plan", "Missing argument 'MODEL'", "outsize plan --help"),
    ("explain E999", "no error has the code 'E999'", "outsize explain E"),
    ("train toy:build", "No such command 'train'", "outsize run --nproc-per-node 2 train.py"),
    ("launch train.py", "No such command 'launch'", "outsize run --nproc-per-node 2 train.py"),
    ("torchrun train.py", "No such command 'torchrun'", "outsize run --nproc-per-node 2 train.py"),
    ("estimate-memory gpt2", "No such command", "outsize fit MODEL --cluster 2x24GB"),
    ("version", "No such command 'version'", "outsize --version"),
    ("help plan", "No such command 'help'", "outsize plan --help"),
    ("rnu train.py", "No such command 'rnu'", "outsize --help"),
    ("run --gpus 2 train.py", "No such option: --gpus", "outsize run --nproc-per-node 2 train.py"),
    ("run -n 2 train.py", "No such option: -n", "outsize run --nproc-per-node 2 train.py"),
    ("run --num-processes 2 train.py", "No such option", "outsize run --nproc-per-node 2 train.py"),
    ("run train.py --nproc-per-node 2", "one process would run", "outsize run --nproc-per-node 2 train.py"),
    ("run train.py --nproc 2", "one process would run", "outsize run --nproc-per-node 2 train.py"),
    ("run --use-deepspeed train.py", "No such option: --use-deepspeed", "outsize.parallelize"),
    ("run --multi-gpu train.py", "No such option", "outsize run --nproc-per-node 2 train.py"),
    ("run --master-port 99999 train.py", "--master-port 99999 is no port", "--master-port 29500"),
    ("run --rdzv-endpont a:1 train.py", "No such option: --rdzv-endpont", "--rdzv-endpoint"),
    ("run --rdzv-id", "--rdzv-id has no value", "torchrun --help"),
    ("run --max-restarts few train.py", "invalid int value: 'few'", "torchrun --help"),
    ("run --no-python train.py", "outsize run cannot follow it", "outsize run train.py"),
    ("run train.py --nnodes=2", "one process would run", "outsize run --nnodes 2 train.py"),
    ("run gpt2", "'gpt2' is neither a file nor a MODEL", _HUB.format("gpt2")),
    ("run meta-llama/Llama-3.1-8B", "neither a file nor a MODEL", _HUB.format("meta-llama/Llama-3.1-8B")),
    ("run trian.py", "no file 'trian.py'", "ls ."),
    ("run toy:build train", "'train' follows the MODEL", "outsize run MODEL --steps 10"),
    ("run --steps 3 train.py", "--steps is an option of a MODEL run", "outsize run train.py --steps"),
    ("run --nproc-per-node two train.py", "'two' is no count", "--nproc-per-node 2"),
    ("run --watch on_hang=kill train.py", "Input should be 'end' or 'wait'", "--watch on_hang=wait"),
    ("run --watch hang_timeot=60 train.py", "did you mean `hang_timeout`?", "--watch hang_timeout=60"),
    ("run --watch hang_timeout train.py", "it has no value", "--watch hang_timeout=60"),
    ("run --ranks 0.5 train.py", "--ranks has no key '0.5'", "--ranks memory_share=0.5"),
    ("run --ranks memory_share=2 train.py", "above 0 and at most 1", "memory_share=0.5"),
    ("run --ranks per_device=0 train.py", "greater than or equal to 1", "--ranks per_device=2"),
    ("run --ranks peer_copies=1 train.py", "a run that starts again", "--max-restarts 3"),
    ("run toy:build --checkpoint every=100", "every is for checkpoints", "--checkpoint DIR,every=100"),
    ("run toy:build --checkpoint run,evry=100", "did you mean `every`?", "--checkpoint every=10m"),
    ("run --hang-timeot 60 train.py", "No such option: --hang-timeot", "--watch hang_timeout=..."),
    ("run toy:build --tp 2", "No such option: --tp", "--axes tp=2"),
)

COMMAND_MISTAKES = {
    f"outsize {line}": Mistake(partial(said_by, line), answer, next_step)
    for line, answer, next_step in _LINES
}
