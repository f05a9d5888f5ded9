"""The whole model's state from weights that live on several ranks: as a dict, or streamed to safetensors.

Names, order and tied aliases are those of the plain `model.state_dict()`. All ranks walk the same list; each
tensor comes from the rank of its home stage to rank 0, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.spmd import full_of
from outsize.run.weight_shards import ShardWriter, shards
from outsize.run.weights import places
from outsize.train.crew import Crew
from outsize.train.tensor_ranks import TensorRanks

Fetch = Callable[[Tensor], Tensor | None]


def gathered(
    model: nn.Module, homes: Mapping[str, int], crew: Crew, ranks: TensorRanks | None = None
) -> dict[str, Tensor]:
    """Name -> copy on the CPU, on rank 0; an empty dict on the others. Tied names share one tensor."""
    fetch, found, met = _fetcher(model, homes, crew, ranks), {}, dict[int, Tensor | None]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):  # a module's extra state
            found[name] = tensor
            continue
        if id(tensor) not in met:
            value = fetch(tensor)
            met[id(tensor)] = value.clone() if value is not None and not tensor.is_meta else value
        found[name] = met[id(tensor)]
    return found if crew.global_rank == 0 else {}


def save(
    model: nn.Module,
    homes: Mapping[str, int],
    crew: Crew,
    folder: Path,
    limit: int,
    ranks: TensorRanks | None = None,
) -> None:
    """Write `folder` in the Hugging Face layout, at most `limit` bytes a file; tied names are written once.

    Rank 0 holds one tensor at a time. On return the files are in place, on every rank.
    """
    if folder.suffix == ".safetensors":
        raise BadOption(f"{folder} is a file's name; weights are saved to a folder", next_step=folder.stem)
    fetch, tensors = _fetcher(model, homes, crew, ranks), _once(model)
    parts = shards(tensors if ranks is None else ranks.shown(tensors), limit)
    writer = ShardWriter(folder, parts) if crew.global_rank == 0 else None
    try:
        for number, part in enumerate(parts):
            values = (fetch(tensors[name]) for name in part)
            if writer is not None:
                writer.write(number, cast(Iterable[Tensor], values))
            else:
                for _ in values:  # each is sent
                    pass
        if writer is not None:
            writer.publish()
    finally:
        if writer is not None:
            writer.discard()
    if crew.mesh is not None:
        dist.barrier(group=crew.mesh.group)  # nobody goes on before rank 0 has finished


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict under their first names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _fetcher(model: nn.Module, homes: Mapping[str, int], crew: Crew, ranks: TensorRanks | None) -> Fetch:
    names = {id(table[key]): name for table, key, name in places(model)}

    def fetch(tensor: Tensor) -> Tensor | None:
        name = names.get(id(tensor), "")
        found = crew.fetch(full_of(tensor), homes.get(name, 0))
        return found if found is None or ranks is None else ranks.gathered(name, found)

    return fetch
