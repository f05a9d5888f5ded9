"""Problem: how many bytes does a parameter need under an optimizer and a precision, activations aside?

    sgd              nothing
    momentum         momentum_buffer                                      1 x the parameter
    adam, adamw      exp_avg, exp_avg_sq, a float32 `step`                2 x the parameter + 4 bytes
    adafactor        row and column factors of the second moment          (r + c) elements + 4 bytes
                     over the last two dimensions; a vector keeps the whole
    adam8bit         two moments of 1 byte per element and a float32      about 2.03 bytes per element
                     scale per block of 256; float32 below 4,096 elements
    muon             momentum of hidden matrices; adamw steps the rest    1 x the parameter
    soap             two moments; for each dim d <= 10,000 of a matrix    2 x the parameter + 8 d^2 bytes
                     the float32 mean of G G^T and its eigenvectors       each + 4 bytes

States have the dtype of what the optimizer updates: the parameter, or its float32 master copy.
Mixed-precision AdamW needs 16 bytes per parameter: weight 2, gradient 2, master 4, moments 8 (ZeRO, arXiv
1910.02054, sec. 3.1), and 18 with gradients accumulated in float32.

A step allocates temporaries. `foreach` (torch's default on CUDA) makes one list of tensors for all parameters
at once. The loop over tensors (the default on CPU) makes the temporaries of one tensor at a time; Adam's loop
still holds the tensor before in a variable:

               foreach            loop
    adam(w)    all of them        largest of before + 2 x this one
    adafactor  all of them        largest of before + this one, and the squares of a vector
    muon       as the loop        largest of update + its two bfloat16 copies and two products of rows
    soap       as the loop        largest of 4 x this one + one product of its widest dim
    others     none               none

The seconds of a step follow from the bytes that it reads and writes. A fused kernel, which 8-bit optimizers
have always, reads the gradient, and reads and writes what it updates and its states. With foreach each
operation of the formula reads and writes lists of whole tensors:

    accesses of each element    sgd 3, momentum 8, adam 18, adamw 20, adafactor 19, muon 15, soap 45

and from the FLOPs of the products that it takes of an r x c matrix, r <= c:

    muon    5 iterations of Newton-Schulz in bfloat16       5 (4 r^2 c + 2 r^3)
    soap    for each dim d: the gradient and the step into and out of its eigenvectors and
            G G^T, 10 n d of n elements; each tenth step G G^T's eigenvectors again, 0.87 d^3

An optimizer whose update of an element depends on its whole tensor ("per weight") steps parts of tensors on
owners (train/): they take the gradients and the weights of their tensors from all ranks and give the weights
back. The owner of a tensor holds it whole for that moment.

Sources: torch.optim (foreach, _single_tensor_*), Adafactor (arXiv 1804.04235), 8-bit optimizers (arXiv
2110.02861), Muon (Jordan et al., 2024; torch.optim.Muon), SOAP (arXiv 2409.11321). Deviations: tables shared
by 8-bit states, and what the first step alone needs, are not counted; owners are taken to be balanced, and
experts that ranks divide to be gathered by nobody. Complexity: O(1) per parameter. Oracle:
tests/unit/planner/memory/test_optimizer_states.py counts real torch states, what torch's operations access,
and the FLOPs of their products; tests/integrations/test_optimizer_figures.py those of a published SOAP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Final, Literal, final

from outsize.errors import BadOption
from outsize.errors.words import nearest, value_here
from outsize.ir.base import Record
from outsize.ir.graph import Parameter

Dtype = Literal["float32", "bfloat16", "float16"]
Style = Literal["foreach", "loop", "fused"]

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
COUNTER: Final = 4
BLOCK: Final = 256
SMALLEST_8BIT: Final = 4096
WIDEST_SOAP: Final = 10_000


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
StepOf = Callable[[Sequence[_Updated], bool], int]
ProductsOf = Callable[[_Updated], float]
Coupling = Literal["elementwise", "per weight"]


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


def _soap_state(t: _Updated) -> int:
    """Returns the bytes of two moments, and of the mean of G G^T and its eigenvectors for each dim."""
    return 2 * t.size_bytes + 2 * ITEM_BYTES["float32"] * sum(d * d for d in _soap_dims(t))


def _soap_dims(t: _Updated) -> list[int]:
    return [d for d in t.shape if d <= WIDEST_SOAP] if len(t.shape) > 1 else []


def _no_temporaries(tensors: Sequence[_Updated], foreach: bool) -> int:
    return 0


def _adam_temporaries(tensors: Sequence[_Updated], foreach: bool) -> int:
    sizes = [t.size_bytes for t in tensors]
    return sum(sizes) if foreach else max((a + 2 * b for a, b in pairwise([0, *sizes])), default=0)


def _adafactor_temporaries(tensors: Sequence[_Updated], foreach: bool) -> int:
    sizes = [t.size_bytes for t in tensors]
    return sum(sizes) if foreach else max((a + b for a, b in pairwise([0, *sizes])), default=0)


def _muon_temporaries(tensors: Sequence[_Updated], foreach: bool) -> int:
    two = 2 * ITEM_BYTES["bfloat16"]
    return max((t.size_bytes + two * (t.numel + _matrix(t)[0] ** 2) for t in tensors), default=0)


def _soap_temporaries(tensors: Sequence[_Updated], foreach: bool) -> int:
    square = 7 * ITEM_BYTES["float32"]
    return max((5 * t.size_bytes + square * max(_soap_dims(t), default=0) ** 2 for t in tensors), default=0)


def _no_products(t: _Updated) -> float:
    return 0.0


def _muon_products(t: _Updated) -> float:
    """Returns the FLOPs of five iterations of Newton-Schulz on each matrix of a tensor."""
    rows, columns = _matrix(t)
    return 5.0 * prod(t.shape[:-2]) * (4 * rows**2 * columns + 2 * rows**3)


def _soap_products(t: _Updated) -> float:
    return sum(8.0 * t.numel * d + 0.47 * d**3 for d in _soap_dims(t))


def _matrix(t: _Updated) -> tuple[int, int]:
    """Returns the shorter and the longer side of the matrices of a tensor."""
    rows, columns = sorted(t.shape[-2:])
    return rows, columns


@final
@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Describes one optimizer in one precision.

    `coupling` says on what the update of an element depends: on itself, or on its whole tensor. `in_parts`:
    it can step some parameters now and others later. Weights that are no hidden matrices are stepped by
    `others`, where that is not None. `products_dtype` is that of the products of `products_of`.
    """

    name: str
    state_of: StateOf
    step_of: StepOf
    foreach_accesses: int | None = None  # None where one fused kernel does it all.
    precision: Precision = AS_CAPTURED
    in_parts: bool = True  # True for all of torch's own optimizers.
    coupling: Coupling = "elementwise"
    products_of: ProductsOf = _no_products
    products_dtype: Dtype = "float32"
    others: OptimizerBytes | None = None
    lists: bool = True  # False where it goes tensor by tensor on any device.

    def held(self, parameter: Parameter) -> ParameterBytes:
        """Returns the bytes of one parameter by cause; a frozen one has its weight alone.

        Of a part of a tensor under an optimizer that needs whole ones the state is an equal share: owners
        have it.
        """
        weight = self._weight_bytes(parameter)
        if not parameter.trainable:
            return ParameterBytes(weight, 0, 0, 0)
        numel, precision = parameter.numel, self.precision
        gradient = numel * ITEM_BYTES[precision.gradient] if precision.gradient else weight
        updated = self._updated(parameter)
        state = self._of(parameter).state_of(updated) // self._parts(parameter)
        master = numel * ITEM_BYTES["float32"] if precision.master else 0
        return ParameterBytes(weight, gradient, master, state)

    def step_bytes(self, parameters: Iterable[Parameter], style: Style) -> int:
        """Returns the temporaries of a step over these parameters, in the order in which the optimizer has
        them.
        """
        if style == "fused":
            return 0
        trained = [p for p in parameters if p.trainable]
        if style == "foreach":
            return max(sum(map(self.list_bytes, trained)), max(map(self.tensor_bytes, trained), default=0))
        parts = [[p for p in trained if self._of(p) is kind] for kind in self._kinds]
        return max(
            k.step_of(list(map(self._updated, p)), False) for k, p in zip(self._kinds, parts, strict=True)
        )

    def list_bytes(self, parameter: Parameter) -> int:
        """Returns the temporaries of this parameter in a step over lists of tensors, where they add up."""
        kind = self._of(parameter)
        if not parameter.trainable or not kind.lists:
            return 0
        return kind.step_of([self._updated(parameter)], True) // self._parts(parameter)

    def tensor_bytes(self, parameter: Parameter) -> int:
        """Returns the temporaries of this parameter where no list is made: the optimizer has no lists, or
        tensor-parallel ranks have parts of it that an owner makes whole.
        """
        kind = self._of(parameter)
        if self._parts(parameter) > 1:
            return self.owner_bytes(parameter)
        return (
            kind.step_of([self._updated(parameter)], False) if parameter.trainable and not kind.lists else 0
        )

    def owner_bytes(self, parameter: Parameter) -> int:
        """Returns what the owner of a tensor, of which ranks have parts, holds while it steps it: the whole
        gradient, what is updated, and temporaries; 0 where each rank steps its own part.
        """
        kind = self._of(parameter)
        if not parameter.trainable or not kind.couples:
            return 0
        held = self.held(parameter)
        whole = (held.gradient + (held.master or held.weight)) * self._parts(parameter)
        return whole + kind.step_of([self._updated(parameter)], False)

    def exchanged_bytes(self, parameter: Parameter) -> int:
        """Returns the bytes of gradients and weights of a rank's part of this tensor that go to its owner and
        come back; 0 where each rank steps its own part.
        """
        if not parameter.trainable or not self._of(parameter).couples:
            return 0
        held = self.held(parameter)
        return held.gradient + 2 * (held.master or held.weight)

    def product_flops(self, parameter: Parameter) -> float:
        """Returns the FLOPs of the matrix products of a step, a rank's share of them where it has a part."""
        if not parameter.trainable:
            return 0.0
        return self._of(parameter).products_of(self._updated(parameter)) / self._parts(parameter)

    @property
    def couples(self) -> bool:
        """Tells whether some tensors have to be whole when they are stepped."""
        return self.coupling != "elementwise"

    def moved_per_gradient(self, parameters: Iterable[Parameter], style: Style) -> float:
        """Returns how many bytes a step reads and writes for each byte of gradients; 0.0 where nothing is
        trained.
        """
        trained = [(p, self.held(p)) for p in parameters if p.trainable]
        gradients = sum(held.gradient for _, held in trained)
        return sum(self.moved_bytes(*each, style) for each in trained) / gradients if gradients else 0.0

    def moved_bytes(self, parameter: Parameter, held: ParameterBytes, style: Style) -> int:
        """Returns the bytes that a step reads and writes for one trained parameter, its products aside."""
        updated = held.master or held.weight
        written_back = held.weight if held.master else 0
        accesses = self._of(parameter).foreach_accesses
        if style == "fused" or accesses is None:
            return held.gradient + 2 * (updated + held.state) + written_back
        return accesses * updated + written_back

    @property
    def _kinds(self) -> tuple[OptimizerBytes, ...]:
        return (self,) if self.others is None else (self, self.others)

    def _of(self, parameter: Parameter) -> OptimizerBytes:
        """Returns the optimizer that steps this parameter."""
        return self if self.others is None or parameter.is_hidden_matrix else self.others

    def _parts(self, parameter: Parameter) -> int:
        """Returns in how many parts ranks have a tensor that has to be whole."""
        whole = prod(parameter.whole) if self._of(parameter).couples else 0
        return -(-whole // parameter.numel) if whole and parameter.numel else 1

    def _updated(self, parameter: Parameter) -> _Updated:
        """Returns the tensor that is updated: the whole one where it has to be whole."""
        parts = self._parts(parameter)
        size = (
            parameter.numel * ITEM_BYTES["float32"]
            if self.precision.master
            else self._weight_bytes(parameter)
        )
        return _Updated(parameter.whole if parts > 1 else parameter.shape, size * parts)

    def _weight_bytes(self, parameter: Parameter) -> int:
        dtype = self.precision.parameter
        if dtype is None or parameter.dtype not in ITEM_BYTES:
            return parameter.size_bytes
        return parameter.numel * ITEM_BYTES[dtype]


_ADAMW: Final = OptimizerBytes("adamw", _adam_state, _adam_temporaries, 20)
_KNOWN: Final = (
    OptimizerBytes("sgd", _copies(0), _no_temporaries, 3),
    OptimizerBytes("momentum", _copies(1), _no_temporaries, 8),
    OptimizerBytes("adam", _adam_state, _adam_temporaries, 18),
    _ADAMW,
    OptimizerBytes("adafactor", _adafactor_state, _adafactor_temporaries, 19, coupling="per weight"),
    OptimizerBytes("adam8bit", _adam8bit_state, _no_temporaries, in_parts=False, coupling="per weight"),
    OptimizerBytes(
        "muon",
        _copies(1),
        _muon_temporaries,
        16,
        coupling="per weight",
        products_of=_muon_products,
        products_dtype="bfloat16",
        others=_ADAMW,
        lists=False,
    ),
    OptimizerBytes(
        "soap",
        _soap_state,
        _soap_temporaries,
        26,
        coupling="per weight",
        products_of=_soap_products,
        lists=False,
    ),
)


def optimizer_bytes(name: str, precision: Precision = AS_CAPTURED) -> OptimizerBytes:
    """Returns the optimizer called `name`; raises BadOption, which lists the known ones."""
    for known in _KNOWN:
        if known.name == name:
            return replace(known, precision=precision)
    known_names = [known.name for known in _KNOWN]
    raise BadOption(
        f"optimizer {name!r} is not known",
        numbers=f"known: {', '.join(known_names)}",
        next_step=f"--optimizer {value_here('optimizer', name) or nearest(name, known_names) or 'adamw'}",
    )


def style_of(device_kind: str) -> Style:
    """Returns how torch updates by default: with foreach on an accelerator, tensor by tensor on a CPU."""
    return "loop" if device_kind == "cpu" else "foreach"
