"""Maps each weight to the stages that hold its values, and each module to the stage that can run it whole.

    weight          held by         module             run by
    embed.weight    {0}             embed              0
    layers.1.w      {1}             layers.1           1
    head.weight     {0} (tied)      head               0       where the tied weight lives
    scale            {0}           the model itself   all ranks; stage 0 sends the others its scale

A weight that is not listed is held by all stages. Where no stage holds all listed weights of a module, the
module's own Python runs on every rank, and its submodules are assigned one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.ir.graph import ModelGraph
from outsize.run.stage.boundary import WeightHomes
from outsize.run.stage.cut import Cut
from outsize.run.weights.ownership import first_stages

Holders = Mapping[str, frozenset[int]]  # canonical weight name -> stages


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """Records where weights live.

    `home` maps each parameter and buffer to the stage that owns it; `holders` maps it to all stages that have
    its values. `unused` weights were read by no program so far: every stage holds them unchanged.
    `written` buffers are changed by the forward.
    """

    home: dict[str, int]
    holders: Holders
    unused: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    def foreign(self, stages: Iterable[int]) -> set[str]:
        """Returns the weights whose values these stages do not have."""
        return {name for name, stages_with_it in self.holders.items() if stages_with_it.isdisjoint(stages)}

    @property
    def homes(self) -> WeightHomes:
        """Returns where the weights are that a program has used."""
        return WeightHomes({n: s for n, s in self.home.items() if n not in self.unused}, self.holders)

    def adopting(self, now: Placement) -> Placement:
        """Returns this placement with newly used weights where placement `now` puts them."""
        new = self.unused - now.unused
        home = self.home | {name: now.home[name] for name in new}
        holders = {**self.holders, **{name: now.holders[name] for name in new if name in now.holders}}
        return Placement(home, holders, self.unused & now.unused, self.written | now.written)


def placement_of_cut(cut: Cut, model: nn.Module, everywhere: frozenset[str] = frozenset[str]()) -> Placement:
    """Returns where a cut puts the weights; every stage holds the buffers `everywhere`."""
    home = first_stages(cut, model)
    used = {name for program in cut.programs for name in program.weights}
    written = frozenset().union(*(program.written for program in cut.programs))
    holders = {name: stages for name, stages in holders_of_cut(cut).items() if name not in everywhere}
    return Placement(home, holders, frozenset(home.keys() - used), written)


def placement_of_modules(graph: ModelGraph, stage: Sequence[int], model: nn.Module) -> Placement:
    """Returns where whole modules put the weights: with the first unit that has them.

    The stage of a unit is `stage[unit]`; buffers of the glue, and the loss, are on every stage.
    """
    held = {p.name: stage[graph.owner_of[p.name]] for p in graph.parameters}
    names = {id(b): name for name, b in model.named_buffers()}
    for unit in graph.units:
        for buffer in model.get_submodule(unit.name).buffers():
            held.setdefault(names[id(buffer)], stage[unit.index])
    home = dict.fromkeys((*(name for name, _ in model.named_parameters()), *names.values()), 0) | held
    holders = {name: frozenset({at}) for name, at in held.items()}
    return Placement(home, holders, written=frozenset(names.values()))


def holders_of_cut(cut: Cut) -> Holders:
    """Maps each weight to the stages that use it in a cut; the others free it (run/weights/ownership.py)."""
    users: dict[str, set[int]] = {}
    for program in cut.programs:
        for name in program.weights:
            users.setdefault(name, set()).add(program.stage)
    return {name: frozenset(stages) for name, stages in users.items() if len(stages) < len(cut.programs)}


def module_owners(model: nn.Module, holders: Holders) -> dict[int, int]:
    """Maps id(module) to the stage that runs it; absent modules, such as the model, run on every rank."""
    holders_of = _holders_by_tensor(model, holders)
    owners: dict[int, int] = {}
    for module in model.modules():
        asked = [holders_of[id(t)] for t in (*module.parameters(), *module.buffers()) if id(t) in holders_of]
        able = frozenset.intersection(*asked) if asked else frozenset()
        if able and module is not model:
            owners[id(module)] = min(able)
    return owners


def weight_sources(model: nn.Module, holders: Holders) -> dict[int, int]:
    """Maps id(weight) to the stage that sends its values to the others; weights that all ranks hold are
    absent.
    """
    return {key: min(stages) for key, stages in _holders_by_tensor(model, holders).items()}


def _holders_by_tensor(model: nn.Module, holders: Holders) -> dict[int, frozenset[int]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(t): holders[name] for name, t in named if name in holders}


@contextmanager
def placeholder_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Makes weights without values look like weights on the device: same shape, no memory, all NaN.

    Python code asks weights for device and dtype (`next(model.parameters()).device`), and weights on meta
    would answer differently from rank to rank.
    """
    made: dict[int, Tensor] = {}
    places = [(table, key, t) for table, key, t in _places(model) if t.is_meta]
    for table, key, tensor in places:
        table[key] = made.setdefault(id(tensor), _placeholder(tensor, device))
    try:
        yield
    finally:
        made_ids = {id(t) for t in made.values()}
        for table, key, tensor in places:
            if id(table.get(key)) in made_ids:
                table[key] = tensor


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            yield from ((table, key, t) for key, t in table.items() if t is not None)


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    empty = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
