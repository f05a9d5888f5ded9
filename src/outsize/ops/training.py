"""Answers what users call: an engine whose ranks are watched, and whose run can be seen by others.

    outsize.parallelize = api.parallelize + watchdog (ops/watchdog) + publisher (ops/publish)

Both are callbacks, like the user's own, and are told when the run begins: nothing below this file knows that
a run is watched or published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, get_args

from torch import nn

from outsize.api import running
from outsize.api.options import ParallelizeOptions, SplitOptions, reads_options
from outsize.api.planning import Args, Kwargs
from outsize.api.records import Checkpoint, Request, Watch
from outsize.device.accelerators import is_accelerator
from outsize.device.malloc import keep_freed_memory
from outsize.errors import BadCheckpoint, BadOption
from outsize.errors.arguments import path_of
from outsize.ir.plan import Plan
from outsize.ops.publish.publisher import Publisher
from outsize.ops.watchdog.watch import WatchRanks
from outsize.train.checkpoint.checkpoints import newest_folder
from outsize.train.context.callback import Callback
from outsize.train.engine.engine import Engine
from outsize.train.split.calls import insist_on_calls, tell_of_modules
from outsize.train.split.module import SplitModule
from outsize.train.split.outputs import Outputs


@reads_options(ParallelizeOptions)
def parallelize(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | Request | None = None,
    **options: Unpack[ParallelizeOptions],
) -> Engine:
    """Returns an engine that trains by the plan: under torchrun a process per stage, else all stages here.

    Every rank builds the same model (same seed) and passes the same batches; weights of other stages are
    freed. An option takes a plain value, or the record of its subject where there is more to say:

    - `plan`: a plan of `outsize.plan`. Without one a plan is made on rank 0; where one process is all there
      is, it is exact (`exact=True`). `outsize.Request(precision="bf16-mixed", ...)` says what is asked of it.
    - `cluster`, `stages`, `microbatches`, `schedule`, `axes`: fields of that request by themselves.
    - `loss_fn`, `target`, `batch_dims`: as for `plan`. `outsize.Loss(function, counting="sum",
      scaler=...)` also says by what a microbatch counts, and has a GradScaler of torch.
    - `optimizer`: gets this rank's parameters and returns a torch optimizer (`engine.optimizer`).
    - `clip_norm`: clips by the norm of all gradients. `outsize.Clip(1.0, clipping="speculative")` does
      not wait for it.
    - `devices`: `["cuda:0", "cuda:1"]` runs in this process, with a rank on each device. `outsize.Ranks`
      has also their memory (`memory_share`, `on_oom`, `offload_folder`), the `backend` between them,
      `own_batches` and `seed`.
    - `weight_files`: a .safetensors file, an index, or a folder with one, for a model on meta: every rank
      reads its own tensors only.
    - `resume`: a folder of `engine.save`: goes on from its newest complete checkpoint, which may be of
      another layout; begins where there is none. `outsize.Checkpoint("run", saves_in="elsewhere")` saves
      elsewhere.
    - `compiled`: a backend of torch.compile for the stages' functions, True for "inductor", or "auto".
      `outsize.Compile(device_graphs=True)` records stages as CUDA graphs; it has also `captures`.
    - `callbacks`: objects of `outsize.Callback`, the same on every rank; rank 0 calls them.
      `outsize.Watch` among them says how the run is watched (`hang_timeout`, `on_hang`, `verify`) and
      published (`publish`, `total_steps`).

    docs/options.md explains each field of each record on one page.

    Raises WorldMismatch, ModelMismatch, BadPlan, UnsupportedPlan, BadOption, BadWeights, UnknownDevice,
    BadCheckpoint.
    """
    given: Any = options.get("callbacks", ())
    if isinstance(given, Iterable):  # What is no list is refused where the engine's options are read.
        options = {**options, "callbacks": (given := _with_observers(list(given)))}
    engine = running.parallelize(model, args, kwargs, plan=plan, **options)
    every = next((one.options.verify for one in given if isinstance(one, WatchRanks)), 0)
    if every:
        engine.verify(every)
    return engine


@reads_options(SplitOptions)
def split(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | Request | None = None,
    **options: Unpack[SplitOptions],
) -> SplitModule:
    """Returns the model as a module whose calls run over the plan's devices, for a loop of your own.

        model = outsize.split(Net(), (x,))
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in batches:
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    A call runs the forwards of all microbatches, pipelined, and returns the outputs of the whole batch; the
    backward runs theirs, the last microbatch first. So a loss may be anything over the whole batch, and bits
    are those of a loop that calls the model once for each microbatch and joins what it returns. `args` and
    `kwargs` are an example batch. In one process all weights are here; under torchrun every rank runs the
    same loop on the same batch, has the weights of its stage, and gets all outputs. The options:

    - `plan`: a plan of `outsize.plan`, whose schedule becomes that of the loop, or a `Request`. Without one
      the model is planned for the devices there are.
    - `cluster`, `stages`, `microbatches`, `axes`: fields of that request by themselves.
    - `batch_dims`: along which dim of each input the samples lie, as for `plan`.
    - `devices`, `weight_files`, `compiled`, `callbacks`: as for `parallelize`.
    - `outputs`: "last" leaves outputs on the ranks of the last stage (`model.has_outputs`). Others get zeros
      of their shape, without memory, and run the same loop; what they compute of them is not the loss.

    Raises what `parallelize` raises.
    """
    outputs = options.get("outputs", "all")
    if outputs not in get_args(Outputs):
        raise BadOption(f"outputs={outputs!r} is unknown", next_step="outputs='last', or 'all'")
    if isinstance(plan, Plan):
        insist_on_calls(plan)
        asked = plan
    else:
        asked = replace(Request() if plan is None else plan, loop=True)
    of_engine: Any = {name: value for name, value in options.items() if name != "outputs"}
    engine = parallelize(model, args, kwargs, plan=asked, **of_engine)
    insist_on_calls(engine.plan, engine.crew.local_replicas)
    tell_of_modules(engine.plan, engine.rank)
    if not is_accelerator(engine.plan.stages[0].device):
        # The gradients of all weights are there at once, for each microbatch anew: pages that come and go
        # with them take longer than their sums (benchmarks/split).
        keep_freed_memory()
    # A copy takes over the plan, which has decided all that these have asked for.
    kept = options.copy()
    for asked_for in ("cluster", "stages", "microbatches", "axes"):
        kept.pop(asked_for, None)

    def again(other: nn.Module) -> SplitModule:
        return split(other, args, kwargs, plan=engine.plan, **kept)

    return SplitModule(engine, again, outputs)


def _with_observers(callbacks: list[Any]) -> list[Any]:
    """Returns the user's callbacks, and who observes the run as the one Watch among them says.

    Raises BadOption for several of them, since each says all of it.
    """
    watches = [one for one in callbacks if isinstance(one, Watch)]
    if len(watches) > 1:
        raise BadOption(
            f"callbacks has {len(watches)} records of outsize.Watch, and a run is watched in one way",
            numbers="; ".join(map(repr, watches)),
            next_step="callbacks=[..., outsize.Watch(...)], with all fields in one",
        )
    watch = watches[0] if watches else Watch()
    return [*(one for one in callbacks if one is not watch), *_observers(watch)]


def _observers(watch: Watch) -> tuple[Callback, Callback]:
    """Returns who observes a run beside the user's callbacks. Raises BadOption for what makes no sense."""
    return (
        WatchRanks(watch.hang_timeout, watch.on_hang, watch.verify),
        Publisher(wanted=watch.publish, total_steps=watch.total_steps),
    )


def resume(
    folder: str | Path,
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | Request | None = None,
    **options: Unpack[ParallelizeOptions],
) -> Engine:
    """Returns an engine that goes on from the newest complete checkpoint in `folder`, of any layout.

    It is `parallelize(..., resume=folder)`, but for a folder without a checkpoint, which is an error;
    `resume=outsize.Checkpoint(saves_in="elsewhere")` beside it says where the run saves.
    `engine.steps` says where it goes on. Raises BadCheckpoint, BadOption and as `parallelize`.
    """
    beside = Checkpoint.of(options.get("resume"), "resume")
    if beside.folder is not None:
        raise BadOption(
            "outsize.resume has the folder as its first argument, and resume= names one as well",
            numbers=f"{folder}, and {beside.folder}",
            next_step='outsize.resume("run", model, (x,), resume=outsize.Checkpoint(saves_in="elsewhere"))',
        )
    if newest_folder(path_of(folder, "folder", "outsize.resume('run', model, (x,), ...)")) is None:
        raise BadCheckpoint(
            f"no complete checkpoint in {folder}", next_step=f"ls {folder}; engine.save({str(folder)!r})"
        )
    # A plain folder, where nothing else is said, takes the old keyword `checkpoint` beside it.
    where = folder if beside == Checkpoint() else replace(beside, folder=folder)
    return parallelize(model, args, kwargs, plan=plan, **{**options, "resume": where})
