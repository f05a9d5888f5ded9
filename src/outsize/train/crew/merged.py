"""Merges adapters into the weights that they adapt, one weight at a time, into a folder that any class loads.

    base layer  codes and scales  ──► its values in 16 bits ──┐
    adapters    A, B  ──► get_delta_weight (the library's) ───┴─► sum ──► safetensors, under the plain names

A layer with adapters is one with `base_layer` and `get_delta_weight`, as peft's are. The values of a weight
of codes are asked of its own layer, which multiplies the rows of an identity: each sum has one term, so they
are exact, whatever the format. Rank 0 gets what a layer is made of from the ranks that have it, and holds no
more than one layer with its values. Oracle: tests/integrations/test_merged.py, peft's `merge_and_unload` of a
dequantized model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.program.weights.beside import beside_weights, freed_beside, is_of_codes, numbers_of
from outsize.run.weights.freed import FreedWeight
from outsize.run.weights.ownership import like
from outsize.run.weights.save import shards
from outsize.train.crew.crew import Crew
from outsize.train.crew.state_dict import write_from_ranks
from outsize.train.ranks.divided_weights import DividedWeights

Fetch = Callable[[Tensor], Tensor | None]
_PREFIX: Final = "base_model.model."
_BASE: Final = "base_layer"
# So many rows of the identity are multiplied at a time.
_ROWS: Final = 1024


@final
@dataclass(frozen=True)
class _Merged:
    """One tensor of the folder: of which module it is, under which key, and the layer that adapts it."""

    owner: nn.Module
    table: dict[str, Any]
    key: str
    adapter: Any
    shown: Tensor  # on meta: its shape and dtype in the folder

    @property
    def is_adapted(self) -> bool:
        """Tells whether adapters change it."""
        return self.adapter is not None and (self.key == "weight" or self.is_stored)

    @property
    def is_stored(self) -> bool:
        """Tells whether it is a weight of codes, of which the folder has the values."""
        return id(self.table[self.key]) in numbers_of(self.owner) or _is_wrapped(self.table[self.key])


def save_merged(
    model: nn.Module, fetch: Fetch, crew: Crew, folder: Path, limit: int, ranks: DividedWeights | None = None
) -> None:
    """Writes the plain model's weights, with adapters added, at most `limit` bytes a file; every rank calls
    this. Raises BadOption for adapters that are no sums, and BadWeights.
    """
    tensors = _merged(model, ranks)
    parts = shards({name: one.shown for name, one in tensors.items()}, limit)
    is_first = crew.global_rank == 0
    write_from_ranks(folder, parts, lambda name: _values(tensors[name], fetch, is_first=is_first), crew)


def save_plain_config(model: Any, folder: Path) -> None:
    """Writes the configs of the model below the adapters, without what says that weights are quantized."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in ("config", "generation_config"):
        config: Any = getattr(base, name, None)
        if config is None or not hasattr(config, "save_pretrained"):
            continue
        held = vars(config).pop("quantization_config", None)
        try:
            config.save_pretrained(str(folder))
        finally:
            if held is not None:
                config.quantization_config = held


def _merged(model: nn.Module, ranks: DividedWeights | None) -> dict[str, _Merged]:
    """Returns the tensors of the folder under their plain names; tied ones once."""
    modules, dtype = dict(model.named_modules()), _values_dtype(model)
    found: dict[str, _Merged] = {}
    known: set[int] = set()
    for fqn, module in modules.items():
        path = fqn.split(".") if fqn else []
        adapters = [(n, modules[".".join(path[:n])]) for n in range(len(path) + 1)]
        above = next(((n, m) for n, m in reversed(adapters) if _is_adapter(m)), None)
        if above is not None and path[above[0] : above[0] + 1] != [_BASE]:
            continue  # The adapter's own weights.
        _insist_on_sums(fqn, module)
        adapter = above[1] if above is not None and len(path) == above[0] + 1 else None
        plain = ".".join(part for part in path if part != _BASE).removeprefix(_PREFIX)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in known:
                    continue
                known.add(id(tensor))
                name = "weight" if id(tensor) in numbers_of(module) else key
                whole = tensor if ranks is None else ranks.shown({name: tensor})[name]
                shown = _shown(module, tensor, whole, dtype)
                found[f"{plain}.{name}".removeprefix(".")] = _Merged(module, table, key, adapter, shown)
    return found


def _is_adapter(module: nn.Module) -> bool:
    return _BASE in module._modules and hasattr(module, "get_delta_weight")


def _is_wrapped(tensor: Tensor) -> bool:
    structure = getattr(tensor, "_structure", None) if isinstance(tensor, FreedWeight) else None
    return structure is not None or (hasattr(type(tensor), "__tensor_flatten__") and not _is_shard(tensor))


def _is_shard(tensor: Tensor) -> bool:
    return hasattr(type(tensor), "to_local")


def _insist_on_sums(fqn: str, module: Any) -> None:
    """Raises BadOption for what adds no plain sum to a weight."""
    variant, copies = getattr(module, "lora_variant", None), getattr(module, "modules_to_save", None)
    if variant or (isinstance(copies, nn.ModuleDict) and len(copies)):
        raise BadOption(
            f"{fqn} has {'adapters that are no sum' if variant else 'modules_to_save'}: they are not merged",
            numbers=type(module).__name__,
            next_step="engine.weights.full_state_dict(), and peft's merge_and_unload",
        )


def _values_dtype(model: nn.Module) -> torch.dtype:
    """Returns the type in which most numbers of frozen weights are that are no codes: of 16 bits, if any."""
    counts = Counter[torch.dtype]()
    for parameter in model.parameters():
        if not (parameter.requires_grad or is_of_codes(parameter) or _is_wrapped(parameter)):
            counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else torch.bfloat16


def _shown(module: Any, tensor: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    if id(tensor) in numbers_of(module):
        return torch.empty(module.out_features, module.in_features, dtype=dtype, device="meta")
    return torch.empty(tuple(whole.shape), dtype=tensor.dtype, device="meta")


def _values(one: _Merged, fetch: Fetch, *, is_first: bool) -> Tensor | None:
    """Returns what the folder has of a tensor, on rank 0; each rank sends what it has of it."""
    modules = [one.owner, *([] if not one.is_adapted else _parts_of(one.adapter))]
    own = [one.owner._parameters, one.owner._buffers]
    whole: list[tuple[Any, Any, Tensor, Tensor | None]] = [
        (table, key, tensor, fetch(tensor))
        for module in modules
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None and (table is one.table or one.is_stored or one.is_adapted)
    ]
    if one.is_stored:
        for found in freed_beside(one.owner):
            own.append(found.table)
            whole.append((found.table, found.key, found.tensor, fetch(found.tensor)))
    if not is_first:
        return None
    # What is beside codes may be on an accelerator, where the layer multiplies then; all else is on the CPU.
    places = (found.tensor.device for found in beside_weights(one.owner) if not found.tensor.is_meta)
    beside = next(places, torch.device("cpu"))
    with torch.no_grad():
        try:
            for table, key, tensor, value in whole:
                if value is not None:
                    is_own = any(table is each for each in own)
                    value = value.to(beside) if is_own and one.is_stored else value
                    table[key] = like(tensor, value) if _has_none(tensor, value) else tensor
            values = _of_layer(one.owner, one.shown) if one.is_stored else one.table[one.key].detach()
            if not one.is_adapted:
                return values.to(one.shown.dtype)
            values = values.to(one.shown.dtype).clone()
            for name in one.adapter.active_adapters:
                if name in one.adapter.lora_A or name in getattr(one.adapter, "lora_embedding_A", ()):
                    values += _delta(one, name)
            return values
        finally:
            for table, key, tensor, _ in whole:
                table[key] = tensor


def _delta(one: _Merged, name: str) -> Tensor:
    """Returns what an adapter adds to a weight: as peft computes it for a layer of 16 bits on a CPU, where
    the layer is stored in few bits, since peft's classes for these round otherwise.
    """
    adapter = one.adapter
    if not one.is_stored:
        return adapter.get_delta_weight(name)
    first, second = adapter.lora_A[name].weight, adapter.lora_B[name].weight
    return ((second.float() @ first.float()) * adapter.scaling[name]).to(first.dtype)


def _has_none(tensor: Tensor, value: Tensor) -> bool:
    """Tells whether this rank's tensor lacks values that have been fetched."""
    is_part = _is_shard(tensor) or tensor.shape != value.shape
    return isinstance(tensor, FreedWeight) or is_part or tensor.device != value.device


def _parts_of(adapter: nn.Module) -> list[nn.Module]:
    """Returns the modules of an adapter but its base layer."""
    return [m for name, child in adapter._modules.items() if name != _BASE and child for m in child.modules()]


def _of_layer(layer: Any, shown: Tensor) -> Tensor:
    """Returns the values of a layer's weight, by the rows of an identity that it multiplies."""
    made, taken = shown.shape
    held: Any = layer._parameters if "bias" in layer._parameters else vars(layer)
    bias: Any = held.get("bias")
    values = torch.empty(made, taken, dtype=shown.dtype)
    device, trains = next(layer.parameters()).device, layer.training
    layer.train(True)  # Some libraries have less exact kernels for inference.
    try:
        if bias is not None:
            held["bias"] = None
        for first in range(0, taken, _ROWS):
            rows = torch.zeros(min(_ROWS, taken - first), taken, dtype=shown.dtype)
            rows[torch.arange(len(rows)), first + torch.arange(len(rows))] = 1
            values[:, first : first + len(rows)] = layer(rows.to(device)).t().cpu()
    finally:
        layer.train(trains)
        if bias is not None:
            held["bias"] = bias
    return values
