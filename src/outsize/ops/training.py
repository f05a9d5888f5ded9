"""Answers what users call: an engine whose ranks are watched, and whose run can be seen by others.

    outsize.parallelize = api.parallelize + watchdog (ops/watchdog) + publisher (ops/publish)

Both are callbacks, like the user's own, and are told when the run begins: nothing below this file knows that
a run is watched or published.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Unpack

from torch import nn

from outsize.api import running
from outsize.api.options import ParallelizeOptions, reads_options
from outsize.api.planning import Args, Kwargs
from outsize.errors import BadCheckpoint
from outsize.errors.arguments import path_of
from outsize.ir.plan import Plan
from outsize.ops.publish.publisher import Publisher
from outsize.ops.watchdog.options import OnHang
from outsize.ops.watchdog.watch import WatchRanks
from outsize.train.checkpoint.checkpoints import newest_folder
from outsize.train.engine.engine import Engine


class RunOptions(ParallelizeOptions, total=False):
    """The options of `parallelize`, with those of who observes the run."""

    hang_timeout: float
    on_hang: OnHang
    publish: bool
    total_steps: int | None


_OBSERVERS: Final = frozenset(RunOptions.__annotations__.keys() - ParallelizeOptions.__annotations__.keys())


@reads_options(RunOptions)
def parallelize(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | None = None,
    **options: Unpack[RunOptions],
) -> Engine:
    """Returns an engine that trains by the plan: under torchrun a process per stage, else all stages here.

    Every rank builds the same model (same seed) and passes the same batches; weights of other stages are
    freed. Without a plan one is made on rank 0, by the options of `plan`; where one process is all there is,
    it is exact (`exact=True`). The other options:

    - `loss_fn`, `target`, `batch_dims`: as for `plan`.
    - `optimizer`: gets this rank's parameters and returns a torch optimizer (`engine.optimizer`).
    - `devices`: `["cuda:0", "cuda:1"]` runs in this process, with a rank on each device; name a device
      several times for several ranks on it. A plan made for such devices needs none. Batches may be on any.
    - `clip_norm`: clips by the norm of all gradients, for which an optimizer on the host waits.
    - `clipping`: "speculative" does not wait, and undoes a step where the norm was too large: the same bits,
      for 12 more bytes per parameter on the host (AdamW); "exact" by default.
    - `scaler`: a GradScaler of torch.
    - `counting`: by what a microbatch counts in the batch's loss: "auto" by what the loss is a mean over,
      "samples", or "sum" where losses of microbatches are added as they are (the loss has divided by a count
      of the whole batch).
    - `callbacks`: objects of `outsize.Callback`, the same on every rank; rank 0 calls them.
    - `publish`: True lets `outsize top` see a run that `outsize run` has not started (it publishes each).
    - `total_steps`: how many steps the run will have, from which `outsize top` knows the time left.
    - `memory_share`: how much of each device's memory the run is planned for, and held to: 0.5.
    - `own_batches`: each replica passes its own samples alone (`engine.batch_sampler`).
    - `seed`: the seed of random numbers in the model; 0 by default.
    - `weights`: a .safetensors file, an index, or a folder with one, for a model on meta: every rank reads
      its own tensors only.
    - `offload_folder`: the folder for the files of weights, gradients or states that a plan puts on the host.
    - `resume`: a folder of `engine.save`: goes on from its newest complete checkpoint, which may be of
      another layout; begins where there is none. Without a plan, that of the checkpoint is used if it fits.
    - `checkpoint`: the folder in which the run will save itself (that of `resume` by default): what could not
      go on from there, such as an optimizer whose `state_dict()` lacks something, is an error now.
    - `captures`: how many shapes of a microbatch keep their recorded programs.
    - `compiled`: a backend of torch.compile for the stages' functions: "inductor" (or True) fuses kernels,
      "aot_eager" keeps every bit. "auto" compiles where devices are expected to wait for their host
      (`engine.compilation` says why), and runs a stage as it is where that fails. False (default): never.
    - `device_graphs`: True records each stage's forward and backward as graphs of its device (CUDA graphs)
      after two steps, and replays them, which keeps every bit; a stage that cannot be recorded runs as it is,
      with a warning. "auto" does so where devices are expected to wait for their host. `engine.device_graphs`
      says what was recorded, and its bytes. False (default): never.
    - `backend`: torch's name of the communication backend ("mpi", "nccl"); by default gloo for CPUs and the
      device's own. A process group that exists already is used as it is.
    - `hang_timeout`: after so many seconds without progress ranks find out whom they wait for (10, and five
      steps at least); 0: never. `on_hang`: "end" ends a run that cannot go on, "wait" only says so.
    - `on_oom`: "replan" plans again at the next start, for less memory, where a device of this run ran out of
      it, and goes on from the newest checkpoint in `resume`; "raise" (default) only raises.

    Raises WorldMismatch, ModelMismatch, BadPlan, UnsupportedPlan, BadOption, BadWeights, UnknownDevice,
    BadCheckpoint.
    """
    observers = [
        WatchRanks(options.get("hang_timeout"), options.get("on_hang")),
        Publisher(wanted=options.get("publish", False), total_steps=options.get("total_steps")),
    ]
    chosen: Any = {name: value for name, value in options.items() if name not in _OBSERVERS}
    callbacks = chosen.get("callbacks", ())
    # What is no list of callbacks is refused where the engine's options are read.
    chosen["callbacks"] = [*callbacks, *observers] if isinstance(callbacks, Iterable) else callbacks
    return running.parallelize(model, args, kwargs, plan=plan, **chosen)


def resume(
    folder: str | Path,
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | None = None,
    **options: Unpack[RunOptions],
) -> Engine:
    """Returns an engine that goes on from the newest complete checkpoint in `folder`, of any layout.

    It is `parallelize(..., resume=folder)`, but for a folder without a checkpoint, which is an error.
    `engine.steps` says where it goes on. Raises BadCheckpoint and as `parallelize`.
    """
    if newest_folder(path_of(folder, "folder", "outsize.resume('run', model, (x,), ...)")) is None:
        raise BadCheckpoint(
            f"no complete checkpoint in {folder}", next_step=f"ls {folder}; engine.save({str(folder)!r})"
        )
    return parallelize(model, args, kwargs, plan=plan, **{**options, "resume": folder})
