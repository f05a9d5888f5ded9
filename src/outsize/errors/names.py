"""Names that other frameworks' commands, engines, results and packages have, each with what to write here.

    outsize launch train.py        Accelerate
    engine.save_checkpoint(...)    DeepSpeed
    result.backward()              plain torch, Accelerate
    outsize.prepare(...)           Accelerate

Python asks for a text where an attribute is missing; tools that only look (hasattr) get their AttributeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STEP: Final = "engine.step(x, target=y), which runs forward, backward and the optimizer's step"
_LOOP: Final = "for x, y in engine.state.batches(loader): engine.step(x, target=y)"
_PLACED: Final = "the plan's devices; the engine has placed the model there"
_SAVED: Final = "engine.save('run'), or engine.state.checkpoint('run', every=500) after each step"
_RESUMED: Final = "outsize.parallelize(..., resume='run'), or engine.state.resume('run')"
_ENGINE_OF: Final = "engine = outsize.parallelize(model, (x,), target=y, loss_fn=..., optimizer=...)"
_ACCUMULATED: Final = "engine.step(x, target=y, update=False, loss_scale=1 / 4), and update=True for the last"
_LOSS: Final = "result.loss, a tensor of no dims: float(engine.step(x, target=y).loss)"
_RATE: Final = "engine.optimizer.param_groups[0]['lr']; a scheduler of torch over engine.optimizer sets it"
_PROCESSES: Final = "engine.rank for this process; outsize run --nproc-per-node 2 train.py starts them"

_RUN: Final = "outsize run --nproc-per-node 2 train.py"
COMMANDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("accelerate", "deepspeed", "launch", "mpirun", "srun", "torchrun", "train"), _RUN),
    **dict.fromkeys(("estimate", "estimate-memory", "memory"), "outsize fit MODEL --cluster 2x24GB"),
    **dict.fromkeys(("rank", "rent"), "outsize fit MODEL --devices l4-24gb,h100-80gb"),
    "env": "outsize doctor",
    "help": "outsize --help, or outsize plan --help",
    "info": "outsize doctor",
    "version": "outsize --version",
}
ENGINE: Final[Mapping[str, str]] = {
    "accumulate": _ACCUMULATED,
    "backward": _STEP,
    "clip_grad_norm_": "parallelize(clip_norm=1.0), or engine.clip_grad_norm(1.0) before engine.update()",
    "cuda": _PLACED,
    "device": _PLACED,
    "eval": "engine.evaluate(x), which runs in eval mode, or engine.model.eval()",
    "eval_batch": "engine.evaluate(x, target=y)",
    "fit": _LOOP,
    "forward": "engine.evaluate(x), whose outputs are those of the model",
    "get_lr": _RATE,
    "is_main_process": "engine.rank == 0",
    "load": _RESUMED,
    "load_checkpoint": _RESUMED,
    "load_state": _RESUMED,
    "load_state_dict": "engine.weights.module.load_state_dict(state, strict=False), or weight_files='DIR'",
    "local_rank": _PROCESSES,
    "lr": _RATE,
    "lr_scheduler": _RATE,
    "no_sync": _ACCUMULATED,
    "optimizer_step": "engine.update(), after engine.step(..., update=False)",
    "parameters": "engine.weights.parameters(), those of this rank",
    "predict": "engine.evaluate(x).outputs",
    "save_checkpoint": _SAVED,
    "save_model": "engine.weights.full_state_dict(to='model'), or engine.weights.save_pretrained('model')",
    "save_state": _SAVED,
    "scheduler": _RATE,
    "state_dict": "engine.weights.full_state_dict() on rank 0, engine.weights.module.state_dict() for a rank",
    "to": _PLACED,
    "train": "engine.model.train(), the mode of the next steps",
    "train_batch": _STEP,
    "unwrap_model": "engine.model, or engine.weights.module for this rank's weights",
    "wait_for_everyone": "leave it out: the calls of an engine wait for each other where they have to",
    "world_size": _PROCESSES,
    "zero_grad": "engine.step(x, target=y), which clears gradients after its update",
}
MOVED: Final[Mapping[str, str]] = {
    **{
        name: f"state.{name}"
        for name in (
            *("attach", "batches", "checkpoint", "finish_saving", "insist_on_resumable", "on_saving"),
            *("resume", "saving"),
        )
    },
    **{
        name: f"weights.{name}"
        for name in (
            *("apply_named", "full_state_dict", "loss_state_dict", "module", "named_parameters"),
            *("save_pretrained", "whole"),
        )
    },
    "load_weights": "weights.load",
}
"""Names that engines had, each with its name now. They go on working in this release, with a warning."""
RESULT: Final[Mapping[str, str]] = {
    "backward": "leave it out: engine.step(x, target=y) has run the backward",
    "detach": _LOSS,
    "item": _LOSS,
    "logits": "engine.step(..., gather='outputs').outputs, one for each microbatch",
    "mean": _LOSS,
}
_OUTPUTS: Final = (
    "result.outputs[0], which the model returned for the first microbatch; result.loss is the loss"
)
EVALUATION: Final[Mapping[str, str]] = {
    "backward": "engine.step(x, target=y), which trains",
    **dict.fromkeys(("argmax", "detach", "item", "logits", "shape", "size", "softmax"), _OUTPUTS),
}
_STARTS: Final = (
    "Accelerator", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "distribute",
    "fully_shard", "init", "initialize", "pipeline", "prepare", "shard", "split", "train", "wrap",
)  # fmt: skip
PACKAGE: Final[Mapping[str, str]] = {
    **dict.fromkeys(_STARTS, _ENGINE_OF),
    "Trainer": "from outsize.integrations.transformers import Trainer",
    "init_process_group": "outsize run --nproc-per-node 2 train.py; parallelize() joins the processes",
    "load": "outsize.Plan.load('plan.json') for a plan, outsize.resume('run', model, (x,)) for a run",
    "run": "outsize run --nproc-per-node 2 train.py, in a shell",
    "save": "engine.save('run') for a run, plan.save('plan.json') for a plan",
}


def missing(what: str, name: str, instead: Mapping[str, str]) -> str:
    """Returns the text of the AttributeError for a name that something does not have."""
    other = instead.get(name)
    return f"{what} has no `{name}`" + (f". Next: {other}" if other else "")
