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

from outsize.api.records import Checkpoint, Lora, Ranks, Watch
from outsize.cli.processes.job import JobFolder
from outsize.cli.processes.limited import end_with_caller
from outsize.ir.base import Record
from outsize.ir.plan import Plan
from outsize.ops.rehearsal.evidence import AGAIN, FIRST, LATER, RESTORED, RankFiles
from outsize.ops.rehearsal.small_model import SmallModel
from outsize.ops.rehearsal.witness import Witness, unseen
from outsize.ops.training import parallelize
from outsize.run.transport.values import write_value
from outsize.train.check.compare import adamw, engine_snapshots
from outsize.train.measure.training_case import as_batch
from outsize.train.world.join import join
from outsize.train.world.world import World, device_type_for, leave, visible_accelerators

LATER_STEPS: Final = 2
_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"


@final
class RehearsalJob(Record):
    """Is one world: its plan, how its model is built, and which rank kills itself. Ranks find `preloads`
    imported. `is_launcher` says that this process starts the ranks.
    """

    plan: Plan
    spec: str
    input: str | None
    seed: int
    dropped: tuple[str, ...]
    lora: Lora
    killed: int
    hang_s: float
    per_device: int
    preloads: tuple[str, ...]
    is_launcher: bool = False

    @property
    def model(self) -> SmallModel:
        """Returns how the model is built."""
        return SmallModel(self.spec, self.input, self.seed, self.dropped, self.lora)


def main(folder: JobFolder) -> int:
    """Rehearses as a rank, or starts the ranks; returns the exit code."""
    job = RehearsalJob.model_validate_json(folder.job.read_text(encoding="utf-8"))
    if job.is_launcher:
        end_with_caller()
        return _launched(job, folder)
    world = join(device_type_for(job.plan, job.plan.axes.world_size, visible_accelerators))
    torch.set_num_threads(1)  # some kernels add up in as many parts as there are threads
    files, is_first = RankFiles(folder.path), int(os.environ.get(_ATTEMPT, "0")) == 0
    if not is_first and not files.has_all(LATER, world.world_size):
        return 1  # a rank has ended that nobody has killed
    rank = _Rehearsing(job, files, world)
    if is_first:
        rank.first_attempt()
    else:
        rank.second_attempt()
    leave(world)
    return 0


def _launched(job: RehearsalJob, folder: JobFolder) -> int:
    from outsize.cli.processes.launch import LaunchPlace
    from outsize.ops.launch.spec import LaunchOptions
    from outsize.ops.watchdog.options import WatchOptions

    os.environ["OMP_NUM_THREADS"] = "1"  # on few cores ranks would wait for each other's threads
    folder.job.write_text(job.model_copy(update={"is_launcher": False}).to_json(), encoding="utf-8")
    how = LaunchOptions(
        watch=WatchOptions(job.hang_s),
        ranks_per_device=job.per_device,
        failures=RankFiles(folder.path).failures,
        preloads=job.preloads,
    )
    place = LaunchPlace(options={"max_restarts": 1}, how=how)
    argv = ["outsize.cli.processes.rehearsal_worker", str(folder.path)]
    return place.launch(argv, job.plan.axes.world_size, module=True, shown_as=job.spec)


@final
class _Rehearsing:
    """One rank, with its engine."""

    def __init__(self, job: RehearsalJob, files: RankFiles, world: World) -> None:
        self.job, self.files, self.world = job, files, world
        is_saved = files.checkpoint.exists()
        self._begin("resume" if is_saved else "build")
        built = job.model.made(job.plan.batch_size)
        self._batch = as_batch(built.args, built.kwargs, built.objective.target)
        self._engine = parallelize(
            built.model,
            built.args,
            built.kwargs,
            plan=job.plan,
            loss_fn=built.objective.loss_fn,
            target=built.objective.target,
            optimizer=adamw,
            devices=Ranks(seed=job.seed),
            resume=Checkpoint(files.checkpoint) if is_saved else None,
            callbacks=[Watch()],
        )

    def first_attempt(self) -> None:
        """Takes steps, saves, and is killed or loses another rank."""
        self._begin("step 1")
        log = self.files.log(self.world.rank)
        witness, crew = Witness(len(self.job.plan.stages), log), self._engine.crew
        crew.send_through(witness.between)
        self._take(FIRST)
        self.files.of(self.world.rank, "messages").write_text(witness.messages.to_json(), encoding="utf-8")
        crew.send_through(unseen)
        self._begin("save")
        self._engine.save(self.files.checkpoint)
        self._begin("steps 2 and 3")
        self._take(LATER)
        if self.world.host is not None:
            dist.barrier(group=self.world.host)  # all have written what is compared
        self._begin("step 4")
        if self.world.rank == self.job.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        engine_snapshots(self._engine, [self._batch], steps=1)

    def second_attempt(self) -> None:
        """Takes the same steps from the checkpoint."""
        named = self._engine.weights.named_parameters(loss=True)
        whole = self._engine.weights.whole
        weights = {name: whole(name, weight).detach().clone() for name, weight in named}
        write_value(self.files.of(self.world.rank, RESTORED), weights)
        self._begin("steps 2 and 3 again")
        self._take(AGAIN)
        self._begin("done")

    def _take(self, what: str) -> None:
        """Takes the steps and writes this rank's tensors after each of them."""
        count = 1 if what == FIRST else LATER_STEPS
        taken = [engine_snapshots(self._engine, [self._batch], steps=1)[-1] for _ in range(count)]
        write_value(self.files.of(self.world.rank, what), taken)

    def _begin(self, phase: str) -> None:
        self.files.note(self.world.rank, phase)


if __name__ == "__main__":
    sys.exit(main(JobFolder(path=Path(sys.argv[1]))))
