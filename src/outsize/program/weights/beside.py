"""Finds the tensors that a library keeps beside a frozen weight of codes: scales, zero points, tables.

    bitsandbytes   weight.quant_state.absmax, .state2.absmax, .code, .offset; weight.SCB, layer.state.SCB
    hqq            layer.meta["scale"], layer.meta["zero"]
    others         buffers of the layer, or parts of a wrapper tensor, which are known by their tables

They are in no table of a module, and belong to their weight: they are counted with it, freed with it where
another rank has it, and gathered with it. Looked through are the attributes of a frozen parameter, and those
of a layer with a parameter of codes; objects, dicts and lists in them, and no module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from outsize.errors import BadOption
from outsize.program.values.wrapper_tensors import is_wrapper

_TABLES: Final = frozenset(("_parameters", "_buffers", "_modules"))
_DEPTH: Final = 4
SHARES: Final = "_outsize_shares"
"""Names what says, in an object of a library's, how ranks divide its tensors."""
# The numbers of a table of codes of 8 bits.
_TABLE: Final = 256


@final
class Beside(NamedTuple):
    """A tensor beside a weight: `table[key]` in the object that holds it, and the weight's first name.

    `is_read`: the layer's own Python may have read it while it was recorded, so another tensor in its place
    would be another model. `share`: how ranks divide it that divide the weight; None where each has it all.
    """

    table: Any
    key: Any
    owner: str
    tensor: Tensor
    is_read: bool
    share: Any = None

    def put(self, tensor: Tensor) -> None:
        """Puts another tensor in its place."""
        self.table[self.key] = tensor


def beside_weights(model: nn.Module) -> Iterator[Beside]:
    """Yields each place of a tensor beside a weight of a model, in an order that all ranks share."""
    known = {id(t) for m in model.modules() for table in (m._parameters, m._buffers) for t in table.values()}
    seen, names = set[int](), dict[int, str]()
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is None or weight.requires_grad:
                continue
            name = names.setdefault(id(weight), f"{prefix}.{key}" if prefix else key)
            roots = [] if is_wrapper(weight) else [(vars(weight), False)]
            makers = module.children() if isinstance(module, ParametrizationList) else ()
            roots += [(vars(each), True) for each in (module, *makers)] if is_of_codes(weight) else []
            for root, is_layer in roots:
                for table, place, tensor, in_object in _tensors_in(root, seen, known, _DEPTH):
                    share = table.get(SHARES, {}).get(place) if isinstance(table, dict) else None
                    yield Beside(table, place, name, tensor, is_layer and in_object, share)


def freed_beside(model: nn.Module) -> Iterator[Beside]:
    """Yields those that a rank frees with their weights, in an order that all ranks share.

    Tables and single numbers stay: they are small, and libraries read them in Python where the state dict is
    asked for, on every rank (the mean of bitsandbytes' scales, for example).
    """
    return (
        each
        for each in beside_weights(model)
        if (each.tensor.numel() > _TABLE or each.share is not None) and not each.is_read
    )


def is_of_codes(weight: Tensor) -> bool:
    """Tells whether a weight is made of codes: integers, or numbers of one byte."""
    return not weight.dtype.is_floating_point or weight.dtype.itemsize == 1


def beside_bytes(model: nn.Module) -> dict[str, int]:
    """Maps weights to the bytes beside them; memory of the weight itself, or of another one, counts once."""
    memories = {_memory(t) for t in (*model.parameters(), *model.buffers())}
    sizes: dict[str, int] = {}
    for found in beside_weights(model):
        if _memory(found.tensor) not in memories:
            memories.add(_memory(found.tensor))
            sizes[found.owner] = sizes.get(found.owner, 0) + found.tensor.nbytes
    return sizes


def _memory(tensor: Tensor) -> int:
    """Returns what tensors over one memory have in common; one without memory is alone."""
    return -id(tensor) if tensor.is_meta or is_wrapper(tensor) else tensor.untyped_storage()._cdata


def _tensors_in(
    table: Any, seen: set[int], known: set[int], depth: int, in_object: bool = False
) -> Iterator[tuple[Any, Any, Tensor, bool]]:
    """Yields (table, key, tensor, in_object) of what a dict or a list holds, and objects in it.

    Guards of a recording compare what is in objects of a layer, but for containers and dataclasses.
    """
    if id(table) in seen:
        return
    seen.add(id(table))
    for key, value in [*(table.items() if isinstance(table, dict) else enumerate(table))]:
        if isinstance(value, Tensor):
            if id(value) not in known:
                yield table, key, value, in_object
        elif depth and key not in _TABLES:
            inner = _table_of(value)
            if inner is not None:
                below = in_object or not (inner is value or is_dataclass(value))
                yield from _tensors_in(inner, seen, known, depth - 1, below)


def _table_of(value: Any) -> dict[Any, Any] | list[Any] | None:
    """Returns the dict or list in which a value holds others; None where nobody may look through it."""
    if isinstance(value, dict | list):
        return value
    closed = isinstance(value, nn.Module | type | torch.Generator) or callable(value)
    return None if closed else getattr(value, "__dict__", None)


def numbers_of(model: nn.Module) -> dict[int, int]:
    """Maps weights of codes, by their ids, to how many numbers they stand for, where their layer says it."""
    found: dict[int, int] = {}
    for module in model.modules():
        sides = [vars(module).get(name) for name in ("in_features", "out_features")]
        taken, made = (side if isinstance(side, int) else 0 for side in sides)
        own = [weight for weight in module._parameters.values() if weight is not None]
        if taken * made and own and is_of_codes(own[0]):
            found.setdefault(id(own[0]), taken * made)
        elif isinstance(module, ParametrizationList) and own and is_of_codes(own[0]):
            found.setdefault(
                id(own[0]), max(map(_values_made, module.children()), default=0) or own[0].numel()
            )
    return found


def _values_made(maker: nn.Module) -> int:
    """Returns how many numbers a parametrization makes of codes, as it or an object of it says by a shape."""
    shapes = (
        getattr(each, "shape", None)
        for each in (maker, *vars(maker).values())
        if not isinstance(each, Tensor)
    )
    return max((shape.numel() for shape in shapes if isinstance(shape, torch.Size)), default=0)


def stored_in_few_bits(model: nn.Module) -> list[str]:
    """Returns the names of weights of codes, whose layer says for how many numbers they stand, and of frozen
    ones that are made of other tensors.
    """
    numbers = numbers_of(model)
    named = model.named_parameters()
    return [n for n, w in named if id(w) in numbers or (is_wrapper(w) and not w.requires_grad)]


def insist_on_codes_once(model: nn.Module, names: Collection[str]) -> None:
    """Raises BadOption where a layer keeps the codes of one of these weights a second time: it computes with
    those, so that shards of the weight would free nothing, and the layer would not know them.
    """
    for found in beside_weights(model):
        weight = model.get_parameter(found.owner)
        if found.owner in names and (found.tensor.shape, found.tensor.dtype) == (weight.shape, weight.dtype):
            raise BadOption(
                f"dp_shard would divide {found.owner}, whose layer keeps the same codes as {found.key!r}",
                numbers=f"{weight.nbytes:,} bytes of {str(weight.dtype).removeprefix('torch.')}",
                next_step="stages (--stages 2) or dp_replicate, which keep weights whole, or nf4 instead",
            )
