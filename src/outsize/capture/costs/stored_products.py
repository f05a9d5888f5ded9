"""Counts what products cost whose weight is stored as codes with scales: the values are made for each pass.

    real layers    what a library runs is metered as it runs; a product within one op of the library, for
                   which torch has no formula, is counted by the sides of the layer
    stand-ins      the kernels that make the values, from the record of the format

Values are made in the type of the input, by kernels of the family `cast`: they read codes and scales and
write the values. Oracle: tests/unit/capture/costs/test_stored_products.py by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from outsize.ir.graph import MATMULS, Work
from outsize.policies.storage_formats import StorageFormat
from outsize.program.tape import Cost
from outsize.program.values.stored_linear import StoredLinear, StoredStack, stored_stacks
from outsize.program.weights.beside import numbers_of


def stored_cost(module: nn.Module | None, args: Sequence[Any], cost: Cost) -> Cost:
    """Returns the cost of a call of a module whose weight is stored in few bits; of others as it is."""
    if isinstance(module, StoredLinear):
        return _with_values(module, args[0], cost)
    if module is not None and (stacks := stored_stacks(module)):
        return _with_stacks(stacks, cost)
    if module is None or any(work.family in MATMULS for work in cost.forward):
        return cost
    weight = next((weight for weight in module._parameters.values() if weight is not None), None)
    numbers = 0 if weight is None else numbers_of(module).get(id(weight), 0)
    x = next((each for each in args if isinstance(each, Tensor)), None)
    return _with_product(vars(module)["in_features"], numbers, x, cost) if numbers and x is not None else cost


def _with_product(taken: int, numbers: int, x: Tensor, cost: Cost) -> Cost:
    """Returns the cost with the product of the forward, which the library has in an op of its own."""
    rows = x.numel() // taken
    work = Work(
        family="matmul",
        dtype=str(x.dtype).removeprefix("torch."),
        flops=2 * rows * numbers,
        moved_bytes=x.dtype.itemsize * (x.numel() + numbers + rows * numbers // taken),
    )
    exact = cost.exact_instructions
    return replace(
        cost,
        flops=cost.flops + work.flops,
        moved_bytes=cost.moved_bytes + work.moved_bytes,
        forward=(work, *cost.forward),
        exact_instructions=(((), *exact[0]), *exact[1:]) if exact else exact,
    )


def _with_values(module: StoredLinear, x: Tensor, cost: Cost) -> Cost:
    """Returns the cost with the kernels that make the values of the weight, in both passes."""
    made = _values_of(module, x)
    trains = any(work.family in MATMULS for work in cost.backward_input) and not module.stored.keeps_values
    exact = cost.exact_instructions
    if exact:  # Nothing of the kernels that make values was rounded.
        forward, of_input, of_weight = exact
        exact = ((), *forward), ((), *of_input) if trains else of_input, of_weight
    return replace(
        cost,
        moved_bytes=cost.moved_bytes + made.moved_bytes,
        forward=(made, *cost.forward),
        backward_input=(made, *cost.backward_input) if trains else cost.backward_input,
        exact_instructions=exact,
    )


def _with_stacks(stacks: Sequence[StoredStack], cost: Cost) -> Cost:
    """Returns the cost with the kernels that make the values of stacks, which the backward finds kept."""
    made = tuple(_made(s.shape, s.stored, s.like.dtype) for s in stacks)
    exact = cost.exact_instructions
    return replace(
        cost,
        moved_bytes=cost.moved_bytes + sum(work.moved_bytes for work in made),
        forward=(*made, *cost.forward),
        exact_instructions=((*((),) * len(made), *exact[0]), *exact[1:]) if exact else exact,
    )


def _values_of(module: StoredLinear, x: Tensor) -> Work:
    return _made((module.out_features, module.in_features), module.stored, x.dtype)


def _made(sides: Sequence[int], stored: StorageFormat, dtype: torch.dtype) -> Work:
    """Returns the kernels that make the values of a weight of these sides."""
    elements = prod(sides)
    written = elements * dtype.itemsize
    return Work(
        family="cast",
        dtype=str(dtype).removeprefix("torch."),
        flops=0,
        # Each kernel but the first one reads what the one before has written.
        moved_bytes=stored.read_bytes(elements, elements // sides[-1]) + written * (2 * stored.launches - 1),
        launches=stored.all_launches,
    )
