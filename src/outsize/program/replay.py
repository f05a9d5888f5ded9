"""Replays by interpretation: for guards and small slices. Stages use `generate` instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.program.python_reads import NumberInput
from outsize.program.tape import Instruction, Ref, Weight
from outsize.program.tree import map_leaves, paths

Env = dict[int, Any]


def resolve(tree: Any, env: Mapping[int, Any], weights: Mapping[str, Any]) -> Any:
    """Returns arguments with every Ref, Weight and NumberInput replaced by its value."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return env[leaf.slot]
        if isinstance(leaf, NumberInput):
            return leaf.value()
        return weights[leaf.name] if isinstance(leaf, Weight) else leaf

    return map_leaves(value, tree)


def evaluate(instructions: Iterable[Instruction], env: Env, weights: Mapping[str, Tensor]) -> None:
    """Runs glue instructions in order; fills `env` with their results. Leaves are not run here."""
    for instruction in instructions:
        assert callable(instruction.target), instruction.name
        args = resolve(instruction.args, env, weights)
        kwargs = resolve(instruction.kwargs, env, weights)
        with torch.set_grad_enabled(False):
            out = instruction.target(*args, **kwargs)
        env.update(bindings(instruction.out, out))


def bindings(tree: Any, out: Any) -> Env:
    """Maps slots to values, by walking the recorded structure of a result and the real one together."""
    values: Env = {}
    for path, ref in paths(tree, lambda leaf: isinstance(leaf, Ref)):
        values[ref.slot] = eval(f"out{path}", {"out": out})
    return values
