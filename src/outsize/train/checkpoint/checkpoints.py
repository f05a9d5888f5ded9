"""Defines Checkpoints: what one engine saves in a folder, and how it goes on from there.

    root/step-00000012/   manifest, checksums, and the tensors of each rank (run/checkpoint)

    values (JSON)         steps, seed, plan, code of the model, groups of optimizers, scaler, loaders
    model/, buffers/      weights under the user's names
    optimizer/, optimizers/NAME/   states by weight
    modules/              tensors of modules' extra states
    random/RANK/          random generators of each rank
    also/                 tensors of attached objects

Each rank writes what it has, and reads what it has under the new plan. Rank 0 gathers no tensors: it gets
facts of each rank as JSON, and publishes the folder when all have written theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from outsize.errors import BadOption
from outsize.errors.arguments import insist_on_whole_number
from outsize.ir.plan import Plan
from outsize.program.source_line import warn_user
from outsize.run.checkpoint.chunk import Chunk
from outsize.run.checkpoint.manifest import published, step_of
from outsize.run.checkpoint.overwrite import MappedWriter, begin_over
from outsize.run.checkpoint.read import CheckpointReader
from outsize.run.checkpoint.write import begin
from outsize.run.collectives.tensor_parallel import local_of
from outsize.run.weights.safetensors import WeightFiles
from outsize.train.checkpoint.agreement import shared_facts
from outsize.train.checkpoint.background import BackgroundSaves, WrittenSave
from outsize.train.checkpoint.copies import copy_rule
from outsize.train.checkpoint.loop.attached import OWN, AttachedObjects, Facts, ResumeNote, digest
from outsize.train.checkpoint.loop.generators import RunGenerators
from outsize.train.checkpoint.module_states import ModuleStates, merged_states, restore_modules
from outsize.train.checkpoint.optimizers.optimizer_documents import groups_of
from outsize.train.checkpoint.optimizers.optimizer_states import (
    NamedOptimizer,
    WholeWeights,
    is_of_layout,
    merged,
)
from outsize.train.checkpoint.optimizers.optimizer_trial import MakeOptimizer, insist_on_resumable
from outsize.train.checkpoint.plain_values import read, written
from outsize.train.checkpoint.weights import (
    MODEL,
    FileTensors,
    HeldPart,
    HeldWeights,
    code_of,
    first_difference,
)

_version = cache(version)


@final
@dataclass(frozen=True, slots=True)
class RunSettings:
    """Holds the plan, seed, loss and scaler of the run, which a checkpoint records besides tensors.

    `make_optimizer` makes one like the engine's, to find out whether it can go on.
    """

    plan: Plan
    seed: int
    loss_fn: Callable[..., Any] | None = None
    scaler: GradScaler | None = None
    make_optimizer: MakeOptimizer | None = None


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is: the steps that it has taken, and the engine's optimizer.

    `whole` are the weights that it steps, where these are not the model's own parameters. `has_weights` says
    whether a save holds the weights as well.
    """

    steps: int
    optimizer: Optimizer | None
    whole: WholeWeights | None = None
    has_weights: bool = True


@final
class Checkpoints:
    """Saves and restores the state of one engine, on all ranks of its run together."""

    def __init__(self, held: HeldWeights, settings: RunSettings, steps: Callable[[], int]) -> None:
        """Takes `steps`, which tells how many steps the engine has taken."""
        self._held, self._settings, self._steps = held, settings, steps
        self._background, self._mapped = BackgroundSaves(), MappedWriter()
        self._generators = RunGenerators(held)
        self.attached = AttachedObjects(held, self._generators, steps)
        self._code: dict[str, str] = {}
        self._is_tried = False

    @property
    def _group(self) -> dist.ProcessGroup | None:
        mesh = self._held.crew.mesh
        return None if mesh is None else mesh.group.host

    # -- saving ------------------------------------------------------------------------------------------

    def insist_on_resumable(self, root: Path | None = None) -> None:
        """Raises BadOption where a run could not be saved in `root`, or not go on from there.

        It is found out once, by a trial on small weights. All ranks call this together.
        """

        def insist() -> None:
            if root is not None:
                insist_on_writable(root)
            self._try_optimizer()

        shared_facts(self._group, insist)

    def _try_optimizer(self) -> None:
        if self._settings.make_optimizer is not None and not self._is_tried:
            insist_on_resumable(self._settings.make_optimizer)
        self._is_tried = True

    def save(self, root: Path, moment: Moment, keep: int | None, *, wait: bool = True) -> Path:
        """Writes the run's state to a new folder in `root` and returns it; all ranks call this together.

        Of complete checkpoints the newest `keep` stay. Without `wait` it returns when the state is copied to
        the host, and a thread writes; a save waits for the one before it. Raises BadOption before anything is
        written, NotSaved, also for the save before.
        """
        insist_on_keep(keep)
        self._background.finish()
        written, chunks = self._begun(root, moment, keep)
        if wait:
            written.write(chunks, self._group)
        else:
            self._background.write(written, chunks, self._group)
        return written.folder

    def copy(self, root: Path, moment: Moment) -> None:
        """Writes the run's state to `root`, a folder in memory, over the copy before the last.

        A save that is still being written to another folder goes on. All ranks call this together. Raises
        NotSaved.
        """
        written, chunks = self._begun(root, moment, None, self._mapped)
        written.write(chunks, self._group)

    def _begun(
        self, root: Path, moment: Moment, keep: int | None, mapped: MappedWriter | None = None
    ) -> tuple[WrittenSave, list[Chunk]]:
        """Returns a folder that is to be written, and what this rank writes there."""
        group, rank = self._group, self._held.crew.global_rank
        optimizers, tensors = self._optimizers(moment), dict[str, Tensor]()
        parts = self._held.parts() if moment.has_weights else []
        cards = shared_facts(group, lambda: self._card(moment, optimizers, parts, tensors))
        modules = ModuleStates(self._held)
        states = shared_facts(group, modules.states)
        # A digest is of the tensors too, which ranks do not tell: what is equal everywhere is written once.
        apart = [name for name in self.attached.objects if len({c["digests"].get(name) for c in cards}) > 1]
        chunks = [
            *_chunks(parts),
            *_whole_chunks(self._generators.tensors()),
            *_whole_chunks(self.attached.named(tensors, apart)),
            *modules.chunks(states),
        ]
        if mapped is None or not self._code:  # It is the same in all copies.
            self._code = code_of(self._held.model, self._settings.loss_fn)
        values = {**self._values(cards, apart), "modules": merged_states(states)}
        self._warn_of_one_layout(values["optimizers"])
        values["weights"] = moment.has_weights
        make = begin if mapped is None else begin_over
        folder = Path(shared_facts(group, lambda: str(make(root, moment.steps)) if rank == 0 else "")[0])
        return WrittenSave(folder, rank, values, keep, mapped), chunks

    @property
    def background(self) -> BackgroundSaves:
        """Returns what writes saves beside the steps."""
        return self._background

    def finish(self) -> None:
        """Waits until the last save is on the disk; raises what it raised."""
        self._background.finish()

    def _optimizers(self, moment: Moment) -> dict[str, NamedOptimizer]:
        own = moment.optimizer
        found = {} if own is None else {OWN: NamedOptimizer(own, moment.whole or self._held, OWN)}
        return found | self.attached.optimizers()

    def _card(
        self,
        moment: Moment,
        optimizers: Mapping[str, NamedOptimizer],
        parts: list[HeldPart],
        tensors: dict[str, Tensor],
    ) -> Facts:
        """Returns what rank 0 must know of this rank.

        It adds the states of optimizers to `parts`, and the tensors of attached objects to `tensors`.
        """
        if moment.whole is not None:
            insist_on_no_gradients(moment.whole.parts())
        elif moment.optimizer is not None:
            insist_on_no_gradients(p for group in groups_of(moment.optimizer) for p in group["params"])
        if moment.optimizer is not None:
            self._try_optimizer()
        self._warn_of_schedulers(moment.optimizer)
        facts = {name: optimizer.facts() for name, optimizer in optimizers.items()}
        for optimizer in optimizers.values():
            parts += optimizer.parts()  # It raises for what cannot be saved, before a folder is made.
        states, loaders = self.attached.states(tensors), self.attached.positions(tensors)
        digests = {name: digest(name, state, tensors) for name, state in states.items()}
        return {"optimizers": facts, "also": states, "loaders": loaders, "digests": digests}

    def _warn_of_schedulers(self, optimizer: Optimizer | None) -> None:
        scheduled = optimizer is not None and any("initial_lr" in g for g in groups_of(optimizer))
        if scheduled and not self.attached.objects and self._held.crew.global_rank == 0:
            warn_user(
                "the optimizer's learning rate scheduler is not saved: "
                "engine.state.attach(scheduler=scheduler)",
                ResumeNote,
            )

    def _warn_of_one_layout(self, optimizers: Mapping[str, Facts]) -> None:
        kinds = [facts["class"] for facts in optimizers.values() if is_of_layout(facts)]
        if kinds and self._held.crew.global_rank == 0:
            warn_user(
                f"{', '.join(kinds)} keeps a state of all weights of a rank together: this run goes on in "
                "the same layout only",
                ResumeNote,
            )

    def _values(self, cards: Sequence[Facts], apart: Sequence[str]) -> Facts:
        settings = self._settings
        scaler = None if settings.scaler is None else written(settings.scaler.state_dict(), "scaler", {})
        return {
            "outsize": _version("outsize"),
            "torch": _version("torch"),
            "steps": self._steps(),
            "seed": settings.seed,
            "ranks": len(cards),
            "plan": settings.plan.model_dump(mode="json"),
            "code": self._code,
            "optimizers": {
                name: merged([card["optimizers"][name] for card in cards]) for name in cards[0]["optimizers"]
            },
            "scaler": scaler,
            "loaders": [card["loaders"] for card in cards],
            "also": {
                name: {"by_rank": [card["also"][name] for card in cards]}
                if name in apart
                else {"same": state}
                for name, state in cards[0]["also"].items()
            },
        }

    # -- going on ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, saved: CheckpointReader, moment: Moment) -> int:
        """Sets weights, optimizer, scaler, generators and positions to what was saved; returns the steps.

        All ranks call this together. Raises ModelMismatch, BadCheckpoint, BadOption.
        """
        self._background.finish()
        shared_facts(self._group, lambda: self._restore(saved, moment))
        self._note(saved)
        return saved.values["steps"]

    def _restore(self, saved: CheckpointReader, moment: Moment) -> None:
        values, settings, optimizers = saved.values, self._settings, self._optimizers(moment)
        # What may be refused comes first: a run whose weights are half restored could not go on.
        if values.get("weights", True):
            self._held.insist_on_model(saved, str(saved.folder))
        for name, each in optimizers.items():
            if name in values["optimizers"]:
                each.insist_on_class(values["optimizers"][name])
        if values.get("weights", True):
            for part in self._held.parts():
                part.fill(saved)
        restore_modules(self._held.model, values.get("modules", {}), saved)
        self.attached.go_on(saved)
        if OWN in optimizers:
            self.attached.restore_optimizer(optimizers[OWN], OWN)
        if settings.scaler is not None and values["scaler"]:
            settings.scaler.load_state_dict(read(values["scaler"], saved.read))
        self._generators.restore(saved)
        self.attached.restore()

    def begin(self) -> None:
        """Notes the states of generators where the run begins; all code before its loop draws from there."""
        self._generators.begin()

    def begin_loop(self) -> None:
        """Begins the loop of a run: it draws on from the save, and what was not attached by now is told."""
        self.attached.warn_of_unclaimed()
        self._generators.loop.begin()

    @torch.no_grad()
    def load_weights(self, files: WeightFiles) -> None:
        """Sets this rank's weights to those of files with the model's names; all ranks call this together.

        Raises BadWeights.
        """

        def load() -> None:
            saved = FileTensors(files, self._held.model)
            for part in self._held.parts():
                if part.name.startswith(f"{MODEL}/"):
                    saved.insist_on_shape(part.name, part.at.shape)
                    part.fill(saved)

        shared_facts(self._group, load)

    def _note(self, saved: CheckpointReader) -> None:
        """Says on rank 0 what is not as it was when the checkpoint was saved."""
        before, now = Plan.of_document(saved.values["plan"]), self._settings.plan
        changed = first_difference(saved.values["code"], code_of(self._held.model, self._settings.loss_fn))
        if self._held.crew.global_rank:
            return
        if changed is not None:
            warn_user(f"{changed} has another code than when {saved.folder} was saved", ResumeNote)
        if layout_of(before) != layout_of(now):
            warn_user(
                f"going on at step {saved.values['steps']} from {saved.folder} with {layout_of(now)}; "
                f"it was saved with {layout_of(before)}",
                ResumeNote,
            )


def _chunks(parts: Iterable[HeldPart]) -> list[Chunk]:
    """Returns the chunks of those parts that this rank writes."""
    return [
        Chunk(part.name, part.at.shape, region.offsets, memory)
        for part in parts
        if part.at.writes
        for region, memory in part.regions()
    ]


def _whole_chunks(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """Returns the chunks of tensors that one rank writes as a whole."""
    return [Chunk(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in tensors.items()]


def insist_on_keep(keep: int | None) -> None:
    """Raises BadOption for what is no number of checkpoints, or would keep none."""
    if keep is not None:
        insist_on_whole_number(keep, "keep", 1, "keep=1, or None for all")


def insist_on_no_gradients(weights: Iterable[Tensor]) -> None:
    """Raises BadOption where gradients are accumulated for a step that is not yet taken."""
    grads = (weight.grad for weight in weights if weight.grad is not None)
    if any(bool(local_of(grad).count_nonzero()) for grad in grads):
        raise BadOption(
            "gradients are accumulated for a step that is not taken yet, and a checkpoint has none",
            next_step="engine.save(...) after engine.update(), or after a step without update=False",
        )


def insist_on_writable(root: Path) -> None:
    """Raises BadOption where a folder of checkpoints cannot be made, or not be written to."""
    there = next(each for each in (root.absolute(), *root.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadOption(
            f"checkpoints cannot be written to {root}",
            numbers=f"{there} is {'not writable' if there.is_dir() else 'a file'}",
            next_step="a folder that this user can write to",
        )


def newest_folder(root: str | Path) -> str | None:
    """Returns the newest complete checkpoint of a run that saves itself in `root`: a folder there, or a copy
    in memory (copies.py); `root` itself where it is a checkpoint, None where there is none.
    """
    path = Path(root)
    if path.exists() and not path.is_dir():
        raise BadOption(
            f"{path} is a file, and checkpoints are in a folder",
            next_step="resume=FOLDER; weights=FILE for weights alone",
        )
    if step_of(path) is not None and path.is_dir():
        return str(path)
    rule = copy_rule(root)
    roots = [path] if rule is None else [path, rule.folder]
    newest = [folders[0] for each in roots if each.is_dir() and (folders := published(each))]
    return str(max(newest, key=_steps_of)) if newest else None


def _steps_of(folder: Path) -> int:
    step = step_of(folder)
    return -1 if step is None else step[0]


def newest_checkpoint(root: str | Path, group: dist.ProcessGroup | None) -> CheckpointReader | None:
    """Returns the newest complete checkpoint in `root` that rank 0 sees, or `root` itself where it is one.

    None where there is none. All ranks call this together.
    """
    is_first = group is None or group.rank() == 0
    name = shared_facts(group, lambda: newest_folder(root) if is_first else None)[0]
    if name is None:
        return None
    readers = list[CheckpointReader]()
    shared_facts(group, lambda: readers.append(CheckpointReader(Path(name))))
    return readers[0]


def layout_of(plan: Plan) -> str:
    """Returns a plan's layout in a few words."""
    axes = ", ".join(filter(None, (f"pp {plan.axes.pp}", str(plan.axes.beyond_pp or ""))))
    return f"{axes}, {len(plan.stages)} stages, {plan.microbatches} microbatches, weights {plan.weights}"
