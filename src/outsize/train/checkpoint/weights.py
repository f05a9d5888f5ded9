"""Names the weights of a rank, and where each lies in the whole one.

model/layers.0.weight      what the model's state_dict has, under the first of its names
buffers/rotary.inv_freq    buffers that it leaves out; they may have changed in training
loss/loss_fn.bank          weights and buffers of the loss
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, final
from zlib import crc32

import torch
from torch import Tensor, nn

from outsize.errors import BadWeights, ModelMismatch
from outsize.run.collectives.tensor_parallel import local_of
from outsize.run.weights.dequantized import DequantizedWeights, insist_on_values
from outsize.run.weights.freed import FreedWeight, parts_of
from outsize.run.weights.load import saved_names
from outsize.run.weights.ownership import places
from outsize.run.weights.placement import Placement
from outsize.run.weights.source import WeightSource
from outsize.train.checkpoint.regions import Division, Located, Region, Sizes, located
from outsize.train.crew.crew import Crew
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.world.model_facts import facts_of

MODEL: Final = "model"
BUFFERS: Final = "buffers"
LOSS: Final = "loss"
_SHOWN: Final = 3


class CheckpointTensors(Protocol):
    """The tensors of a checkpoint, as CheckpointReader has them."""

    folder: Path

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        ...

    def shape(self, name: str) -> Sizes:
        """Returns the shape of a whole tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        ...

    def read(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a tensor, or all of it, on the CPU."""
        ...


@final
@dataclass(frozen=True, slots=True)
class HeldPart:
    """Holds this rank's part of one named tensor; `at` says which part, and whether this rank writes it."""

    name: str
    tensor: Tensor
    at: Located

    def regions(self) -> Iterator[tuple[Region, Tensor]]:
        """Yields each region and the memory that it has here."""
        local = local_of(self.tensor.detach())
        return ((region, region.of(local)) for region in self.at.regions)

    def fill(self, saved: CheckpointTensors) -> None:
        """Copies the saved values of this rank's regions into its tensor."""
        for region, memory in self.regions():
            memory.copy_(saved.read(self.name, region.offsets, region.sizes))


@final
class HeldWeights:
    """The weights of one rank of a run: which it has, where they lie, and which of them it writes."""

    def __init__(
        self, model: nn.Module, crew: Crew, ownership: Ownership, ranks: DividedWeights | None
    ) -> None:
        self.model, self.crew, self._ownership, self._ranks = model, crew, ownership, ranks
        self._placed: dict[tuple[Any, ...], Located] = {}

    @property
    def rank(self) -> int:
        """Returns the number of this rank in the run."""
        return self.crew.global_rank

    @property
    def placement(self) -> Placement:
        """Returns who owns and who holds what; another one once a weight has found an owner."""
        return self._ownership.placement

    def is_own(self, name: str) -> bool:
        """Tells whether this rank owns a weight, or has its part of it."""
        return self._ownership.is_own(name)

    def division(self, name: str) -> Division | None:
        """Returns how ranks divide a weight; None where each has all of it."""
        share = None if self._ranks is None else self._ranks.share(name)
        return (
            None
            if share is None or self._ranks is None
            else Division(share, self._ranks.group_of(name).place)
        )

    def placed(self, name: str, tensor: Tensor, division: Division | None) -> Located:
        """Returns where a tensor that belongs to a weight lies in the whole one, and whether this rank writes
        it.
        """
        key = (name, tensor.shape, getattr(tensor, "placements", None), division is None)
        if key not in self._placed:
            self._placed[key] = self._placed_anew(name, tensor, division)
        return self._placed[key]

    def _placed_anew(self, name: str, tensor: Tensor, division: Division | None) -> Located:
        at = located(tensor, division)
        replicas = self.crew.replicas
        of_experts = division is not None and self._ownership.of_experts(name)
        holder = replicas.expert_holder if of_experts else replicas.holder
        first = at.writes if tensor is not local_of(tensor) else holder == 0
        alone = division is not None or self._ranks is None or self._ranks.first
        return replace(at, writes=first and alone and self._ownership.is_own(name))

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first names; those of other ranks without values."""
        return {name: table[key] for table, key, name in places(self.model) if table[key] is not None}

    def runs_module(self, name: str) -> bool:
        """Returns whether a module has weights or buffers of this rank, or none at all."""
        below = f"{name}." if name else ""
        tensors = [tensor for tensor in self.tensors() if tensor.startswith(below)]
        own = not tensors or any(map(self._ownership.is_own, tensors))
        return own and self.crew.replicas.holder == 0

    def parts(self) -> list[HeldPart]:
        """Returns the parts of all weights whose values are on this rank."""
        names = self.names()
        return [
            HeldPart(full, part, self.placed(name, part, self.division(name)))
            for name, tensor in self.tensors().items()
            if not isinstance(tensor, FreedWeight)
            for full, part in _parts(names[name], tensor).items()
        ]

    def names(self) -> dict[str, str]:
        """Maps each weight to the name of its tensor in a checkpoint."""
        saved, of_loss = saved_names(self.model), self._ownership.of_loss
        groups = {n: LOSS if n in of_loss else MODEL if n in saved else BUFFERS for n in self.tensors()}
        return {name: f"{group}/{name}" for name, group in groups.items()}

    def shapes(self) -> dict[str, Sizes]:
        """Returns the shape of each whole weight, under its name in a checkpoint; the same on all ranks."""
        names = self.names()
        return {
            full: located(part, self.division(name)).shape
            for name, tensor in self.tensors().items()
            for full, part in _parts(names[name], tensor).items()
        }

    def insist_on_model(self, saved: CheckpointTensors, where: str) -> None:
        """Raises ModelMismatch where the checkpoint is of a model with other names or shapes."""
        groups = (f"{MODEL}/", f"{BUFFERS}/", f"{LOSS}/")
        there = {name: tuple(saved.shape(name)) for name in saved.names() if name.startswith(groups)}
        here = self.shapes()
        wrong = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if wrong:
            pairs = ((name, _shape(there.get(name)), _shape(here.get(name))) for name in wrong[:_SHOWN])
            shown = "; ".join(
                f"{name.partition('/')[2]} {one} saved, {other} here" for name, one, other in pairs
            )
            error = ModelMismatch(
                f"the checkpoint {where} is of another model than this {type(self.model).__name__}",
                numbers=f"{len(wrong)} weights differ: {shown}",
                next_step="build the model as it was when it was saved, or resume= another folder",
            )
            raise error.on_all_ranks()


@final
class FileTensors:
    """The weights of safetensors files, as the tensors of a checkpoint are read; tied ones by any name."""

    def __init__(self, source: WeightSource, model: nn.Module) -> None:
        """Raises BadWeights where the files lack a weight of the model, or have codes in its place."""
        aliases = saved_names(model)
        known = {name for names in aliases.values() for name in names}
        files = DequantizedWeights(source, known)
        self.folder, self._files = files.path, files
        named = {first: [n for n in names if n in files] for first, names in aliases.items()}
        lacking = [first for first, found in named.items() if not found]
        if lacking:
            raise BadWeights(
                f"{files.path} lacks weights of {type(model).__name__}",
                numbers=f"{len(lacking)} missing: {', '.join(lacking[:_SHOWN])}",
                next_step="a folder of engine.weights.full_state_dict(to=FOLDER) or "
                "engine.weights.save_pretrained(FOLDER)",
            )
        held = {first: found[0] for first, found in named.items()}
        dtypes = {name: table[key].dtype for table, key, name in places(model)}
        insist_on_values(files, {name: dtypes[first] for first, name in held.items()}, known)
        self._names = {f"{MODEL}/{first}": name for first, name in held.items()}

    def insist_on_shape(self, name: str, shape: Sizes) -> None:
        """Raises BadWeights where a weight has another shape in the files."""
        if self.shape(name) != tuple(shape):
            raise BadWeights(
                f"{self._names[name]} has another shape in {self.folder} than in the model",
                numbers=f"{list(self.shape(name))} in the file, {list(shape)} in the model",
                next_step="build the model with the config of the weights",
            )

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        return self._names

    def shape(self, name: str) -> Sizes:
        """Returns the shape of a whole tensor."""
        return tuple(self._described(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self._described(name).dtype

    def _described(self, name: str) -> Tensor:
        return self._files.described([self._names[name]])[self._names[name]]

    def read(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a tensor, or all of it, on the CPU."""
        return self._files.box(self._names[name], offsets, sizes)


@final
class CheckpointWeights:
    """The weights of a checkpoint, as the files of a model on meta are read; each rank reads its own."""

    def __init__(self, saved: CheckpointTensors) -> None:
        self.path, self._saved = saved.folder, saved
        self._names = tuple(n.partition("/")[2] for n in saved.names() if n.startswith(f"{MODEL}/"))
        self._known = frozenset(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all weights."""
        return self._names

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns nothing: the weights are those of the model."""
        return ()

    def described(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Maps names to tensors on meta with their shapes and dtypes."""
        full = {name: f"{MODEL}/{name}" for name in names}
        return {
            name: torch.empty(self._saved.shape(at), dtype=self._saved.dtype(at), device="meta")
            for name, at in full.items()
        }

    def divides(self, name: str) -> bool:
        """Tells that a tensor is read at once, since its checksum is one of all its bytes."""
        return False

    def box(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a weight, or all of it, on the CPU."""
        return self._saved.read(f"{MODEL}/{name}", offsets, sizes)


def _parts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns a weight by its name in a checkpoint; one that is made of others (codes, scales) as these."""
    return {f"{name}#{path}" if path else name: part for path, part in parts_of(weight).items()}


def _shape(sizes: Sizes | None) -> str:
    return "none" if sizes is None else str(list(sizes))


def code_of(model: nn.Module, loss_fn: Any) -> dict[str, str]:
    """Returns a short digest of the code of each module's class and forward, and of the loss.

    What a run itself changes (a counter, the mode) is no part of it.
    """
    facts = facts_of(model, loss_fn)
    known = {name: text for name, text in facts.items() if name.rpartition(".")[2] in ("class", "forward")}
    known |= {name: text for name, text in facts.items() if name == "loss_fn"}
    return {name: f"{crc32(text.encode()):08x}" for name, text in known.items()}


def first_difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Returns the first name of which the code is another one; None where all of it is the same."""
    return next((name for name in {**saved, **here} if saved.get(name) != here.get(name)), None)
