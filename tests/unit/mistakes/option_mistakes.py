"""Keyword arguments that are wrong: words of other libraries, values of another kind, wishes that differ."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mistake import Mistake, X, Y, engine, mlp
from torch import nn

import outsize
from outsize.api.records import fields_of
from outsize.ir.plan import Plan


def planned(layers: int = 3, **options: Any) -> Plan:
    """Returns a plan of two stages."""
    wanted: dict[str, Any] = {"cluster": "2xcpu", "loss_fn": F.cross_entropy, "target": Y}
    return outsize.plan(mlp(layers), (X,), **(wanted | options))


def checked(**options: Any) -> Any:
    """Returns the verdict of a check."""
    return outsize.check(mlp(), (X,), **({"loss_fn": F.cross_entropy, "target": Y} | options))


def _on_meta(weights: Any) -> Any:
    with torch.device("meta"):
        model = mlp()
    return engine(model, weight_files=weights)


def _of_torch_save() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.pt"
        torch.save(mlp().state_dict(), path)
        return _on_meta(str(path))


def _of_another_size(layers: int) -> Any:
    return engine(mlp(layers), plan=planned(3, stages=2), stages=..., cluster=..., microbatches=...)


def of_record(**fields: Any) -> Any:
    """Returns an engine with a field of the record that has it."""
    (name,) = fields
    if name in fields_of(outsize.Loss):
        return engine(loss_fn=outsize.Loss(F.cross_entropy, **fields))
    if name in fields_of(outsize.Compile):
        return engine(compiled=outsize.Compile(**fields))
    if name in fields_of(outsize.Ranks):
        return engine(devices=outsize.Ranks(**fields))
    return engine(callbacks=[outsize.Watch(**fields)])


def _two_steps(**options: Any) -> None:
    built = engine(**options)
    for _ in range(2):
        built.step(X, target=Y)


_WORDS: tuple[tuple[Callable[..., Any], str, str], ...] = (
    (planned, "pp", "stages=2"),
    (planned, "num_stages", "stages=2"),
    (planned, "pipeline_model_parallel_size", "stages=2"),
    (planned, "tensor_parallel_size", "axes={'tp': 2}"),
    (planned, "fsdp", "axes={'dp_shard': 2}"),
    (planned, "zero_stage", "axes={'dp_shard': 2}"),
    (planned, "dp", "axes={'dp_replicate': 2}"),
    (planned, "gpus", "cluster='2xh100-80gb'"),
    (planned, "num_processes", "cluster='2xh100-80gb'"),
    (planned, "bf16", "precision='bf16-mixed'"),
    (planned, "mixed_precision", "precision='bf16-mixed'"),
    (planned, "activation_checkpointing", "recompute='full'"),
    (planned, "cpu_offload", "weights='host'"),
    (planned, "labels", "target=y"),
    (planned, "criterion", "loss_fn=torch.nn.functional.cross_entropy"),
    (engine, "gradient_accumulation_steps", "microbatches=4"),
    (engine, "accumulate_grad_batches", "microbatches=4"),
    (engine, "lr", "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"),
    (engine, "max_grad_norm", "clip_norm=1.0"),
    (engine, "gradient_clip_val", "clip_norm=1.0"),
    (engine, "epochs", "for x, y in loader: engine.step(x, target=y)"),
    (engine, "resume_from_checkpoint", "resume='run'"),
    (engine, "pretrained", "weight_files='model.safetensors'"),
    (engine, "torch_compile", "compiled=True"),
    (engine, "find_unused_parameters", "leave it out"),
    (engine, "scheduler", "scheduler.step() on every rank"),
    (engine, "strategy", "the plan chooses"),
    (engine, "gpus", "devices=['cuda:0', 'cuda:1'] in this process, or outsize run --nproc-per-node 2"),
    (engine, "load_in_4bit", "quantize the model in memory"),
    (engine, "attn_implementation", "attn_implementation='sdpa' in its config"),
    (checked, "atol", "bits are compared"),
    (checked, "tp", "outsize.parallelize(..., axes={'tp': 2})"),
    (checked, "cluster", "outsize.plan(..., cluster='2x24GB')"),
)
_VALUES: tuple[tuple[Callable[..., Any], str, Any, str, str], ...] = (
    (planned, "precision", "16-mixed", "precision='16-mixed' makes no sense", "precision='fp16-mixed'"),
    (planned, "precision", torch.bfloat16, "makes no sense", "precision='bf16'"),
    (planned, "schedule", "Schedule1F1B", "makes no sense", "schedule='1f1b'"),
    (planned, "schedule", "zbh1", "makes no sense", "schedule='zero-bubble'"),
    (planned, "recompute", True, "recompute=True makes no sense", "recompute='full'"),
    (planned, "weights", "cpu", "weights='cpu' makes no sense", "weights='host'"),
    (planned, "optimizer", torch.optim.AdamW, "makes no sense", "optimizer='adamw'"),
    (planned, "stages", -1, "stages=-1 makes no sense", "stages=2, or none"),
    (planned, "stages", 2.5, "stages=2.5 makes no sense", "stages=2"),
    (planned, "microbatches", 16, "a batch of 8 cannot be cut into 16 microbatches", "--microbatches 8"),
    (planned, "cluster", 4, "cluster=4 is a int", "cluster='2xcpu'"),
    (checked, "stages", 50, "50 stages were asked for", "--stages"),
    (engine, "resume", True, "resume=True is a bool, no path", "resume='run'"),
    (engine, "weight_files", True, "weight_files=True is a bool", "weight_files='model.safetensors'"),
    (of_record, "scaler", True, "scaler=True is a bool", 'scaler=torch.amp.GradScaler("cuda")'),
    (engine, "clip_norm", "foo", "clip_norm='foo' makes no sense", "clip_norm=1.0"),
    (engine, "clip_norm", -1, "clip_norm=-1 is no norm", "clip_norm=1.0"),
    (engine, "clip_norm", 0, "clip_norm=0 is no norm", "leave it out to clip nothing"),
    (engine, "clip_norm", True, "clip_norm=True makes no sense", "clip_norm=1.0"),
    (engine, "loss_fn", nn.MSELoss, "loss_fn is the class MSELoss", "loss_fn=MSELoss(), with its brackets"),
    (engine, "loss_fn", "mse", "loss_fn='mse' is a str, no function", "loss_fn=torch.nn.functional"),
    (engine, "optimizer", "adamw", "optimizer is a str", "optimizer=lambda parameters: torch.optim.AdamW"),
    (engine, "optimizer", lambda _: torch.optim.SGD(mlp().parameters(), lr=0.1),
     "no weight of the optimizer is one of the model's", "optimizer=lambda parameters"),
    (of_record, "counting", "mean", "counting='mean' makes no sense", "counting='auto'"),
    (engine, "callbacks", [print], "a builtin_function_or_method that cannot be told", "on_step"),
    (engine, "callbacks", None, "callbacks is None", "callbacks=[MyCallback()]"),
    (engine, "compiled", [], "compiled=[] is a list, no True or False", "compiled=True"),
    (of_record, "total_steps", "a", "total_steps='a' makes no sense", "outsize.Watch(total_steps=1000)"),
    (of_record, "own_batches", "no", "own_batches='no' is a str, no True or False", "own_batches=True"),
    (of_record, "device_graphs", 1, "device_graphs=1 is a int, no True or False", "device_graphs='auto'"),
    (engine, "callbacks", print, "cannot be told of steps", "callbacks=[MyCallback()]"),
    (engine, "compiled", "max-autotune", "torch.compile has no backend", "inductor"),
    (of_record, "device_graphs", "yes", "device_graphs='yes' says nothing", "device_graphs=True"),
    (of_record, "hang_timeout", -1, "a hang timeout of -1 s makes no sense", "hang_timeout=10"),
    (of_record, "on_hang", "kill", "on_hang='kill' makes no sense", "on_hang='end'), or 'wait'"),
    (of_record, "on_oom", "retry", "on_oom='retry' makes no sense", "Ranks(on_oom='raise'), or 'replan'"),
    (planned, "microbatches", True, "microbatches=True makes no sense", "microbatches=2"),
    (engine, "stages", True, "stages=True makes no sense", "stages=2"),
    (of_record, "seed", "a", "seed='a' makes no sense", "seed=0"),
    (of_record, "seed", None, "seed=None makes no sense", "seed=0"),
    (of_record, "seed", -1, "seed=-1 makes no sense", "seed=0"),
    (of_record, "captures", 1.5, "captures=1.5 makes no sense", "captures=32"),
    (engine, "clip_norm", float("nan"), "clip_norm=nan is no norm", "clip_norm=1.0"),
    (of_record, "hang_timeout", "10m", "hang_timeout='10m' makes no sense", "hang_timeout=60"),
    (engine, "callbacks", [outsize.Callback], "cannot be told of steps", "callbacks=[MyCallback()]"),
    (engine, "batch_dims", 0, "batch_dims=0 names no argument", "batch_dims={'argument name or position'"),
    (engine, "batch_dims", "first", "batch_dims='first' names no argument", "batch_dims={'argument name"),
    (engine, "batch_dims", {0: 5}, "batch_dims gives 0 dim 5", "batch_dims={'argument name"),
    (engine, "weight_files", {}, "weight_files={} is a state", "model.load_state_dict(state)"),
    (engine, "resume", "", "resume='' is empty", "resume='run'"),
    (of_record, "memory_share", 2, "2 makes no sense", "0.5"),
    (of_record, "captures", 0, "captures=0 makes no sense", "captures="),
    (engine, "plan", "plan.json", "plan is a str, no Plan", "outsize.Plan.load('plan.json')"),
)  # fmt: skip


def _shown(value: Any) -> str:
    """Returns a value as the row names it, never with an address: processes of tests name rows alike."""
    return getattr(value, "__name__", None) or f"{value!r:.40}"


OPTION_MISTAKES = {
    f"{make.__name__}({word}=...)": Mistake(partial(make, **{word: 2}), f"no option `{word}`", next_step)
    for make, word, next_step in _WORDS
} | {
    f"{make.__name__}({name}={_shown(value)})": Mistake(partial(make, **{name: value}), answer, next_step)
    for make, name, value, answer, next_step in _VALUES
} | {
    "devices=2": Mistake(
        lambda: engine(devices=2, cluster=...), "devices=2 is a int, no list", 'devices=["cuda:0", "cuda:1"]'
    ),
    "tp=2 in one process": Mistake(
        lambda: engine(axes={"tp": 2}, stages=..., cluster=...),
        "tp 2 wants several devices, and this is one process on its own",
        "outsize run --nproc-per-node 2 train.py",
    ),
    "weights of torch.save": Mistake(
        _of_torch_save, "w.pt cannot be read as safetensors", "save_file(torch.load('w.pt'), 'w.safetensors')"
    ),
    "weights that are not there": Mistake(
        lambda: _on_meta("gone"), "no weights at gone", "ls ."
    ),
    "a plan for a smaller model": Mistake(
        lambda: _of_another_size(6), "made for a Sequential of 484 parameters", "outsize plan"
    ),
    "a plan for a larger model": Mistake(
        lambda: _of_another_size(2), "made for a Sequential of 484 parameters", "outsize plan"
    ),
    "no optimizer": Mistake(
        lambda: _two_steps(optimizer=...), "nothing has changed the weights", "optimizer=lambda parameters"
    ),
    "no example": Mistake(
        lambda: outsize.plan(mlp(), cluster="2xcpu"), "there is no example batch", "(model, (x,), target=y"
    ),
    "a tensor for the arguments": Mistake(
        lambda: outsize.plan(mlp(), X, cluster="2xcpu"), "args is a Tensor", "(model, (x,)) for one tensor"
    ),
    "a batch for the keyword arguments": Mistake(
        lambda: outsize.plan(mlp(), (), (X,), cluster="2xcpu"),  # pyright: ignore[reportArgumentType]
        "kwargs is a tuple", "target= and loss_fn= are options"
    ),
    "resume(model, args, folder)": Mistake(
        lambda: outsize.resume(mlp(), (X,), "run"),  # pyright: ignore[reportArgumentType]
        "a Sequential, no path", "outsize.resume('run', model, (x,), ...)"
    ),
    "largest_batch(batch_size=)": Mistake(
        lambda: outsize.largest_batch(mlp(), (X,), cluster="1x1GB", batch_size=8),
        "looks for batch_size", "leave it out",
    ),
    "largest of a model": Mistake(
        lambda: outsize.largest(mlp(), cluster="1x1GB"),
        "make is a Sequential, no function of a size", "make=lambda size: (model"
    ),
    "largest of a function that makes a model": Mistake(
        lambda: outsize.largest(lambda size: mlp(size), cluster="1x1GB"),  # pyright: ignore
        "not a model with its example", "make=lambda size: (model"
    ),
    "largest by steps of 0": Mistake(
        lambda: outsize.largest(lambda size: (mlp(), (X,), {}, {}), step=0), "step=0 makes no sense", "step=1"
    ),
    "clusters by one name": Mistake(
        lambda: outsize.rank_clusters(mlp(), (X,), devices="h100-80gb"), "no list of devices", "devices=["
    ),
    "one price for all": Mistake(
        lambda: outsize.rank_clusters(mlp(), (X,), devices=["h100-80gb"], prices=3),  # pyright: ignore
        "prices=3 names no kind", "prices={'h100-80gb': 2.5}"
    ),
    "a price as text": Mistake(
        lambda: outsize.rank_clusters(mlp(), (X,), devices=["h100-80gb"], prices={"h100-80gb": "3"}),  # pyright: ignore
        "the price h100-80gb=3 is of no use", "h100-80gb=2.5"
    ),
    "costs of a model": Mistake(
        lambda: outsize.estimate(mlp()), "no captured model", "outsize.capture(model, (x,))"  # pyright: ignore
    ),
    "plan.save(None)": Mistake(
        lambda: planned().save(None), "no path", "plan.save('plan.json')"  # pyright: ignore[reportArgumentType]
    ),
    "plan.save of a folder": Mistake(lambda: planned().save("."), ". is a folder", "plan.json"),
    "Plan.load(None)": Mistake(
        lambda: Plan.load(None), "no path", "outsize.Plan.load('plan.json')"  # pyright: ignore
    ),
    "outsize.prepare": Mistake(
        lambda: vars(outsize)["__getattr__"]("prepare"), "has no `prepare`", "outsize.parallelize(model, (x,)"
    ),
    "outsize.Trainer": Mistake(
        lambda: vars(outsize)["__getattr__"]("Trainer"), "has no `Trainer`", "outsize.integrations"
    ),
    "outsize.init_process_group": Mistake(
        lambda: vars(outsize)["__getattr__"]("init_process_group"), "has no", "outsize run --nproc-per-node 2"
    ),
    "an optimizer's function without parameters": Mistake(
        lambda: engine(optimizer=lambda: None), "cannot be called with the parameters", "optimizer=lambda par"
    ),
    "resume from nowhere": Mistake(
        lambda: outsize.resume("gone", mlp(), (X,)), "no complete checkpoint in gone", "ls gone"
    ),
    "a plan that is not there": Mistake(
        lambda: Plan.load("gone.json"), "cannot read gone.json", "outsize plan MODEL --out"
    ),
}  # fmt: skip
