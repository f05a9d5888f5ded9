"""Puts layers on a model for planning that stand for those which a library stores in few bits.

The layers are those that the library would swap: linear ones, without the head of a model of transformers
(its `get_keys_to_not_convert`), and without those that the user leaves out. Nothing is quantized and no
package that does it is needed; what a layer costs is in the record of its format
(policies/storage_formats.py). Oracle: tests/integrations/test_quantized_plans.py compares with the libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from outsize.capture.models.weight_sharing import sharing_weights
from outsize.errors import BadOption
from outsize.policies.storage_formats import StorageFormat, storage_format, storage_formats
from outsize.program.sharding.products import is_conv1d
from outsize.program.values.stored_linear import StoredLinear, store_stack

_STACKED: Final = 3  # dims of a stack of weights
_CONVOLUTION: Final = (nn.Conv1d, nn.ConvTranspose1d)  # whose weights have three dims, too
# So many names of layers are told where none is stored.
_SHOWN: Final = 8


def insist_on_format(name: str) -> StorageFormat:
    """Returns the record of a format. Raises BadOption for an unknown one."""
    found = storage_format(name)
    if found is None:
        raise BadOption(
            f"quantize={name!r} is no format of frozen weights",
            numbers=f"known: {', '.join(each.name for each in storage_formats())}",
            next_step="outsize.Quantize('nf4') (--quantize nf4)",
        )
    return found


def with_stored_layers(
    model: nn.Module, stored: StorageFormat, skipped: Sequence[str] = (), *, experts: bool = False
) -> nn.Module:
    """Returns a copy that shares the other weights, whose linear layers have frozen weights in a format; with
    `experts` stacks of weights too.

    `skipped` are names of layers, or their last parts ("lm_head"), that stay as they are. Raises BadOption
    where no layer is left, for a name in `skipped` that no layer has, and for stacks that nobody stores so.
    """
    stacks = _stacks(model, stored) if experts else []
    linear = {name: sides for name, module in model.named_modules() if (sides := _sides(module)) is not None}
    odd = [name for name in skipped if not any(_is_named(layer, name) for layer in linear)]
    kept = _kept_whole(model)
    chosen = {
        name: sides
        for name, sides in linear.items()
        if name not in kept and not any(_is_named(name, other) for other in skipped)
    }
    if odd or not (chosen or stacks):
        last = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise BadOption(
            f"no linear layer is called {odd[0]}"
            if odd
            else f"{type(model).__name__} has no layer to store so",
            numbers=f"linear layers of the model: {', '.join([*last][:_SHOWN]) or 'there are none'}",
            next_step="quantize without skip, or with names of layers" if odd else "leave out quantize",
        )
    copied = sharing_weights(model)
    for name, (made, taken) in chosen.items():
        stand_in = StoredLinear(copied.get_submodule(name), made, taken, stored)
        if not name:
            return stand_in
        parent, _, last = name.rpartition(".")
        copied.get_submodule(parent).register_module(last, stand_in)
    for name, key in stacks:
        if not any(_is_named(name, other) for other in skipped):
            store_stack(copied.get_submodule(name), key, stored)
    return copied


def _stacks(model: nn.Module, stored: StorageFormat) -> list[tuple[str, str]]:
    """Returns the modules and the names of stacks of weights: of three dims, of which no layer is made.

    Raises BadOption where there are none, and where the format's library stores none.
    """
    found = [
        (name, key)
        for name, module in model.named_modules()
        for key, weight in module._parameters.items()
        if weight is not None
        and weight.ndim == _STACKED
        and weight.is_floating_point()
        and key != "bias"
        and not isinstance(module, _CONVOLUTION)
    ]
    known = ", ".join(each.name for each in storage_formats() if each.stacks)
    if not stored.stacks or not found:
        raise BadOption(
            f"{stored.name} stores no stacks of experts that train beside adapters on every device"
            if found
            else f"{type(model).__name__} has no stack of experts",
            numbers=f"{len(found)} stacks of weights; formats that store them: {known}",
            next_step="--quantize nf4,experts=true" if found else "leave out experts",
        )
    return found


def _sides(module: nn.Module) -> tuple[int, int] | None:
    """Returns how many features a linear layer makes and takes; None for any other module."""
    if type(module) is nn.Linear:
        return module.out_features, module.in_features
    if is_conv1d(module):
        taken, made = module.get_parameter("weight").shape
        return made, taken
    return None


def _is_named(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def _kept_whole(model: Any) -> set[str]:
    """Returns the layers that transformers leaves as they are: the head, what is tied, and the last one."""
    if not hasattr(model, "get_output_embeddings"):
        return set()
    head = model.get_output_embeddings()
    named = model.named_modules(remove_duplicate=False)
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    tied = {name for names in uses.values() if len(names) > 1 for name in names}
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    return tied | {last} | {name for name, module in named if head is not None and module is head}
