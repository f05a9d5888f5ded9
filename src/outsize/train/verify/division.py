"""Problem: one unit of a stage is to be repeated by another rank; where does the stage divide?

    stage 1 of the plan     layers.2  act  layers.3  act  norm  |  parts: (layers.2 act) (layers.3 act) (norm)
    cut of the plan         program 0 | program 1                        boundaries count stages
    finer cut               0 1 2     | 3 4 5                            boundaries count parts

A part is a unit with weights and the units without behind it: what has none is cheap to send, and turns that
show it alone would find little. Units that share a buffer that a forward writes stay in one part, since
another rank has the values of before one part's forward alone. The finer cut is one of the same tape as the
plan's, with the aliases that this one has made, so laws 1 to 3 of DESIGN.md hold for it. With replicas stages
have no parts, since no weights travel.

Complexity: that of `cut`, once for each variant that is verified.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import nn

from outsize.ir.graph import Unit
from outsize.program.liveness import replicable
from outsize.program.tape import Instruction
from outsize.run.stage.boundary import WeightHomes, alias_for_one_use
from outsize.run.stage.cut import Cut, cut
from outsize.train.variants.variant import Variant


@final
@dataclass(frozen=True, slots=True)
class DividedVariant:
    """Holds a variant whose cut has a program for each part; `parts[stage]` are the numbers of a stage's.

    `names` are those of the parts' units. Without `has_parts` the cut is that of the plan.
    """

    variant: Variant
    parts: tuple[range, ...]
    names: tuple[str, ...]
    has_parts: bool = True

    def stage_of(self, part: int) -> int:
        """Returns the stage of a part."""
        return self.variant.cut.programs[part].stage


def undivided(variant: Variant) -> DividedVariant:
    """Returns the variant with one part for each stage."""
    stages = len(variant.cut.programs)
    parts = tuple(range(stage, stage + 1) for stage in range(stages))
    return DividedVariant(variant, parts, ("",) * stages, has_parts=False)


def in_units(variant: Variant, model: nn.Module) -> DividedVariant:
    """Returns the variant with its stages in parts."""
    whole, graph = variant.cut, variant.captured.graph
    unit_of = _units(variant)
    runs = [_runs(variant, program.stage, unit_of) for program in whole.programs]
    parts: list[range] = []
    part_of: dict[tuple[int, int], int] = {}
    names: list[str] = []
    for stage, of_stage in enumerate(runs):
        parts.append(range(len(names), len(names) + len(of_stage)))
        for run in of_stage:
            part_of |= {(stage, unit): len(names) for unit in run}
            names.append(_name([graph.units[unit] for unit in run]))
    owners = [0] * len(whole.tape.instructions)
    for program in whole.programs:
        for i in program.spec.instructions:
            owners[i.index] = part_of.get((program.stage, unit_of[i.index]), parts[program.stage][0])
    finer = cut(
        whole.tape,
        model,
        owners,
        outputs=any(program.outputs for program in whole.programs),
        stages=len(names),
        homes=_homes(whole, owners, parts),
    )
    # Policies and errors ask for the plan's stage.
    stage_of = [stage for stage, numbers in enumerate(parts) for _ in numbers]
    programs = tuple(replace(p, stage=s) for p, s in zip(finer.programs, stage_of, strict=True))
    return DividedVariant(replace(variant, cut=replace(finer, programs=programs)), tuple(parts), tuple(names))


def _names(instruction: Instruction) -> set[str]:
    return {weight.name for weight in instruction.weights}


def _name(units: Sequence[Unit]) -> str:
    """Returns the name of a part: of its units with parameters, or of all."""
    names = [unit.name for unit in units if unit.parameters] or [unit.name for unit in units]
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names)


def _units(variant: Variant) -> list[int]:
    """Returns the unit of each instruction; an alias for one use belongs to the value's."""
    tape, starts = variant.cut.tape, variant.captured.starts
    units: list[int] = []
    for instruction in tape.instructions:
        if instruction.target is alias_for_one_use:
            (slot,) = instruction.reads()
            units.append(units[tape.producer[slot]])
        else:
            units.append(bisect_right(starts, instruction.origin) - 1)
    return units


def _runs(variant: Variant, stage: int, unit_of: Sequence[int]) -> list[list[int]]:
    """Returns the units of a stage in their parts; a stage that owns no instruction is one part."""
    tape = variant.cut.tape
    copied = replicable(tape)
    own = [i for i in variant.cut.programs[stage].spec.instructions if not copied[i.index]]
    units = sorted({unit_of[i.index] for i in own})
    weighted = {unit_of[i.index] for i in own if i.weights}
    runs: list[list[int]] = []
    for unit in units:
        if not runs or (unit in weighted and weighted & {*runs[-1]}):
            runs.append([])
        runs[-1].append(unit)
    if not runs:
        return [[]]
    for name in sorted(variant.cut.programs[stage].written):
        users = {unit_of[i.index] for i in own if name in _names(i)}
        places = [at for at, run in enumerate(runs) if users & {*run}]
        if places:
            joined = [unit for run in runs[places[0] : places[-1] + 1] for unit in run]
            runs[places[0] : places[-1] + 1] = [joined]
    return runs


def _homes(whole: Cut, owners: Sequence[int], parts: Sequence[range]) -> WeightHomes:
    """Returns where weights that stages share have their homes: in the first part of their stage that uses
    them, or in its first.
    """
    owner: dict[str, int] = {}
    holders: dict[str, frozenset[int]] = {}
    for boundary in whole.boundaries:
        name, home = boundary.weight, boundary.producer
        if name is None:
            continue
        users = [owners[i.index] for i in whole.programs[home].spec.instructions if name in _names(i)]
        owner[name] = min(users, default=parts[home][0])
        have = (n for stage, numbers in enumerate(parts) if stage not in boundary.consumers for n in numbers)
        holders[name] = frozenset(n for n in have if n >= parts[home][0])
    return WeightHomes(owner, holders)
