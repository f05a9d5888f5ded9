"""Problem: which stage runs each unit of a program, where weights have their owners already?

    first program     embed 0   layers.0 0   layers.1 1   norm 1   head 1       norm and head live in stage 1
    an early exit     embed 0   layers.0 0   norm 1   head 1   layers.1 1       sent: what layers.0 returns
    layers run twice  embed 0   layers.0 0   layers.1 1   layers.0 1   ...      sent: the weights of layers.0

A plan names the units of the program that it was made for. Another program of the same model (eval, another
flag, other exits) may call them in another order, or call others. Its weights stay where their optimizer
states are, so a unit goes to the latest of these stages, in the model's order:

    the one whose patterns cover it
    those that own its weights
    those of the units whose values it takes
    the last that has used one of its trainable weights: gradients are added from the last use to the first

What every stage computes for itself (`replicable`), such as tables of positions, counts for none of these.
So values and weights go to later stages alone, as schedules have it. Where a unit runs in a later stage than
the one that owns its weights, the owner sends them (run/stage/boundary.py).

Complexity: O(units + users of values + weights). Oracle: tests/parity/test_other_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

from outsize.capture.graph.build import Captured
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.ir.units.names import prefixes, unroll
from outsize.program.liveness import replicable
from outsize.program.tape import Instruction
from outsize.run.stage.boundary import NO_HOMES, WeightHomes

_MOST_UNITS: Final = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Says where weights live when a program is cut.

    `apart`: stages are in several processes, where what one writes is not seen by the others.
    """

    homes: WeightHomes = NO_HOMES
    apart: bool = False


_NOWHERE: Final = PlacedWeights()


def instruction_owners(
    plan: Plan,
    captured: Captured,
    placed: PlacedWeights = _NOWHERE,
    trained: Collection[str] = (),
) -> list[int]:
    """Returns the stage of each instruction.

    Raises BadOption where a buffer would have to be written in another stage than the one that owns it.
    """
    wished = _wished(plan, captured)
    tape = captured.tape
    copied = replicable(tape)
    runs = [tape.instructions[first:after] for first, after in pairwise(captured.starts)]
    makers: dict[int, list[int]] = {}
    for value in captured.graph.values:
        for user in value.consumers:
            makers.setdefault(user, []).append(value.producer)
    stages: list[int] = []
    last_use: dict[str, int] = {}
    for unit, (wish, run) in enumerate(zip(wished, runs, strict=True)):
        names = list(dict.fromkeys(_weights(i for i in run if not copied[i.index])))
        earlier = (stages[maker] for maker in makers.get(unit, ()))
        owning = (placed.homes.first_holder(name) for name in names)
        using = (last_use.get(name, 0) for name in names)
        stage = max(wish, *earlier, *owning, *using, 0)
        stages.append(stage)
        last_use.update((name, stage) for name in names if name in trained)
        if placed.apart:
            _insist_on_own_buffers(run, stage, placed.homes)
    return [stage for stage, run in zip(stages, runs, strict=True) for _ in run]


def _wished(plan: Plan, captured: Captured) -> Sequence[int]:
    """Returns the stage that the plan gives each unit, or 0 where it does not know the unit."""
    if captured.graph.fingerprint == plan.fingerprint:
        return plan.owners(captured.graph)
    find = _pattern_owner(plan)
    return [find(unit.name) for unit in captured.graph.units]


def _pattern_owner(plan: Plan) -> Callable[[str], int]:
    table = {pattern: number for number, s in enumerate(plan.stages) for pattern in _unrolled(s.units)}

    def owner(name: str) -> int:
        return next((table[p] for p in prefixes(name) if p in table), 0)

    return owner


def _unrolled(patterns: Sequence[str]) -> list[str]:
    return [name for pattern in patterns for name in unroll(pattern, _MOST_UNITS)]


def _weights(run: Iterable[Instruction]) -> Iterator[str]:
    return (weight.name for instruction in run for weight in instruction.weights)


def _insist_on_own_buffers(run: Sequence[Instruction], stage: int, homes: WeightHomes) -> None:
    for instruction in run:
        for weight in instruction.written_weights:
            owner = homes.owner.get(weight.name, stage)
            if owner != stage:
                raise _written_elsewhere(instruction, weight.name, owner, stage)


def _written_elsewhere(instruction: Instruction, name: str, owner: int, stage: int) -> BadOption:
    return BadOption(
        f"{instruction.name} writes {name} behind work of a later stage than the one that has it",
        numbers=f"{name} is in stage {owner}, this call is in stage {stage}, at {instruction.where}",
        next_step="give outsize.parallelize a batch whose forward calls the modules in this order, so that "
        "the plan is made for it, or --stages 1",
    )
