"""One rank of run.py: a model of the parity zoo through torch's tracer and one step of torch's schedule.

    outsize run --nproc-per-node STAGES benchmarks/coverage/worker.py NAME SCHEDULE FOLDER SPLIT...

SPLIT names the modules at which stages 1, 2, ... begin. Leaves FOLDER/rank<N>.json: how far it came, and the
largest difference between this rank's gradients and those of the plain loop over the same microbatches.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "parity"))

MICROBATCHES, SAMPLES = 4, 8
ARGUMENTS = {"late_fusion": 1}  # the first stage's graph takes the first image only
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def main(name: str, schedule: str, folder: Path, splits: list[str]) -> None:
    """Trace, split, run one step, compare; say at which of these it ended."""
    from zoo import case

    dist.init_process_group("gloo")
    model, plain = case(name).build(), case(name).build()
    if hasattr(model, "config"):
        model.config.use_cache = plain.config.use_cache = False  # torch.export knows no cache objects
    args, kwargs, target, loss = batch_of(name)
    said: dict[str, Any] = {"stage": "trace"}
    try:
        parts = {"mb_args": first(args), "mb_kwargs": first(kwargs)}
        pipe = pipeline(model, **parts, split_spec=dict.fromkeys(splits, SplitPoint.BEGINNING))
        said["stage"] = "run"
        stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
        runner = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=loss)
        last = dist.get_rank() == dist.get_world_size() - 1
        inputs, named = (args[: ARGUMENTS.get(name)], kwargs) if dist.get_rank() == 0 else ((), {})
        runner.step(*inputs, target=target if last else None, **named)
        said |= {"stage": "done", **compared(stage.submod, plain_gradients(plain, name))}
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {root(error)}"[:300]
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(said))


def batch_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Any]:
    """Positional and keyword inputs, target, loss(output, target); a loss inside the model is taken out."""
    from zoo import case

    args, kwargs = case(name).batch(SAMPLES)
    if case(name).loss is not None:
        return args, kwargs, case(name).target(SAMPLES), case(name).loss
    return args, {"input_ids": kwargs["input_ids"]}, kwargs["labels"], next_token_loss


def next_token_loss(output: Any, labels: Tensor) -> Tensor:
    """What transformers computes from labels."""
    logits = output if isinstance(output, Tensor) else output["logits"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def first(tree: Any) -> Any:
    """One microbatch of a tuple or dict of tensors."""
    count = SAMPLES // MICROBATCHES
    return (
        tuple(t[:count] for t in tree) if isinstance(tree, tuple) else {k: t[:count] for k, t in tree.items()}
    )


def plain_gradients(model: nn.Module, name: str) -> dict[str, Tensor]:
    """The plain loop over the same microbatches."""
    args, kwargs, target, loss = batch_of(name)
    for rows in torch.arange(SAMPLES).chunk(MICROBATCHES):
        output = model(*(t[rows] for t in args), **{k: t[rows] for k, t in kwargs.items()})
        (loss(output, target[rows]) / MICROBATCHES).backward()
    return {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def compared(stage: nn.Module, wanted: dict[str, Tensor]) -> dict[str, Any]:
    """How many gradients this rank has, and the largest absolute difference of each that is not bit-equal."""
    found = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    wrong = {n: (g - wanted[n]).abs().max().item() for n, g in found.items() if not g.equal(wanted[n])}
    return {"gradients": len(found), "wrong": wrong}


def root(error: BaseException | None) -> str:
    """The first line of the earliest error in the chain that says something."""
    lines = []
    while error is not None:
        lines.append((str(error).strip().splitlines() or [""])[0])
        error = error.__cause__ or error.__context__
    return next((line for line in reversed(lines) if line), "no message")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
