"""Reads weights as the model's own library renames and merges them while it loads.

Files of transformers keep the names that a model had when it was published: experts one by one where the
class has them stacked, a body without the prefix of the class around it. The library's loader knows how they
become the weights of today's class, so it is run: on a copy of the model without values, with deferred
tensors in the place of those of the files. What it leaves in the copy says from which boxes of the files each
weight is made.

    file  experts.0.w1.weight, experts.1.w1.weight, ...  ->  mlp.experts.gate_up_proj  (stacked, concatenated)
    file  h.0.attn.c_attn.weight                         ->  transformer.h.0.attn.c_attn.weight
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.errors import BadWeights
from outsize.run.weights.deferred import DeferredTensor, ReadBox, deferred_file
from outsize.run.weights.ownership import like, places
from outsize.run.weights.source import Sizes, WeightSource


@final
class PretrainedWeights:
    """Other weights under the names of a model of transformers, as its loader reads them.

    Raises BadWeights where the loader fails, or finds other shapes.
    """

    def __init__(self, source: WeightSource, model: nn.Module) -> None:
        self.path, self._source = source.path, source
        described = source.described(source.names)
        tensors = {name: _deferred(source, name, twin) for name, twin in described.items()}
        made = _loaded(model, tensors, source)
        self._made = {name: t for name, t in made.items() if isinstance(t, DeferredTensor)}
        read = frozenset().union(*(t.leaves for t in self._made.values()))
        self._others = tuple(name for name in source.names if name not in read)

    def __contains__(self, name: str) -> bool:
        return name in self._made

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the model's names of the weights, and those of tensors that it does not take."""
        return (*self._made, *self._others)

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns what the files have to say."""
        return self._source.notes

    def described(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Maps names to tensors on meta with their shapes and dtypes."""
        return {name: self._made[name].twin for name in names}

    def divides(self, name: str) -> bool:
        """Tells whether rows are read without the others."""
        return self._made[name].divides

    def box(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a weight, or all of it, on the CPU."""
        made = self._made[name]
        if offsets is None or sizes is None:
            return made.read(made.whole())
        return made.read(ReadBox(tuple(offsets), tuple(sizes)))


def is_pretrained(model: nn.Module) -> bool:
    """Tells whether the model is one of transformers; where it is, the library is imported already."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _deferred(source: WeightSource, name: str, twin: Tensor) -> DeferredTensor:
    return deferred_file(twin, lambda box: source.box(name, *box), name, divides=source.divides(name))


def _loaded(model: Any, tensors: dict[str, DeferredTensor], source: WeightSource) -> dict[str, Tensor]:
    """Returns the state dict of the model after its loader was given these tensors."""
    names: Any = import_module("transformers.conversion_mapping")
    loading: Any = import_module("transformers.modeling_utils")
    empty: Any = _without_values(model)
    mapping = names.get_model_conversion_mapping(empty)
    how = loading.LoadStateDictConfig(
        weight_mapping=mapping, device_map={"": "cpu"}, ignore_mismatched_sizes=True
    )
    try:
        with _quiet(), torch.no_grad():
            said = empty._load_pretrained_model(empty, tensors, None, how)
    except Exception as error:
        raise BadWeights(
            f"the loader of {type(model).__name__} does not take the names of {source.path}",
            numbers=f"{type(error).__name__}: {error}",
            next_step="from_pretrained once, then save_pretrained(FOLDER, save_original_format=False)",
        ) from error
    _refuse(model, source, said[0] if isinstance(said, tuple) else said)
    return dict(empty.state_dict(keep_vars=True))


def _refuse(model: nn.Module, source: WeightSource, said: Any) -> None:
    """Raises BadWeights for weights that the loader could not make."""
    mismatched: list[Any] = sorted(getattr(said, "mismatched_keys", ()))
    if mismatched:
        name, found, wanted = mismatched[0]
        raise BadWeights(
            f"{name} has another shape in {source.path} than in the model",
            numbers=f"{list(found)} in the file, {list(wanted)} in the model; {len(mismatched)} such weights",
            next_step="build the model with the config of the weights",
        )
    failed: list[Any] = sorted(getattr(said, "conversion_errors", {}).items())
    if failed:
        name, why = failed[0]
        raise BadWeights(
            f"the loader of {type(model).__name__} cannot make {name} from {source.path}",
            numbers=str(why).strip().splitlines()[-1],
            next_step="build the model with the config of the weights",
        )


def _without_values(model: nn.Module) -> nn.Module:
    """Returns a copy of the model on meta; nothing of its values is copied."""
    tensors = [t for table, key, _ in places(model) if (t := table[key]) is not None]
    twins = {id(t): like(t, torch.empty_like(t, device="meta", requires_grad=False)) for t in tensors}
    return copy.deepcopy(model, dict(twins))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the loader from showing the progress of a load that reads nothing."""
    logging: Any = import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
