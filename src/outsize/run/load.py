"""Load a model on the meta device from safetensors: a rank reads what its own stages use, tensor by tensor.

Names are those of the model's state_dict; a tied weight is found under any of its names. Values are copied
into the model's own dtype, as `load_state_dict` does. A buffer that no file holds (rotary frequencies) is
made by its module's own initialiser (fresh_buffers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from outsize.errors import BadWeights
from outsize.run.fresh_buffers import make_buffers
from outsize.run.weight_files import Part, WeightFiles
from outsize.run.weights import like, places, replace

_SHOWN = 3


@torch.no_grad()
def load_weights(
    model: nn.Module,
    files: WeightFiles,
    device: torch.device,
    foreign: set[str],
    part_of: Callable[[str], Part | None] = lambda name: None,
) -> tuple[str, ...]:
    """Give every weight that is not `foreign` its values on `device`; returns notes for the user.

    `part_of` says of which weights the model holds a part only; no more of those is read.
    Raises BadWeights for names that the files lack, other shapes, and buffers that nobody can make.
    """
    aliases = saved_names(model)
    source = {first: next((n for n in names if n in files), None) for first, names in aliases.items()}
    _insist_on_all(model, files, [first for first, found in source.items() if found is None])
    own = {first: name for first, name in source.items() if name is not None and first not in foreign}
    make_buffers(model, foreign | own.keys(), device)
    tensors = {name: tensor for table, key, name in places(model) if (tensor := table[key]) is not None}
    own = {first: name for first, name in own.items() if first in tensors}
    parts = {first: part_of(first) for first in own}
    _insist_on_shapes(files, own, {first: _shape(tensors[first], parts[first]) for first in own})
    loaded, dtypes = {}, Counter[tuple[str, str]]()
    for first, name in own.items():
        tensor = tensors[first]
        values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach()
        other = files.read(name, values, parts[first])
        if other is not None:
            dtypes[other, str(tensor.dtype).removeprefix("torch.")] += 1
        if tensor.is_meta:
            loaded[id(tensor)] = like(tensor, values)
    replace(model, loaded)
    return (*_unknown(files, aliases), *(_converted(n, *pair) for pair, n in dtypes.items()))


def saved_names(model: nn.Module) -> dict[str, list[str]]:
    """First name -> all names of each tensor of the state dict (non-persistent buffers are not in it)."""
    known = {id(t): n for table, key, n in places(model) if (t := table[key]) is not None}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known:
            names.setdefault(known[id(tensor)], []).append(name)
    return names


def _insist_on_all(model: nn.Module, files: WeightFiles, missing: list[str]) -> None:
    if not missing:
        return
    near = get_close_matches(missing[0], files.names, n=2, cutoff=0.5)
    near = near or [n for n in files.names if n.endswith(missing[0]) or missing[0].endswith(n)][:2]
    raise BadWeights(
        f"{files.path} lacks weights of {type(model).__name__}",
        numbers=f"{len(missing)} missing: {_few(missing)}; nearest to the first: {_few(near) or 'none'}",
        next_step="model.save_pretrained(FOLDER, save_original_format=False) writes the model's own names"
        if hasattr(model, "save_pretrained")
        else "build the class that was saved, or save its state_dict under the model's names",
    )


def _insist_on_shapes(
    files: WeightFiles, own: Mapping[str, str], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    shapes = files.shapes(own.values())
    wrong = [first for first, name in own.items() if shapes[name] != wanted[first]]
    if wrong:
        first = wrong[0]
        raise BadWeights(
            f"{own[first]} has another shape in {files.path} than in the model",
            numbers=f"{list(shapes[own[first]])} in the file, {list(wanted[first])} in the model; "
            f"{len(wrong)} such weights",
            next_step="build the model with the config of the weights",
        )


def _shape(tensor: Tensor, part: Part | None) -> tuple[int, ...]:
    return tuple(tensor.shape) if part is None else part.whole(tensor.shape)


def _unknown(files: WeightFiles, aliases: Mapping[str, list[str]]) -> list[str]:
    known = {name for names in aliases.values() for name in names}
    extra = [name for name in files.names if name not in known]
    return [f"{files.path}: {len(extra)} names are not the model's: {_few(extra)}"] if extra else []


def _converted(count: int, file: str, model: str) -> str:
    return f"{count} weights are {file} in the file and were copied into the model's {model}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
