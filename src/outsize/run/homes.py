"""Homes: on which stages a weight has values, and so which stage can run a module as a whole.

    weight          held by         module             run by
    embed.weight    {0}             embed              0
    layers.1.w      {1}             layers.1           1
    head.weight     {0} (tied)      head               0       where the tied weight lives
    scale           {0}             the model itself   all ranks; stage 0 tells the others its scale

A weight that is not listed is held by all. A module with listed weights that no stage holds all of is walked
through: its own Python runs on every rank, and its submodules are asked in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.ir.graph import ModelGraph
from outsize.run.cut import Cut
from outsize.run.weights import homes

Holders = Mapping[str, frozenset[int]]  # canonical weight name -> stages


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """`home`: the one stage that owns each parameter and buffer; `holders`: all that have its values;
    `unused`: weights that no program has used so far. Everybody holds these, and nobody has changed them.
    """

    home: dict[str, int]
    holders: Holders
    unused: frozenset[str] = frozenset()

    def foreign(self, stages: Iterable[int]) -> set[str]:
        """Weights that these stages have no values of."""
        return {name for name, held in self.holders.items() if held.isdisjoint(stages)}

    def adopting(self, now: Placement) -> Placement:
        """With unused weights, as soon as they are used, where that program puts them."""
        new = self.unused - now.unused
        home = self.home | {name: now.home[name] for name in new}
        holders = {**self.holders, **{name: now.holders[name] for name in new if name in now.holders}}
        return Placement(home, holders, self.unused & now.unused)


def placement_of_cut(cut: Cut, model: nn.Module) -> Placement:
    """Where a cut puts the weights."""
    home = homes(cut, model)
    used = {name for program in cut.programs for name in program.weights}
    return Placement(home, holders_of_cut(cut), frozenset(home.keys() - used))


def placement_of_modules(graph: ModelGraph, stage: Sequence[int], model: nn.Module) -> Placement:
    """Where whole modules put them: with the first unit that has them, whose stage is `stage[unit]`.

    Buffers of the glue are everywhere.
    """
    held = {p.name: stage[graph.owner_of[p.name]] for p in graph.parameters}
    names = {id(b): name for name, b in model.named_buffers()}
    for unit in graph.units:
        for buffer in model.get_submodule(unit.name).buffers():
            held.setdefault(names[id(buffer)], stage[unit.index])
    home = dict.fromkeys(names.values(), 0) | held
    return Placement(home, {name: frozenset({at}) for name, at in held.items()})


def holders_of_cut(cut: Cut) -> Holders:
    """Who keeps what when a model is cut (run/weights.py frees the rest)."""
    found: dict[str, set[int]] = {}
    for program in cut.programs:
        for name in program.weights:
            found.setdefault(name, set()).add(program.stage)
    return {name: frozenset(stages) for name, stages in found.items() if len(stages) < len(cut.programs)}


def module_owners(model: nn.Module, holders: Holders) -> dict[int, int]:
    """id(module) -> the stage that runs it; what is absent runs on every rank. Never the model itself."""
    held = _held(model, holders)
    owners: dict[int, int] = {}
    for module in model.modules():
        asked = [held[id(t)] for t in (*module.parameters(), *module.buffers()) if id(t) in held]
        able = frozenset.intersection(*asked) if asked else frozenset()
        if able and module is not model:
            owners[id(module)] = min(able)
    return owners


def weight_homes(model: nn.Module, holders: Holders) -> dict[int, int]:
    """id(weight) -> the stage that tells its values to the others; absent where all ranks hold it."""
    return {key: min(stages) for key, stages in _held(model, holders).items()}


def _held(model: nn.Module, holders: Holders) -> dict[int, frozenset[int]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(t): holders[name] for name, t in named if name in holders}


@contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Weights without values look like weights on the device: same shape, no memory, NaN to be seen.

    Python asks weights for device and dtype (`next(model.parameters()).device`), and those on meta would
    answer differently from rank to rank.
    """
    made: dict[int, Tensor] = {}
    places = [(table, key, t) for table, key, t in _places(model) if t.is_meta]
    for table, key, tensor in places:
        table[key] = made.setdefault(id(tensor), _stand_in(tensor, device))
    try:
        yield
    finally:
        ours = {id(t) for t in made.values()}
        for table, key, tensor in places:
            if id(table.get(key)) in ours:
                table[key] = tensor


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            yield from ((table, key, t) for key, t in table.items() if t is not None)


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    empty = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
