"""Rehearses one small world of a plan: starts its ranks, or is one of them; what happened is in a folder.

    outsize rehearse --process group with a limit--> rehearsal_worker FOLDER --launcher, restarts 1--> itself

Each rank builds the small model, takes steps as a user's script would, and writes its tensors:

    attempt 0   step 1 -> first    save    steps 2 and 3 -> later    step 4, in which one rank kills itself
    attempt 1   goes on from the checkpoint of step 1 -> restored    steps 2 and 3 -> again

What the files prove is judged by ops/rehearsal/judge.py. A rank that starts again although nobody was killed
on purpose ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Final, final

import torch
import torch.distributed as dist

from outsize.api.records import Checkpoint, Ranks, Watch
from outsize.cli.processes.job import JobFolder
from outsize.cli.processes.limited import end_with_caller
from outsize.ir.base import Record
from outsize.ir.plan import Plan
from outsize.ops.rehearsal.judge import AGAIN, FIRST, LATER, RESTORED, RankFiles
from outsize.ops.rehearsal.small_model import SmallModel
from outsize.ops.rehearsal.witness import Witness, unseen
from outsize.ops.training import parallelize
from outsize.run.transport.values import write_value
from outsize.train.check.compare import adamw, engine_snapshots
from outsize.train.engine.engine import Engine
from outsize.train.world.join import join
from outsize.train.world.world import World, device_type_for, leave, visible_accelerators

LATER_STEPS: Final = 2
_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"


@final
class RehearsalJob(Record):
    """Is one world: its plan, how its model is built, and which rank kills itself. `is_launcher` says that
    this process starts the ranks.
    """

    plan: Plan
    spec: str
    input: str | None
    seed: int
    dropped: tuple[str, ...]
    killed: int
    hang_s: float
    per_device: int
    is_launcher: bool = False

    @property
    def model(self) -> SmallModel:
        """Returns how the model is built."""
        return SmallModel(self.spec, self.input, self.seed, self.dropped)


def main(folder: JobFolder) -> int:
    """Rehearses as a rank, or starts the ranks; returns the exit code."""
    job = RehearsalJob.model_validate_json(folder.job.read_text(encoding="utf-8"))
    if job.is_launcher:
        end_with_caller()
        return _launched(job, folder)
    files = RankFiles(folder.path)
    world = join(device_type_for(job.plan, job.plan.axes.world_size, visible_accelerators))
    torch.set_num_threads(1)  # some kernels add up in as many parts as there are threads
    if int(os.environ.get(_ATTEMPT, "0")) == 0:
        _first_attempt(job, files, world)
    elif not files.has_all(LATER, world.world_size):
        return 1  # a rank has ended that nobody has killed
    else:
        files.note(world.rank, "resume")
        engine = _engine(job, files)
        named = engine.weights.named_parameters(loss=True)
        weights = {name: engine.weights.whole(name, weight).detach().clone() for name, weight in named}
        write_value(files.of(world.rank, RESTORED), weights)
        files.note(world.rank, "steps 2 and 3 again")
        _take(engine, job, files, AGAIN)
        files.note(world.rank, "done")
    leave(world)
    return 0


def _launched(job: RehearsalJob, folder: JobFolder) -> int:
    from outsize.cli.processes.launch import LaunchPlace
    from outsize.ops.watchdog.options import WatchOptions

    folder.job.write_text(job.model_copy(update={"is_launcher": False}).to_json(), encoding="utf-8")
    place = LaunchPlace(
        options={"max_restarts": 1},
        watch=WatchOptions(job.hang_s),
        ranks_per_device=job.per_device,
        failures=RankFiles(folder.path).failures,
    )
    argv = ["outsize.cli.processes.rehearsal_worker", str(folder.path)]
    return place.launch(argv, job.plan.axes.world_size, module=True, shown_as=job.spec)


def _first_attempt(job: RehearsalJob, files: RankFiles, world: World) -> None:
    files.note(world.rank, "build")
    engine = _engine(job, files)
    files.note(world.rank, "step 1")
    witness = Witness(len(job.plan.stages))
    engine.crew.send_through(witness.between)
    _take(engine, job, files, FIRST)
    files.of(world.rank, "messages").write_text(witness.messages.to_json(), encoding="utf-8")
    engine.crew.send_through(unseen)
    files.note(world.rank, "save")
    engine.save(files.checkpoint)
    files.note(world.rank, "steps 2 and 3")
    _take(engine, job, files, LATER)
    if world.host is not None:
        dist.barrier(group=world.host)  # all have written what is compared
    files.note(world.rank, "step 4")
    if world.rank == job.killed:
        os.kill(os.getpid(), signal.SIGKILL)
    engine_snapshots(engine, [job.model.made(job.plan.batch_size).case.batch], steps=1)


def _engine(job: RehearsalJob, files: RankFiles) -> Engine:
    """Returns the engine, which goes on from the checkpoint where there is one."""
    built = job.model.made(job.plan.batch_size)
    return parallelize(
        built.model,
        built.args,
        built.kwargs,
        plan=job.plan,
        loss_fn=built.objective.loss_fn,
        target=built.objective.target,
        optimizer=adamw,
        devices=Ranks(seed=job.seed),
        resume=Checkpoint(files.checkpoint) if files.checkpoint.exists() else None,
        callbacks=[Watch()],
    )


def _take(engine: Engine, job: RehearsalJob, files: RankFiles, what: str) -> None:
    """Takes the steps and writes this rank's tensors."""
    built = job.model.made(job.plan.batch_size)
    steps = 1 if what == FIRST else LATER_STEPS
    snapshots = engine_snapshots(engine, [built.case.batch], steps=steps)
    write_value(files.of(engine.rank, what), snapshots)


if __name__ == "__main__":
    sys.exit(main(JobFolder(path=Path(sys.argv[1]))))
