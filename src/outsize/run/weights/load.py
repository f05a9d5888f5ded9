"""Loads a model on the meta device from safetensors: a rank reads what its stages use, tensor by tensor.

Names are those of the model's state_dict; a tied weight is found under any of its names. Values are copied
into the model's own dtype, as `load_state_dict` does. A buffer that no file holds (rotary frequencies,
position ids) is written by an initialiser of its module, before weights are loaded:

    transformers   `_init_weights(module)` of the nearest module around it
    torch, others  `module.reset_parameters()`

The initialiser must write every such buffer, or the buffer would hold uninitialised memory. Random values
are seeded by the module's name, so they are the same in every layout.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import BadWeights
from outsize.run.stage.rng import borrowed_generators, seeder
from outsize.run.weights.dequantized import DequantizedWeights, insist_on_values
from outsize.run.weights.freed import structure_of
from outsize.run.weights.ownership import like, places, replace
from outsize.run.weights.pretrained_names import PretrainedWeights, is_pretrained
from outsize.run.weights.source import TensorPart, WeightSource, copy_weight, few, have_one_value


def source_for(model: nn.Module, files: WeightSource) -> WeightSource:
    """Returns the weights of files under the model's names, and with values in the place of codes.

    Called while the model has all its weights, on meta or not. Raises BadWeights.
    """
    names = frozenset(model.state_dict(keep_vars=True))
    source = DequantizedWeights(files, names)
    return PretrainedWeights(source, model) if is_pretrained(model) else source


@torch.no_grad()
def load_weights(
    model: nn.Module,
    files: WeightSource,
    device: torch.device,
    foreign: set[str],
    part_of: Callable[[str], TensorPart | None] = lambda name: None,
) -> tuple[str, ...]:
    """Gives every weight that is not `foreign` its values on `device`; returns notes for the user.

    `part_of` returns a part where the model holds only a part of a weight; nothing else of it is read. Raises
    BadWeights for names that the files lack, other shapes, and buffers that no initialiser writes.
    """
    aliases = saved_names(model)
    source = {first: next((n for n in names if n in files), None) for first, names in aliases.items()}
    _insist_on_all(model, files, [first for first, name in source.items() if name is None])
    saved_name = {first: name for first, name in source.items() if name is not None and first not in foreign}
    make_buffers(model, foreign | saved_name.keys(), device)
    tensors = {name: tensor for table, key, name in places(model) if (tensor := table[key]) is not None}
    saved_name = {first: name for first, name in saved_name.items() if first in tensors}
    parts = {first: part_of(first) for first in saved_name}
    wanted = {first: _shape(tensors[first], parts[first]) for first in saved_name}
    described = files.described(saved_name.values())
    _insist_on_shapes(files, saved_name, wanted, described)
    pairs = {first: (described[name].dtype, tensors[first].dtype) for first, name in saved_name.items()}
    _refuse_wrappers({first: tensors[first] for first in saved_name})
    known = {name for names in aliases.values() for name in names}
    insist_on_values(files, {name: tensors[first].dtype for first, name in saved_name.items()}, known)
    dtypes = Counter(pair for pair in pairs.values() if pair[0] != pair[1])
    for first in saved_name:
        _insist_on_one_value(files, [name for name in aliases[first] if name in files])
    loaded = {}
    for first, name in saved_name.items():
        tensor = tensors[first]
        values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach()
        copy_weight(files, name, values, parts[first])
        if tensor.is_meta:
            loaded[id(tensor)] = like(tensor, values)
    replace(model, loaded)
    return (*files.notes, *_unknown(files, aliases), *(_converted(n, *pair) for pair, n in dtypes.items()))


def saved_names(model: nn.Module) -> dict[str, list[str]]:
    """Maps the first name of each tensor of the state dict to all its names; non-persistent buffers are
    absent.
    """
    known = {id(t): n for table, key, n in places(model) if (t := table[key]) is not None}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known:
            names.setdefault(known[id(tensor)], []).append(name)
    return names


def _insist_on_all(model: nn.Module, files: WeightSource, missing: list[str]) -> None:
    if not missing:
        return
    near = get_close_matches(missing[0], files.names, n=2, cutoff=0.5)
    near = near or [n for n in files.names if n.endswith(missing[0]) or missing[0].endswith(n)][:2]
    raise BadWeights(
        f"{files.path} lacks weights of {type(model).__name__}",
        numbers=f"{len(missing)} missing: {few(missing)}; nearest to the first: {few(near) or 'none'}",
        next_step="model.save_pretrained(FOLDER, save_original_format=False) writes the model's own names"
        if hasattr(model, "save_pretrained")
        else "build the class that was saved, or save its state_dict under the model's names",
    )


def _insist_on_shapes(
    files: WeightSource,
    saved_name: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
    described: Mapping[str, Tensor],
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in described.items()}
    wrong = [first for first, name in saved_name.items() if shapes[name] != wanted[first]]
    if wrong:
        first = wrong[0]
        raise BadWeights(
            f"{saved_name[first]} has another shape in {files.path} than in the model",
            numbers=f"{list(shapes[saved_name[first]])} in the file, {list(wanted[first])} in the model; "
            f"{len(wrong)} such weights",
            next_step="build the model with the config of the weights",
        )


def _refuse_wrappers(tensors: Mapping[str, Tensor]) -> None:
    """Raises BadWeights for weights of the model that are made of other tensors: which, no file says."""
    made = [name for name, tensor in tensors.items() if structure_of(tensor) is not None]
    if made:
        raise BadWeights(
            f"{made[0]} is quantized in the model ({type(tensors[made[0]]).__name__}), and files have values",
            numbers=f"{len(made)} such weights",
            next_step="load the values first, and quantize the model then; weight_files= is not needed",
        )


def _insist_on_one_value(files: WeightSource, names: list[str]) -> None:
    """Raises BadWeights for names of one tied weight that have different values in the files."""
    for other in names[1:]:
        if not have_one_value(files, names[0], other):
            raise BadWeights(
                f"{names[0]} and {other} are one weight in the model and differ in {files.path}",
                next_step="build the model without tying them (config.tie_word_embeddings=False)",
            )


def _shape(tensor: Tensor, part: TensorPart | None) -> tuple[int, ...]:
    return tuple(tensor.shape) if part is None else part.whole(tensor.shape)


def _unknown(files: WeightSource, aliases: Mapping[str, list[str]]) -> list[str]:
    known = {name for names in aliases.values() for name in names}
    extra = [name for name in files.names if name not in known]
    return [f"{files.path}: {len(extra)} names are not the model's: {few(extra)}"] if extra else []


def _converted(count: int, file: torch.dtype, model: torch.dtype) -> str:
    words = [str(dtype).removeprefix("torch.") for dtype in (file, model)]
    return f"{count} weights are {words[0]} in the file and were copied into the model's {words[1]}"


def make_buffers(model: nn.Module, others: set[str], device: torch.device) -> None:
    """Gives values on `device` to each buffer on meta that is not one of `others`. Raises BadWeights."""
    parameters = {id(p) for p in model.parameters()}
    wanted = {
        name: tensor
        for table, key, name in places(model)
        if (tensor := table[key]) is not None and tensor.is_meta
        if name not in others and id(tensor) not in parameters
    }
    if not wanted:
        return
    fresh = {name: torch.empty_like(tensor, device=device) for name, tensor in wanted.items()}
    replace(model, {id(tensor): fresh[name] for name, tensor in wanted.items()})
    for fqn in dict.fromkeys(name.rpartition(".")[0] for name in fresh):
        with borrowed_generators():
            seeder(zlib.crc32(fqn.encode()), 0, 0)(0)
            _make(model, fqn, fresh)


def _make(model: nn.Module, fqn: str, fresh: dict[str, Tensor]) -> None:
    """Tries the module's initialisers until one has written all its buffers."""
    left = [name for name in fresh if name.rpartition(".")[0] == fqn]
    failed = "it has neither an _init_weights around it nor a reset_parameters that writes the buffer"
    for initialise in _initialisers(model, fqn):
        try:
            initialise()
        except Exception as error:
            failed = f"its initialiser fails: {type(error).__name__}: {error}"
        left = [name for name in left if _is_untouched(model, name, fresh[name])]
        if not left:
            return
    raise BadWeights(
        f"buffer {left[0]} is on meta and no file holds it",
        numbers=f"in {type(model.get_submodule(fqn)).__name__}: {failed}",
        next_step="build parameters on meta only: accelerate.init_empty_weights(include_buffers=False)",
    )


def _initialisers(model: nn.Module, fqn: str) -> Iterator[Callable[[], Any]]:
    module, parts = model.get_submodule(fqn), fqn.split(".")
    around = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    methods = (getattr(model.get_submodule(name), "_init_weights", None) for name in around)
    nearest = next((function for function in methods if callable(function)), None)
    if nearest is not None:
        yield partial(nearest, module)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        yield reset
    # Some buffers (Falcon-H1's) are written only by the call for a module around theirs.
    if nearest is not None:
        yield from (partial(nearest, model.get_submodule(name)) for name in around[1:])


def _is_untouched(model: nn.Module, name: str, made: Tensor) -> bool:
    now = model.get_buffer(name)
    return now.is_meta or (now is made and made._version == 0)
