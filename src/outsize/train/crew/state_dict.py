"""Gathers the whole model's state from several ranks: as a dict, or streamed to safetensors.

Names, order and tied aliases are those of the plain `model.state_dict()`. All ranks walk the same list; each
tensor goes from the rank of its owning stage to rank 0, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BadOption, BadWeights
from outsize.program.weights.beside import freed_beside
from outsize.run.checkpoint.write import said
from outsize.run.collectives.tensor_parallel import full_of, local_of
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.weights.freed import FreedWeight, parts_of, structure_of
from outsize.run.weights.ownership import like, places
from outsize.run.weights.save import ShardWriter, shards
from outsize.train.crew.crew import Crew
from outsize.train.ranks.divided_weights import DividedWeights

Fetch = Callable[[Tensor], Tensor | None]


def gathered(
    model: nn.Module,
    homes: Mapping[str, int],
    crew: Crew,
    ranks: DividedWeights | None = None,
    parts: Mapping[str, nn.Module] | None = None,
) -> dict[str, Any]:
    """Returns copies on the CPU by name, on rank 0; an empty dict on other ranks. Tied names share one
    tensor.

    `parts`: modules of the model whose state dicts are wanted, each under its prefix (`centers.`); None:
    those of the model. They are asked for on rank 0 alone, while all values are there, since a module may
    name what it saves, or compute it, by the values that it has.
    """
    parts = {"": model} if parts is None else parts
    fetch, whole, own = fetcher(model, homes, crew, ranks), dict[int, Tensor](), dict[int, Tensor]()
    for tensor in {id(tensor): tensor for _, _, tensor in _persistent(parts)}.values():
        value = fetch(tensor)
        if value is not None and _has_all(tensor, value):
            own[id(tensor)] = value
        elif value is not None:
            whole[id(tensor)] = like(tensor, value if tensor.is_meta else value.clone())
    return _state_of(parts, whole, own) if crew.global_rank == 0 else {}


def _has_all(tensor: Tensor, values: Tensor) -> bool:
    """Returns whether this rank's tensor has all of the gathered values by itself."""
    is_own = not isinstance(tensor, FreedWeight) and local_of(tensor) is tensor
    return is_own and tensor.shape == values.shape


def _persistent(parts: Mapping[str, nn.Module]) -> list[tuple[Any, Any, Tensor]]:
    """Returns (table, key, tensor) of what state dicts have, in an order that all ranks share; what is beside
    weights, too.
    """
    in_tables = [
        (table, key, tensor)
        for part in parts.values()
        for module in part.modules()
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None and key not in module._non_persistent_buffers_set
    ]
    beside = [each for part in parts.values() for each in freed_beside(part)]
    return [*in_tables, *((each.table, each.key, each.tensor) for each in beside)]


def _state_of(
    parts: Mapping[str, nn.Module], whole: Mapping[int, Tensor], own: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Returns copies of the state dicts that the modules have once `whole` stands in for what has no values.

    Both have values by the id of their tensor; `own` are those of this rank, on the CPU.
    """
    places = _persistent(parts)
    state: dict[str, Any] = {}
    # `state_dict()` is the user's code where a module has its own, so the module has to hold the values while
    # it is asked. The tables are set directly: `setattr` would not take a plain tensor for a Parameter.
    try:
        for table, key, tensor in places:
            table[key] = whole.get(id(tensor), tensor)
        # Neither a destination nor a prefix: a `state_dict()` of somebody's own may not be made for them.
        for prefix, part in parts.items():
            state |= {f"{prefix}{name}": value for name, value in part.state_dict(keep_vars=True).items()}
    finally:
        for table, key, tensor in places:
            table[key] = tensor
    copies = {id(value): value.detach() for value in whole.values()}
    for value in (value for value in state.values() if isinstance(value, Tensor)):
        if id(value) not in copies:
            on_host = own[id(value)] if id(value) in own else value.detach().cpu()
            copies[id(value)] = on_host.clone() if value.device == on_host.device else on_host
    return {n: copies[id(v)] if isinstance(v, Tensor) else v for n, v in state.items()}


def save(
    model: nn.Module,
    homes: Mapping[str, int],
    crew: Crew,
    folder: Path,
    limit: int,
    ranks: DividedWeights | None = None,
) -> None:
    """Writes `folder` in the Hugging Face layout, at most `limit` bytes a file; tied names are written once.

    Rank 0 holds one tensor at a time. When it returns, the files are in place, on every rank.
    """
    if folder.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise BadOption(
            f"{folder} is a file's name; weights are saved to a folder",
            next_step=f"to='{folder.stem}', or torch.save(engine.weights.full_state_dict(), ...) for "
            "one file",
        )
    fetch, tensors = fetcher(model, homes, crew, ranks), _once(model)
    _refuse_wrappers(tensors)
    _insist_on_same_names(model, crew)
    parts = shards(tensors if ranks is None else ranks.shown(tensors), limit)
    write_from_ranks(folder, parts, lambda name: fetch(tensors[name]), crew)


def write_from_ranks(
    folder: Path,
    parts: Sequence[Mapping[str, Tensor]],
    value_of: Callable[[str], Tensor | None],
    crew: Crew,
) -> None:
    """Writes shards on rank 0, a tensor at a time; `value_of(name)` sends there what a rank has of a tensor.

    Every rank calls this, and waits until the files are in place, or none of them. Raises NotSaved.
    """
    writer = ShardWriter(folder, parts) if crew.global_rank == 0 else None
    try:
        for number, part in enumerate(parts):
            values = (value_of(name) for name in part)
            if writer is not None:
                with said(folder):
                    writer.write(number, cast(Iterable[Tensor], values))
            else:
                for _ in values:  # iterating sends each tensor to rank 0
                    pass
        if writer is not None:
            with said(folder):
                writer.publish()
    finally:
        if writer is not None:
            writer.discard()
    if crew.mesh is not None:
        dist.barrier(group=crew.mesh.group.host)  # every rank waits until rank 0 has written the files


def _insist_on_same_names(model: nn.Module, crew: Crew) -> None:
    """Raises BadOption on every rank where `model.state_dict()` has other names from rank to rank.

    A module may name what it saves by the values that it has, and ranks walk the list together.
    """
    if crew.mesh is None:
        return
    names = list(model.state_dict(keep_vars=True))
    of_ranks: list[list[str]] = all_gather_json(names, crew.mesh.group.host, "names of the state dict")
    other = next((rank for rank, found in enumerate(of_ranks) if found != of_ranks[0]), None)
    if other is not None:
        own = sorted({*of_ranks[0]} ^ {*of_ranks[other]})
        raise BadOption(
            f"state_dict() of {type(model).__name__} has other names on rank {other} than on rank 0",
            numbers=f"{len(own)} names, such as {own[0] if own else 'in another order'}: it depends on "
            "weights that one of the ranks does not have",
            next_step="torch.save(engine.weights.full_state_dict(), 'model.pt'), which asks rank 0 alone; "
            "engine.save(FOLDER) to go on later",
        )


def _refuse_wrappers(tensors: Mapping[str, Tensor]) -> None:
    """Raises BadWeights for tensors that are made of others, for which safetensors has no word."""
    made = {name: structure for name, t in tensors.items() if (structure := structure_of(t)) is not None}
    if made:
        first, structure = next(iter(made.items()))
        kind = "" if structure.kind is None else structure.kind.__name__
        raise BadWeights(
            f"{first} is a {kind}, which safetensors does not hold",
            numbers=f"{len(made)} such weights",
            next_step="torch.save(engine.weights.full_state_dict(), 'model.pt'); engine.save(FOLDER) to "
            "go on later",
        )


def _once(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of the state dict under their first names."""
    named_by_id: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            named_by_id.setdefault(id(tensor), (name, tensor))
    return dict(named_by_id.values())


def fetcher(model: nn.Module, homes: Mapping[str, int], crew: Crew, ranks: DividedWeights | None) -> Fetch:
    """Returns the function that gets all of a tensor to rank 0; every rank calls it for the same tensors."""
    beside = {id(found.tensor): found for found in freed_beside(model)}
    names = {key: found.owner for key, found in beside.items()}
    names |= {id(table[key]): name for table, key, name in places(model)}

    def fetch(tensor: Tensor) -> Tensor | None:
        name = names.get(id(tensor), "")
        structure = structure_of(tensor)
        if structure is not None:
            fetched = {path: crew.fetch(part, homes.get(name, 0)) for path, part in parts_of(tensor).items()}
            found = {path: part for path, part in fetched.items() if part is not None}
            return structure.built(found) if len(found) == len(fetched) else None
        value = crew.fetch(full_of(tensor), homes.get(name, 0))
        if value is None or ranks is None:
            return value
        if id(tensor) not in beside:
            return ranks.gathered(name, value)
        share = beside[id(tensor)].share
        return value if share is None else ranks.joined(name, value, share)

    return fetch
