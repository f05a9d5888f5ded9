"""Defines AttachedObjects: what the user attaches to a run, how it is saved, and when it is set again.

    engine.state.attach(scheduler=scheduler)     an object: also/all/..., or also/RANK/... where ranks differ
    engine.state.attach(second=optimizer)        another optimizer: optimizers/second/...
    engine.state.batches(loader)                 a loader: its position, and its generators

An object may be attached before the run goes on from a checkpoint or after. It gets its saved state as soon
as both are there, so the order of the user's lines does not count; what nobody has attached when the loop
begins is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from outsize.errors import BadOption
from outsize.program.source_line import warn_user
from outsize.program.values.tensor_bits import flat_bytes
from outsize.run.checkpoint.read import CheckpointReader
from outsize.train.checkpoint.loop.generators import RANDOM, RunGenerators
from outsize.train.checkpoint.loop.loader_states import CountedLoader
from outsize.train.checkpoint.optimizers.optimizer_states import NamedOptimizer
from outsize.train.checkpoint.plain_values import read, written
from outsize.train.checkpoint.weights import HeldWeights

ALSO: Final = "also"
OWN: Final = "optimizer"
A_LOADER: Final = "engine.state.batches(DataLoader(dataset, batch_size=32))"
Facts = dict[str, Any]


@final
class ResumeNote(UserWarning):
    """Says once how a run goes on from a checkpoint: from the beginning, or by another plan."""


@final
class AttachedObjects:
    """The user's objects and loaders of a run on one rank, in the order in which they were met.

    `steps` tells how many steps the run has taken.
    """

    def __init__(self, held: HeldWeights, generators: RunGenerators, steps: Callable[[], int]) -> None:
        self.objects: dict[str, Any] = {}
        self.loaders: list[CountedLoader] = []
        self._held, self._generators, self._steps = held, generators, steps
        self._resumed: CheckpointReader | None = None
        self._unclaimed: list[str] = []
        self._restored: list[tuple[NamedOptimizer, Facts]] = []

    @property
    def _ranks(self) -> int:
        mesh = self._held.crew.mesh
        return 1 if mesh is None else mesh.group.host.size()

    # -- saving ------------------------------------------------------------------------------------------

    def optimizers(self) -> dict[str, NamedOptimizer]:
        """Returns the optimizers among the objects, under their names in a checkpoint."""
        found = {f"{OWN}s/{name}": each for name, each in self.objects.items() if isinstance(each, Optimizer)}
        return {name: NamedOptimizer(each, self._held, name) for name, each in found.items()}

    def states(self, tensors: dict[str, Tensor]) -> Facts:
        """Returns the states of other objects as JSON; their tensors are added to `tensors`."""
        others = {name: each for name, each in self.objects.items() if not isinstance(each, Optimizer)}
        return {name: written(each.state_dict(), name, tensors) for name, each in others.items()}

    def positions(self, tensors: dict[str, Tensor]) -> list[Any]:
        """Returns the positions of loaders as JSON; their tensors are added to `tensors`."""
        return [
            written(loader.state_dict(), f"loader{number}", tensors)
            for number, loader in enumerate(self.loaders)
        ]

    def named(self, tensors: Mapping[str, Tensor], apart: Sequence[str]) -> dict[str, Tensor]:
        """Returns what this rank writes of `tensors`, and of loaders' generators, under their names.

        Objects in `apart` have another state on each rank; what is equal everywhere rank 0 writes.
        """
        rank, named = self._held.crew.global_rank, dict[str, Tensor]()
        for number, loader in enumerate(self.loaders):
            named |= {f"{RANDOM}/{rank}/loader{number}/{n}": t for n, t in loader.generators().items()}
        for name, tensor in tensors.items():
            is_apart = _owner(name) not in self.objects or _owner(name) in apart
            if is_apart or rank == 0:
                named[_stored_name(name, rank if is_apart else None)] = tensor
        return named

    # -- going on ----------------------------------------------------------------------------------------

    def go_on(self, saved: CheckpointReader) -> None:
        """Takes the checkpoint from which the run goes on; what is attached from now on finds its state."""
        self._resumed, self._restored = saved, []
        others = (name.partition("/")[2] for name in saved.values["optimizers"] if name != OWN)
        self._unclaimed = [*saved.values["also"], *others]

    def restore(self) -> None:
        """Sets what was attached before to its saved state."""
        for number, _ in enumerate(self.loaders):
            self._place_loader(number)
        for name in self.objects:
            self._restore_object(name)

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Saves these objects too; where the run goes on from a checkpoint, sets them to their saved states.

        Raises BadOption for an object without `state_dict` and `load_state_dict`.
        """
        for name, each in objects.items():
            if isinstance(each, type) or not (
                hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
            ):
                raise BadOption(
                    f"{name} is a {type(each).__name__}, whose state cannot be saved",
                    next_step="an object with state_dict() and load_state_dict(state)",
                )
            self.objects[name] = each
            if self._resumed is not None:
                self._restore_object(name)

    def warn_of_unclaimed(self) -> None:
        """Says once, at the first step, which objects of the checkpoint were not attached again."""
        if self._unclaimed and self._held.crew.global_rank == 0:
            names = ", ".join(f"{name}=..." for name in self._unclaimed)
            warn_user(
                f"the checkpoint has more than was asked for: engine.state.attach({names})",
                ResumeNote,
            )
        self._unclaimed = []

    def counted(self, loader: Iterable[Any], *, trial: bool = True) -> CountedLoader:
        """Returns the loader with its position, which is saved; the same one for the same loader.

        A `trial` finds out whether a run can go on within its batches. Raises BadOption for what has none.
        """
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise BadOption(f"a {type(loader).__name__} gives no batches", next_step=A_LOADER)
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise BadOption(f"a {type(loader).__name__} gives samples, not batches", next_step=A_LOADER)
        for known in self.loaders:
            if known.loader is loader:
                return known
        self.loaders.append(CountedLoader(loader, self._steps, self._generators.loop, trial=trial))
        if self._resumed is not None:
            self._place_loader(len(self.loaders) - 1)
        return self.loaders[-1]

    def restore_optimizer(self, optimizer: NamedOptimizer, name: str) -> None:
        """Sets an optimizer, named as in a checkpoint, to its saved state; one without any starts anew."""
        assert self._resumed is not None
        saved = self._resumed.values["optimizers"]
        if name in saved:
            optimizer.restore(saved[name], self._resumed)
            self._restored.append((optimizer, saved[name]))
        elif self._held.crew.global_rank == 0:
            own = "" if name == OWN else f" {name.partition('/')[2]!r}"
            there = ", ".join(each["class"] for each in saved.values()) or "none"
            warn_user(
                f"{self._resumed.folder} has no optimizer{own}, so {optimizer.kind} starts anew (step "
                f"{self._resumed.step}; optimizers: {there}). Next: "
                f"weight_files={str(self._resumed.folder)!r} "
                "without resume=, if that is meant",
                ResumeNote,
            )

    def _restore_object(self, name: str) -> None:
        each, saved = self.objects[name], self._resumed
        assert saved is not None
        self._unclaimed = [other for other in self._unclaimed if other != name]
        if isinstance(each, Optimizer):
            self.restore_optimizer(NamedOptimizer(each, self._held, f"{OWN}s/{name}"), f"{OWN}s/{name}")
            return
        state = saved.values["also"].get(name)
        if state is None:
            warn_user(f"{saved.folder} has no {name!r}; it starts anew", ResumeNote)
            return
        rank, ranks = self._held.crew.global_rank, 0 if "same" in state else len(state["by_rank"])
        if ranks and ranks != self._ranks:
            raise BadOption(
                f"{name!r} had a state of its own on each rank, so it goes on with as many ranks only",
                numbers=f"{ranks} ranks saved it, there are {self._ranks} now",
                next_step=f"run with {ranks} ranks, or leave {name}= out of attach()",
            )
        text = state["by_rank"][rank] if ranks else state["same"]
        each.load_state_dict(
            read(text, lambda part: saved.read(_stored_name(part, rank if ranks else None)).clone())
        )
        # What a scheduler's constructor has changed, loading its state does not undo.
        for optimizer, facts in self._restored:
            optimizer.restore_groups(facts)

    def _place_loader(self, number: int) -> None:
        saved, rank = self._resumed, self._held.crew.global_rank
        assert saved is not None
        by_rank, loader = saved.values["loaders"], self.loaders[number]
        source = rank if rank < len(by_rank) else 0
        positions = by_rank[source]
        if number < len(positions):
            position = read(positions[number], lambda name: saved.read(_stored_name(name, source)).clone())
            loader.load_state_dict(position, self._generators.saved(saved, f"loader{number}/"))


def _owner(tensor: str) -> str:
    """Returns the name of the attached object that a tensor is of."""
    return tensor.partition("#")[0].partition(".")[0]


def _stored_name(tensor: str, rank: int | None) -> str:
    return f"{ALSO}/{'all' if rank is None else rank}/{tensor}"


def digest(name: str, state: Any, tensors: Mapping[str, Tensor]) -> str:
    """Returns a text that is equal where an object has the same state."""
    own = (tensor for key, tensor in tensors.items() if _owner(key) == name)
    sums = [crc32(flat_bytes(t.cpu()).numpy().tobytes()) for t in own]
    return f"{crc32(json.dumps(state, sort_keys=True).encode()):08x} {sums}"
