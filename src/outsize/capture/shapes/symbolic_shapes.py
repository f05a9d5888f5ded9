"""Problem: find the shapes of all values of a program as expressions in the lengths of its inputs.

    input_ids [2, n], labels [2, n]          n is a symbol where several recordings differ
    h = embed(input_ids)                     [2, n, 256], strides [256 n, 256, 1]
    h.view(2, n, 8, 32).transpose(1, 2)      [2, 8, n, 32]
    guards                                   what torch decided on the way: Eq(n, m), n < 2048

The instructions run once more, on fakes with symbolic sizes, under torch's ShapeEnv: the mechanism by which
torch.export and torch.compile know dynamic shapes. This file owns what it takes of it. A size that an op
fixes is a guard `Eq(n, 72)`, so that the program is for that length alone.
Complexity: one call on fakes for each instruction, some milliseconds each; equal calls of functions run once.
Oracle: tests/unit/capture/shapes, against recordings at each length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, final

import sympy
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from outsize.capture.fakes.fake_model import FakeModel, fake_like, hidden_fakes, quiet_fakes
from outsize.capture.fakes.grouped_products import grouped_products
from outsize.capture.recording.module_equality import Kinds
from outsize.capture.shapes.opaque_calls import kind_of_code
from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import NumberInput, SizeOf
from outsize.program.replaying.modes import under
from outsize.program.replaying.replay import bindings
from outsize.program.tape import Instruction, Meta, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves

# At sizes of 0 and 1 torch takes other ways (broadcasting, memory that is contiguous either way).
LEAST: Final = 2
Sizes = Sequence[Sequence[int]]
"""The shape of each input of a tape, and behind them the whole numbers among the model's arguments."""


@final
@dataclass(frozen=True, slots=True)
class InputSymbols:
    """Says which dims of the inputs vary; dims that were equal in all recordings are one symbol.

    `groups` has for each symbol its (input, dim) pairs; all other dims are as in `shapes`. Whole numbers
    among the arguments are the dims of one input more.
    """

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, known: Sequence[Sizes]) -> InputSymbols:
        """Returns the symbols of inputs whose sizes were recorded several times, at last as `shapes`."""
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for place, shapes in enumerate(zip(*known, strict=True)):
            for dim, sizes in enumerate(zip(*shapes, strict=True)):
                if len({*sizes}) > 1:
                    groups.setdefault(sizes, []).append((place, dim))
        return cls(tuple(map(tuple, known[-1])), tuple(map(tuple, groups.values())))

    def numbers(self, shapes: Sizes) -> tuple[int, ...] | None:
        """Returns the number of each symbol at these shapes; None where other dims differ than those that
        vary, dims of one symbol differ, or a number is below 2.
        """
        if list(map(len, shapes)) != list(map(len, self.shapes)):
            return None
        found: list[int] = []
        varying = {pair for group in self.groups for pair in group}
        for group in self.groups:
            sizes = {shapes[place][dim] for place, dim in group}
            if len(sizes) > 1 or min(sizes) < LEAST:
                return None
            found += sizes
        fixed = all(
            (place, dim) in varying or size == self.shapes[place][dim]
            for place, shape in enumerate(shapes)
            for dim, size in enumerate(shape)
        )
        return tuple(found) if fixed else None


@final
@dataclass(frozen=True)
class SymbolicShapes:
    """Holds all lengths of a program that vary, as expressions, and the conditions that they rest on.

    `places` maps a length to its place among `expressions`. Of calls of the `opaque` kinds of code
    (`kind_of_code`) the results have lengths that were seen, and not followed.
    """

    symbols: tuple[sympy.Expr, ...]
    expressions: tuple[sympy.Expr, ...]
    places: Mapping[SizeOf, int]
    guards: tuple[Any, ...]
    opaque: Collection[Any]

    def at(self, numbers: Sequence[int]) -> list[int] | None:
        """Returns the value of each expression; None where a condition does not hold."""
        values: dict[Any, Any] = {s: sympy.Integer(n) for s, n in zip(self.symbols, numbers, strict=True)}
        if any(guard.xreplace(values) != sympy.true for guard in self.guards):
            return None
        known = zip(self._polynomials, self.expressions, strict=True)
        return [
            _value_of(terms, numbers) if terms is not None else int(expression.xreplace(values))  # pyright: ignore[reportArgumentType]
            for terms, expression in known
        ]

    @cached_property
    def _polynomials(self) -> list[_Polynomial | None]:
        """The expressions that are sums of products of lengths, as most are: sympy takes half a millisecond
        for one.
        """
        return [_terms_of(expression, self.symbols) for expression in self.expressions]


_Polynomial = Sequence[tuple[Sequence[int], int]]
"""The exponents of the symbols in each product, and its factor."""


def _terms_of(expression: sympy.Expr, symbols: Sequence[sympy.Expr]) -> _Polynomial | None:
    if not expression.is_polynomial(*symbols):
        return None
    terms: list[Any] = sympy.Poly(expression, *symbols).terms()
    if not all(factor.is_Integer for _, factor in terms):
        return None
    return [(tuple(map(int, exponents)), int(factor)) for exponents, factor in terms]


def _value_of(terms: _Polynomial, numbers: Sequence[int]) -> int:
    return sum(
        factor * prod(n**exponent for n, exponent in zip(numbers, exponents, strict=True) if exponent)
        for exponents, factor in terms
    )


def symbolic_shapes(
    tape: Tape, known: Sequence[Tape], model: nn.Module, inputs: InputSymbols, device: torch.device | None
) -> SymbolicShapes | None:
    """Returns the shapes of a tape that was recorded at `inputs.shapes`, whose arguments follow lengths.

    `known` are recordings of it at other lengths. None where a value has no shape that torch can follow, or
    its number of dims or dtype is another one.
    """
    opaque: set[Any] = set()
    while True:
        try:
            return _Replay(tape, known, inputs, opaque).run(model, device or torch.device("cpu"))
        except _Fixed as fixed:
            opaque.add(fixed.kind)
        except Exception as error:  # Whatever an op makes of symbolic sizes.
            raise_interruption(error)
            return None


@final
class _Unfollowed(Exception):
    """Says that a value is of another kind with symbolic sizes."""


@final
class _Fixed(Exception):
    """Says that code of the user's, which runs as it is at each replay, fixes a length."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind


@final
class _Replay:
    def __init__(
        self, tape: Tape, known: Sequence[Tape], inputs: InputSymbols, opaque: Collection[Any]
    ) -> None:
        self._opaque = frozenset(opaque)
        self._tape, self._recorded, self._inputs = tape, (*known, tape), inputs
        self._env: dict[int, Any] = {}
        self._symbols: list[sympy.Expr] = []
        self._given: list[Any] = []
        self._weights: dict[str, Tensor] = {}
        self._known: dict[Any, Any] = {}
        self._shape_env = ShapeEnv(duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)

    def __getitem__(self, size: SizeOf) -> Any:
        """Returns a length, for the expressions among the arguments."""
        if size.kind == "given":
            return self._given[size.dim]
        tensor = self._env[size.slot]
        return (tensor.shape if size.kind == "size" else tensor.stride())[size.dim]

    def run(self, model: nn.Module, device: torch.device) -> SymbolicShapes:
        with (
            self._mode,
            grouped_products(),
            hidden_fakes(),
            quiet_fakes(),
            FakeModel(model, self._mode, device) as fakes,
        ):
            self._weights = {weight.name: tensor for weight, tensor in fakes.fakes_of_weights()}
            self._kinds = Kinds(fakes.modules)
            self._define_inputs()
            for slot, tensor in self._tape.constants.items():
                self._env[slot] = fake_like(tensor, self._mode, tensor.device)
            with torch.no_grad(), enable_python_dispatcher():
                for instruction in self._tape.instructions:
                    out = self._call(instruction, fakes.modules)
                    self._env.update(bindings(instruction.out, out))
        if self._shape_env.deferred_runtime_asserts:
            raise _Unfollowed
        return self._found()

    def _define_inputs(self) -> None:
        """Defines the inputs, contiguous, as they were recorded or nobody knows their strides."""
        numbers: dict[tuple[int, int], Any] = {}
        for index, group in enumerate(self._inputs.groups):
            place, dim = group[0]
            recorded, source = self._inputs.shapes[place][dim], ConstantSource(f"length{index}")
            symbol = self._shape_env.create_symbol(recorded, source, DimDynamic.DYNAMIC, None)
            self._symbols.append(symbol)
            number = self._shape_env.create_symintnode(symbol, hint=recorded, source=source)
            numbers |= dict.fromkeys(group, number)
        given = enumerate(self._inputs.shapes[-1])
        self._given = [numbers.get((len(self._tape.inputs), place), number) for place, number in given]
        for place, slot in enumerate(self._tape.inputs):
            meta = self._tape.metas[slot]
            sizes = [numbers.get((place, dim), size) for dim, size in enumerate(meta.shape)]
            self._env[slot] = torch.empty(sizes, dtype=meta.dtype, device=meta.device)

    def _call(self, instruction: Instruction, modules: Mapping[str, nn.Module]) -> Any:
        target = instruction.target
        args, kwargs = map_leaves(self._value, instruction.args), map_leaves(self._value, instruction.kwargs)
        key = _key_of(instruction, self._alike(target, modules), (args, kwargs))
        if key in self._known:
            return self._known[key]
        function = modules[target] if isinstance(target, str) else target
        kind = kind_of_code(function)
        if kind in self._opaque:
            return self._unseen(instruction)
        try:
            with ExitStack() as stack:
                for context in under(instruction.modes):
                    stack.enter_context(context)
                out = function(*args, **kwargs)
        except Exception as error:
            raise_interruption(error)
            raise _Unfollowed if kind is None else _Fixed(kind) from error
        if self._fixes():
            raise _Unfollowed if kind is None else _Fixed(kind)
        if key is not None:
            self._known[key] = out
        return out

    def _alike(self, target: Any, modules: Mapping[str, nn.Module]) -> Any:
        """Returns what is equal for calls of one function, or of modules that are built alike."""
        if not isinstance(target, str):
            return target
        module, kind = modules[target], self._kinds.repeated(target)
        named = (*module.named_parameters(), *module.named_buffers())
        keeps_state = target in self._tape.keepers
        return None if keeps_state else kind, *((name, w.shape, w.dtype) for name, w in named)

    def _fixes(self) -> bool:
        """Returns whether a length has been fixed, or two have been found to be one."""
        return any(symbol in self._shape_env.replacements for symbol in self._symbols)

    def _unseen(self, instruction: Instruction) -> Any:
        """Returns the results of a call into which nobody looks: a length of theirs is taken for that length
        of an argument which was the same whenever it was recorded. OpaqueCalls asks whether it is at others.
        """
        numbers: dict[tuple[int, ...], Any] = {}
        for slot in instruction.reads():
            for dim, size in enumerate(self._env[slot].shape):
                numbers.setdefault(tuple(tape.metas[slot].shape[dim] for tape in self._recorded), size)

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            metas = [tape.metas[leaf.slot] for tape in self._recorded]
            columns = list(zip(*(meta.shape for meta in metas), strict=True))
            if not all(_is_contiguous(meta) for meta in metas):
                raise _Unfollowed
            sizes: list[Any] = [c[0] if len({*c}) == 1 else numbers.get(c) for c in columns]
            if None in sizes:
                raise _Unfollowed
            return torch.empty(tuple(sizes), dtype=metas[-1].dtype, device=metas[-1].device)

        return map_leaves(made, instruction.out)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self._env[leaf.slot]
        if isinstance(leaf, Weight):
            return self._weights[leaf.name]
        if not isinstance(leaf, NumberInput):
            return leaf
        # What is no length is no size of a result either: recordings have tried others.
        recorded = leaf.value()
        return leaf.value(self) if isinstance(recorded, int) else recorded  # pyright: ignore[reportArgumentType]

    def _found(self) -> SymbolicShapes:
        expressions: dict[sympy.Expr, int] = {}
        places: dict[SizeOf, int] = {}
        recorded = zip(self._inputs.shapes[-1], self._given, strict=True)
        given = [(SizeOf(-1, place, "given", old), new) for place, (old, new) in enumerate(recorded)]
        found = (_lengths(slot, meta, self._env[slot]) for slot, meta in enumerate(self._tape.metas))
        for lengths in (given, *found):
            for size, number in lengths:
                if isinstance(number, torch.SymInt):
                    expression = number.node.expr
                    places[size] = expressions.setdefault(expression, len(expressions))
                elif number != size.recorded:
                    raise _Unfollowed
        guards = dict.fromkeys(guard.expr for guard in self._shape_env.guards)
        known = {*self._symbols}
        if any(each.free_symbols - known for each in (*expressions, *guards)):
            raise _Unfollowed  # It follows from values, such as how many entries of a mask are set.
        return SymbolicShapes(tuple(self._symbols), tuple(expressions), places, tuple(guards), self._opaque)


def _lengths(slot: int, meta: Meta, value: Any) -> list[tuple[SizeOf, Any]]:
    """Returns the sizes and strides of a slot, each with what it is in the replay."""
    if not isinstance(value, Tensor) or value.dtype != meta.dtype or value.ndim != len(meta.shape):
        raise _Unfollowed
    sizes = zip(meta.shape, value.shape, strict=True)
    found = [(SizeOf(slot, dim, "size", old), new) for dim, (old, new) in enumerate(sizes)]
    if value.layout is torch.strided:
        strides = zip(meta.stride, value.stride(), strict=True)
        found += [(SizeOf(slot, dim, "stride", old), new) for dim, (old, new) in enumerate(strides)]
    return found


def _is_contiguous(meta: Meta) -> bool:
    step, expected = 1, list[int]()
    for size in reversed(meta.shape):
        expected.insert(0, step)
        step *= max(size, 1)
    return meta.stride == tuple(expected)


def _key_of(instruction: Instruction, target: Any, arguments: Any) -> Any:
    """Returns what is equal for calls whose results have equal shapes; None where that is not known."""
    if instruction.writes or (instruction.is_leaf and target[0] is None):
        return None
    parts = [_kind_of(leaf) for leaf in leaves(arguments)]
    try:
        key = target, instruction.modes, repr(map_leaves(_place_of, arguments)), tuple(parts)
        hash(key)
    except Exception as error:  # What the user's own objects do where they are compared or written.
        raise_interruption(error)
        return None
    return key


def _place_of(leaf: Any) -> str:
    return type(leaf).__name__


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype, leaf.device
    return str(leaf) if isinstance(leaf, torch.SymInt) else (type(leaf), leaf)
