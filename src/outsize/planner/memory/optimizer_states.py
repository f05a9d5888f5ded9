"""Problem: how many bytes does a parameter need under an optimizer and a precision, activations aside?

    sgd              nothing
    momentum         momentum_buffer                                      1 x the parameter
    adam, adamw      exp_avg, exp_avg_sq, a float32 `step`                2 x the parameter + 4 bytes
    adafactor        row and column factors of the second moment          (r + c) elements + 4 bytes
                     over the last two dimensions; a vector keeps the whole
    adam8bit         two moments of 1 byte per element and a float32      about 2.03 bytes per element
                     scale per block of 256; float32 below 4,096 elements

States have the dtype of what the optimizer updates: the parameter, or its float32 master copy.
Mixed-precision AdamW needs 16 bytes per parameter: weight 2, gradient 2, master 4, moments 8 (ZeRO, arXiv
1910.02054, sec. 3.1), and 18 with gradients accumulated in float32.

A step allocates temporaries. `foreach` (torch's default on CUDA) makes one list of tensors for all parameters
at once. The loop over tensors (the default on CPU) makes the temporaries of one tensor at a time; Adam's loop
still holds the tensor before in a variable:

               foreach            loop
    adam(w)    all of them        largest of before + 2 x this one
    adafactor  all of them        largest of before + this one, and the squares of a vector
    others     none               none

The seconds of a step follow from the bytes that it reads and writes. A fused kernel, which 8-bit optimizers
have always, reads the gradient, and reads and writes what it updates and its states. With foreach each
operation of the formula reads and writes lists of whole tensors:

    accesses of each element    sgd 3, momentum 8, adam 18, adamw 20, adafactor 19

Sources: torch.optim (foreach, _single_tensor_*), Adafactor (arXiv 1804.04235), 8-bit optimizers (arXiv
2110.02861). Deviations: tables shared by 8-bit states, and what the first step alone needs, are not counted.
Complexity: O(1) per parameter. Oracle: tests/unit/planner/memory/test_optimizer_states.py counts real torch
states, and what torch's foreach operations access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Final, Literal, final

from outsize.errors import BadOption
from outsize.ir.base import Record
from outsize.ir.graph import Parameter

Dtype = Literal["float32", "bfloat16", "float16"]
Style = Literal["foreach", "loop", "fused"]

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
COUNTER: Final = 4
BLOCK: Final = 256
SMALLEST_8BIT: Final = 4096


@final
class Precision(Record):
    """Names the dtypes of a parameter and its gradient; None keeps what the model has.

    `master`: the optimizer updates a float32 copy. The default is the model as it was captured, which is also
    right for autocast, whose weights stay float32.
    """

    parameter: Dtype | None = None
    gradient: Dtype | None = None
    master: bool = False


AS_CAPTURED: Final = Precision()
MASTER: Final = Precision(parameter="bfloat16", master=True)
MASTER_FLOAT32_GRADIENTS: Final = Precision(parameter="bfloat16", gradient="float32", master=True)


@final
@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Holds the bytes of one parameter tensor by cause."""

    weight: int
    gradient: int
    master: int
    state: int

    @property
    def total_bytes(self) -> int:
        """Returns the sum of all causes."""
        return self.weight + self.gradient + self.master + self.state


@final
@dataclass(frozen=True, slots=True)
class _Updated:
    """Describes the tensor that an optimizer updates."""

    shape: tuple[int, ...]
    size_bytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def bytes_of(self, elements: int) -> int:
        return self.size_bytes * elements // max(self.numel, 1)


StateOf = Callable[[_Updated], int]
StepOf = Callable[[Sequence[int], bool], int]


def _copies(count: int) -> StateOf:
    return lambda t: count * t.size_bytes


def _adam_state(t: _Updated) -> int:
    return 2 * t.size_bytes + COUNTER


def _adafactor_state(t: _Updated) -> int:
    """Returns the bytes of the factors (..., r, 1) and (..., 1, c) of a parameter (..., r, c)."""
    if len(t.shape) < 2:
        return t.size_bytes + COUNTER
    *outer, rows, columns = t.shape
    return t.bytes_of(prod(outer) * (rows + columns)) + COUNTER


def _adam8bit_state(t: _Updated) -> int:
    if t.numel < SMALLEST_8BIT:
        return 2 * ITEM_BYTES["float32"] * t.numel
    blocks = -(-t.numel // BLOCK)
    return 2 * (t.numel + ITEM_BYTES["float32"] * blocks)


def _no_temporaries(sizes: Sequence[int], foreach: bool) -> int:
    return 0


def _adam_temporaries(sizes: Sequence[int], foreach: bool) -> int:
    return sum(sizes) if foreach else max((a + 2 * b for a, b in pairwise([0, *sizes])), default=0)


def _adafactor_temporaries(sizes: Sequence[int], foreach: bool) -> int:
    return sum(sizes) if foreach else max((a + b for a, b in pairwise([0, *sizes])), default=0)


@final
@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Describes one optimizer in one precision; `in_parts`: it can step some parameters now and
    others later.
    """

    name: str
    state_of: StateOf
    step_of: StepOf
    foreach_accesses: int | None = None  # None where one fused kernel does it all.
    precision: Precision = AS_CAPTURED
    in_parts: bool = True  # True for all of torch's own optimizers.

    def held(self, parameter: Parameter) -> ParameterBytes:
        """Returns the bytes of one parameter by cause; a frozen one has its weight alone."""
        weight = self._weight_bytes(parameter)
        if not parameter.trainable:
            return ParameterBytes(weight, 0, 0, 0)
        numel, precision = parameter.numel, self.precision
        gradient = numel * ITEM_BYTES[precision.gradient] if precision.gradient else weight
        if not precision.master:
            return ParameterBytes(weight, gradient, 0, self.state_of(_Updated(parameter.shape, weight)))
        updated = _Updated(parameter.shape, numel * ITEM_BYTES["float32"])
        return ParameterBytes(weight, gradient, updated.size_bytes, self.state_of(updated))

    def step_bytes(self, parameters: Iterable[Parameter], style: Style) -> int:
        """Returns the temporaries of a step over these parameters, in the order in which the optimizer has
        them.
        """
        if style == "fused":
            return 0
        held = (self.held(p) for p in parameters if p.trainable)
        return self.step_of([h.master or h.weight for h in held], style == "foreach")

    def moved_per_gradient(self, parameters: Iterable[Parameter], style: Style) -> float:
        """Returns how many bytes a step reads and writes for each byte of gradients; 0.0 where nothing is
        trained.
        """
        trained = [self.held(p) for p in parameters if p.trainable]
        gradients = sum(held.gradient for held in trained)
        return sum(self.moved_bytes(held, style) for held in trained) / gradients if gradients else 0.0

    def moved_bytes(self, held: ParameterBytes, style: Style) -> int:
        """Returns the bytes that a step reads and writes for one trained parameter."""
        updated = held.master or held.weight
        written_back = held.weight if held.master else 0
        if style == "fused" or self.foreach_accesses is None:
            return held.gradient + 2 * (updated + held.state) + written_back
        return self.foreach_accesses * updated + written_back

    def _weight_bytes(self, parameter: Parameter) -> int:
        dtype = self.precision.parameter
        if dtype is None or parameter.dtype not in ITEM_BYTES:
            return parameter.size_bytes
        return parameter.numel * ITEM_BYTES[dtype]


_KNOWN: Final = (
    OptimizerBytes("sgd", _copies(0), _no_temporaries, 3),
    OptimizerBytes("momentum", _copies(1), _no_temporaries, 8),
    OptimizerBytes("adam", _adam_state, _adam_temporaries, 18),
    OptimizerBytes("adamw", _adam_state, _adam_temporaries, 20),
    OptimizerBytes("adafactor", _adafactor_state, _adafactor_temporaries, 19),
    OptimizerBytes("adam8bit", _adam8bit_state, _no_temporaries, in_parts=False),
)


def optimizer_bytes(name: str, precision: Precision = AS_CAPTURED) -> OptimizerBytes:
    """Returns the optimizer called `name`; raises BadOption, which lists the known ones."""
    for known in _KNOWN:
        if known.name == name:
            return replace(known, precision=precision)
    names = ", ".join(o.name for o in _KNOWN)
    raise BadOption(
        f"optimizer {name!r} is not known", numbers=f"known: {names}", next_step="--optimizer adamw"
    )


def style_of(device_kind: str) -> Style:
    """Returns how torch updates by default: with foreach on an accelerator, tensor by tensor on a CPU."""
    return "loop" if device_kind == "cpu" else "foreach"
