"""Problem: know the graph of a model of 80 equal layers at another batch size, and record only a few layers.

    G(a)   the whole model at size a, recorded
    g(a)   its first few layers at size a: does each unit of G(a) cost what its like costs in g(a)?
    g(c)   the same layers at size c: are its units and values those of g(a), with other figures?
    G(c)   G(a) with the figures of g(c)
    T(a)   G(a) with what tensor, context and expert parallelism divide of it: that of g(a), layer by layer

Like a unit of layer 7 is that of layer 2: the first two layers and the last one stand for themselves, since
what is saved first, or last, counts there. Where layers take turns (five of Gemma 3 attend to a window, then
one to all; every second one of another model has experts), those of a second period stand for all. Values are
compared by their producers, in order. If any of this does not hold (layers of several forms without a period,
a cache that grows with the layers, other cuts at that size), there is no answer, and the model is recorded
whole.

What an axis divides follows from the tape, in which each layer behind the first is a copy of it. Where layer
2 of the short model is divided as its layer 1 is, what enters layer 3 is divided as what enters layer 2, and
so on. So the tape of a long stack is not walked for it.

Complexity: O(units + values) for each size. Oracle:
tests/unit/capture/graph/test_shortened.py compares with graphs of which every layer was recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from types import NoneType
from typing import Any, Final, final

from torch import nn

from outsize.errors import OutsizeError
from outsize.ir.graph import ModelGraph, Parameter, ShardedFraction, Unit, Value
from outsize.ir.units.tensor_styles import ModuleStyle, TensorStyles
from outsize.program.objects import MODULE_TABLES

# Shorter stacks are left as they are.
LEAST: Final = 16
# What is divided of fewer layers is found out sooner than a few of them are recorded.
LONG: Final = 48
_LONGEST_PERIOD: Final = 8

_UNIT_FIGURES: Final = tuple(
    sorted({*Unit.model_fields} - {"index", "name", "kind", "parameters", "divided", "in_sequence"})
)
_SHARE_FIGURES: Final = tuple(sorted({*ShardedFraction.model_fields} - {"parameters", "beside"}))
_VALUE_FIGURES: Final = ("shape", "size_bytes", "storage_bytes", "divided", "in_sequence")
_GRAPH_FIGURES: Final = ("batch_size", "input_bytes", "output_bytes")


@final
@dataclass(frozen=True)
class LayerStack:
    """Describes layers `first` to `end` - 1 of a list, of which each is like the one a `period` before it."""

    first: int
    end: int
    period: int = 1

    @property
    def alone(self) -> int:
        """Returns the first layers, which are like no others: the first of all, and of each turn."""
        return self.period + 1

    @property
    def short(self) -> int:
        """Returns the layers of the shortened stack, of which the last is the last one's like."""
        least = self.alone + self.period + 1
        return least + (self.end - self.first - least) % self.period

    def like(self, layer: int) -> int:
        """Returns the layer of the shortened stack that stands for this one of the whole stack."""
        number = layer - self.first
        if layer == self.end - 1:
            return self.first + self.short - 1
        if number < self.alone:
            return layer
        return self.first + self.alone + (number - self.alone) % self.period

    @property
    def standing(self) -> dict[int, list[int]]:
        """Returns the layers of the whole stack by the one of the shortened stack that stands for them."""
        found: dict[int, list[int]] = {}
        for layer in range(self.first, self.end):
            found.setdefault(self.like(layer), []).append(layer)
        return found


@final
@dataclass(frozen=True)
class Stacks:
    """Holds the stacks of equal layers of a model, by the FQN of their list."""

    of: dict[str, LayerStack]
    # Each name is asked for at each size, several times.
    likes: dict[str, str] = field(default_factory=dict[str, str], repr=False, compare=False)
    places: dict[str, str] = field(default_factory=dict[str, str], repr=False, compare=False)

    @classmethod
    def in_model(cls, model: nn.Module) -> Stacks:
        """Returns the lists of modules that end with LEAST layers of one form, or of forms in turn, or more,
        outermost alone.

        A list may have None in the place of a layer; such places are no layers of any form.
        """
        stacks: dict[str, LayerStack] = {}
        for fqn, module in model.named_modules():
            inside = any(fqn.startswith(f"{outer}." if outer else "") for outer in stacks)
            if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
                layers = [*module._modules.values()]
                stack = _stack(layers)
                if stack is not None and [*module._modules] == [str(n) for n in range(len(layers))]:
                    stacks[fqn] = stack
        return cls(stacks)

    @contextmanager
    def shortened(self, model: nn.Module) -> Iterator[None]:
        """Leaves the first layers of each stack in the model, for a while."""
        lists = {model.get_submodule(fqn): stack for fqn, stack in self.of.items()}
        whole = {layers: layers._modules for layers in lists}
        try:
            for layers, stack in lists.items():
                layers._modules = dict(list(whole[layers].items())[: stack.first + stack.short])
            yield
        finally:
            for layers, modules in whole.items():
                layers._modules = modules

    def like(self, name: str) -> str:
        """Returns the name in the shortened model of what is like this in the whole one."""
        if name not in self.likes:
            self.likes[name] = self._renamed(name, lambda index, stack: str(stack.like(index)))
        return self.likes[name]

    def anywhere(self, name: str) -> str:
        """Returns the name without the number of the layer that it is in."""
        if name not in self.places:
            self.places[name] = self._renamed(
                name, lambda index, stack: str(index) if index < stack.first else "*"
            )
        return self.places[name]

    @property
    def length(self) -> int:
        """Returns the layers of all stacks."""
        return sum(stack.end - stack.first for stack in self.of.values())

    @property
    def is_long(self) -> bool:
        """Returns whether a few of the layers had better be looked at first; in a list that is the model
        itself, names are mere numbers.
        """
        return self.length >= LONG and "" not in self.of

    def number(self, name: str) -> tuple[str, int] | None:
        """Returns the stack that a name is in, and the number of its layer; None outside of all stacks."""
        for fqn, stack in self.of.items():
            found = re.match(rf"{re.escape(fqn)}\.(\d+)(?!\w)", name)
            if found is not None and int(found[1]) >= stack.first:
                return fqn, int(found[1])
        return None

    def moved(self, text: str, short: str, whole: str) -> str:
        """Returns a text about a name of the shortened model as one about its like in the whole one.

        Raises OtherLayer where it mentions a layer that neither of them is in.
        """
        here, there = self.number(short), self.number(whole)
        for fqn, stack in self.of.items():
            alone = {stack.first + n: stack.first + n for n in range(stack.alone)}
            ends = {stack.first + stack.short - 1: stack.end - 1} | alone
            numbers = (
                {here[1]: there[1]} if here and there and here[0] == fqn else ends if here is None else {}
            )

            def number(
                found: re.Match[str], numbers: dict[int, int] = numbers, first: int = stack.first
            ) -> str:
                old = int(found[2])
                if old >= first and old not in numbers:
                    raise OtherLayer
                return f"{found[1]}{numbers.get(old, old)}"

            text = re.sub(rf"(?<![\w.])({re.escape(fqn)}\.)(\d+)(?!\w)", number, text)
        return text

    def _renamed(self, name: str, number: Callable[[int, LayerStack], str]) -> str:
        for fqn, stack in self.of.items():
            prefix = f"{fqn}." if fqn else ""
            found = re.match(r"\d+", name[len(prefix) :]) if name.startswith(prefix) else None
            if found is not None:
                rest = name[len(prefix) + found.end() :]
                return prefix + number(int(found[0]), stack) + rest
        return name


@final
class OtherLayer(Exception):
    """Says that something about one layer mentions another one, so it is not known of their likes."""


def _form(layer: nn.Module) -> tuple[object, ...]:
    """Returns what layers of a stack have in common: classes and weights of all modules, by name. Where the
    first layers of a list differ (DeepSeek-V3 has three without experts), the stack begins behind them.
    """
    classes = tuple((name, type(module)) for name, module in layer.named_modules())
    return (classes, tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters()))


def _settings(layer: nn.Module) -> tuple[object, ...]:
    """Returns what may make layers of one form take turns: the words and switches of all modules."""
    return tuple(
        (name, key, value if isinstance(value, bool | str) else type(value))
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | str | NoneType | int | float) and key not in MODULE_TABLES
    )


def _stack(layers: Sequence[nn.Module | None]) -> LayerStack | None:
    """Returns the stack that a list ends with: of one form and one period, else of forms in turn."""
    forms = [None if layer is None else _form(layer) for layer in layers]
    same = _periodic_tail(forms, 1)
    if same >= LEAST:
        settings = [None if layer is None else _settings(layer) for layer in layers[-same:]]
        # Settings in which no two layers agree (a number, a name) are no turns: figures decide.
        periods = (p for p in range(1, _LONGEST_PERIOD + 1) if _periodic_tail(settings, p) == same)
        return _enough(len(layers) - same, len(layers), next(periods, 1))
    tails = {period: _periodic_tail(forms, period) for period in range(2, _LONGEST_PERIOD + 1)}
    period = max(tails, key=lambda one: tails[one])
    return _enough(len(layers) - tails[period], len(layers), period)


def _enough(first: int, end: int, period: int) -> LayerStack | None:
    stack = LayerStack(first, end, period)
    return stack if end - first >= max(LEAST, stack.short + period) else None


def _periodic_tail(kinds: Sequence[object], period: int) -> int:
    """Returns how many kinds at the end are each the one that comes a period later."""
    later = [*kinds[period:], *kinds[-period:]]
    places = range(len(kinds) - 1, -1, -1)
    other = (n for n in places if kinds[n] is None or kinds[n] != later[n])
    return len(kinds) - 1 - next(other, -1)


@final
class SizedGraphs:
    """Knows the graph of a model at any size that a shortened model has, once the whole was recorded.

    `whole` and `short` record the whole and the shortened model at a size. `recorded` are sizes at which the
    whole was recorded before. `bare` returns both graphs without what is added to them, or is None where
    nothing is.
    """

    def __init__(
        self,
        stacks: Stacks,
        whole: Callable[[int], ModelGraph],
        short: Callable[[int], ModelGraph],
        recorded: Sequence[int] = (),
        bare: Callable[[int], tuple[ModelGraph, ModelGraph]] | None = None,
    ) -> None:
        self._stacks, self._whole, self._short, self._bare = stacks, whole, short, bare
        self._recorded = set(recorded)
        self._known: list[tuple[ModelGraph, ModelGraph | None]] = []
        self._useful = bool(stacks.of)

    def at(self, samples: int) -> ModelGraph:
        """Returns the graph at this size. Raises what recording the whole model raises."""
        if self._useful and not self._known and self._recorded:
            self._known.append((self._recorded_whole(min(self._recorded)), None))
        derived = self._derived(samples) if self._useful and samples not in self._recorded else None
        if derived is not None:
            return derived
        known = next((graph for graph, _ in self._known if graph.batch_size == samples), None)
        graph = self._recorded_whole(samples) if known is None else known
        self._recorded.add(samples)
        if all(known.batch_size != graph.batch_size for known, _ in self._known):
            self._known.append((graph, None))
        return graph

    def _recorded_whole(self, samples: int) -> ModelGraph:
        """Returns the graph of the whole model; what is added to a long stack is that of a few layers."""
        added = self._with_added(samples) if self._useful and self._stacks.is_long else None
        return self._whole(samples) if added is None else added

    def _with_added(self, samples: int) -> ModelGraph | None:
        if self._bare is None:
            return None
        try:
            graph, bare = self._bare(samples)
            if not _stands_for(bare, graph, self._stacks):
                return None
            return _with_added(graph, self._short(samples), self._stacks)
        except (OtherLayer, OutsizeError):  # The whole model is asked, whose own error it then is.
            return None

    def _derived(self, samples: int) -> ModelGraph | None:
        if not self._known:
            return None
        try:
            return self._from_short(self._short(samples))
        except OutsizeError:  # The whole model is asked, whose own error it then is.
            return None

    def _from_short(self, here: ModelGraph) -> ModelGraph | None:
        for place, (graph, short) in enumerate(self._known):
            if short is None:
                short = self._short(graph.batch_size)
                if not _stands_for(short, graph, self._stacks):
                    self._useful = False
                    return None
                self._known[place] = graph, short
            if _structure(short) == _structure(here):
                return _with_figures(graph, here, self._stacks)
        return None


def _stands_for(short: ModelGraph, graph: ModelGraph, stacks: Stacks) -> bool:
    """Returns whether the whole graph is the short one with more layers."""
    if graph.form != "tape" or short.form != "tape" or not _notes_are_like(short, graph, stacks):
        return False
    if any(getattr(graph, name) != getattr(short, name) for name in _GRAPH_FIGURES):
        return False
    units = {unit.name: unit for unit in short.units}
    likes = {stacks.like(unit.name) for unit in graph.units}
    # Of layers in turn, some of the shortened stack may stand for none.
    if not likes <= units.keys() or not all(map(stacks.number, units.keys() - likes)):
        return False
    if not all(_is_like(units[stacks.like(unit.name)], unit, stacks) for unit in graph.units):
        return False
    values, pairs = _by_producer(short), _by_producer(graph)
    places = {unit.name: unit.index for unit in short.units}
    return all(
        len(mine) == len(values.get(there := places[stacks.like(graph.units[producer].name)], ()))
        and all(_same(a, short, b, graph, stacks) for a, b in zip(values.get(there, ()), mine, strict=True))
        for producer, mine in pairs.items()
    )


def _notes_are_like(short: ModelGraph, graph: ModelGraph, stacks: Stacks) -> bool:
    """Returns whether the notes are the same, those that begin with a module's name by the module's like."""

    def like(note: str) -> str:
        name, colon, text = note.partition(": ")
        return f"{stacks.like(name)}{colon}{text}"

    return graph.notes == short.notes or {*map(like, graph.notes)} == {*short.notes}


def _is_like(short: Unit, unit: Unit, stacks: Stacks) -> bool:
    def names(of: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(stacks.like, of))

    figures = all(getattr(short, name) == getattr(unit, name) for name in _UNIT_FIGURES)
    same = figures and short.kind == unit.kind and short.parameters == names(unit.parameters)
    shares = ((short.divided, unit.divided), (short.in_sequence, unit.in_sequence))
    return same and all(
        (a.parameters, a.beside) == (names(b.parameters), names(b.beside))
        and _figures(a, _SHARE_FIGURES) == _figures(b, _SHARE_FIGURES)
        for a, b in shares
    )


def _names(share: ShardedFraction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return share.parameters, share.beside


def _by_producer(graph: ModelGraph) -> dict[int, list[Value]]:
    values: dict[int, list[Value]] = {}
    for value in graph.values:
        values.setdefault(value.producer, []).append(value)
    return values


def _same(short_value: Value, short: ModelGraph, value: Value, graph: ModelGraph, stacks: Stacks) -> bool:
    """Returns whether two values have the same figures, and users that are alike."""

    def users(of: Value, where: ModelGraph) -> list[set[str]]:
        saved = (of.saved_by,) if of.saved_by >= 0 else ()
        return [
            {stacks.anywhere(where.units[unit].name) for unit in units}
            for units in (of.consumers, saved, of.also_saved_by)
        ]

    names = (*_VALUE_FIGURES, "dtype", "requires_grad")
    figures = _figures(short_value, names) == _figures(value, names)
    return figures and users(short_value, short) == users(value, graph)


def _figures(of: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(of, name) for name in names)


def _structure(graph: ModelGraph) -> Any:
    """Returns what the graphs of a model at two sizes have to have in common."""
    storages: dict[int, int] = {}
    values = [
        (
            *(value.dtype, value.requires_grad, value.producer, value.consumers, value.saved_by),
            *(value.also_saved_by, storages.setdefault(value.storage, len(storages))),
        )
        for value in graph.values
    ]
    units = [
        (
            unit.name,
            unit.kind,
            unit.parameters,
            *(_names(share) for share in (unit.divided, unit.in_sequence)),
        )
        for unit in graph.units
    ]
    facts = graph.form, graph.fingerprint, graph.parameters, graph.notes, graph.tensor, graph.rows
    return facts, units, values


def _with_figures(graph: ModelGraph, short: ModelGraph, stacks: Stacks) -> ModelGraph:
    """Returns the whole graph with the figures of a short one of the same structure."""
    units = {unit.name: unit for unit in short.units}
    values = _by_producer(short)
    turn: dict[int, int] = {}
    likes = [units[stacks.like(unit.name)] for unit in graph.units]
    made_units = [_refigured(unit, like) for unit, like in zip(graph.units, likes, strict=True)]
    made_values: list[Value] = []
    for value in graph.values:
        turn[value.producer] = turn.get(value.producer, -1) + 1
        like = values[likes[value.producer].index][turn[value.producer]]
        figures: dict[str, Any] = {name: getattr(like, name) for name in _VALUE_FIGURES}
        # A stack of kernels saves fewer of them (planner/costs/kernel_stacks.py).
        unsaved = {"saved_by": -1, "also_saved_by": ()} if like.saved_by < 0 else {}
        made_values.append(value.model_copy(update=figures | unsaved))
    # model_copy is avoided, since it would copy what was cached.
    fields: dict[str, Any] = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields |= {name: getattr(short, name) for name in _GRAPH_FIGURES}
    fields |= {"units": tuple(made_units), "values": tuple(made_values)}
    fields |= {"parameters": tuple(_in_bytes_of(short, stacks, graph.parameters))}
    return ModelGraph(**fields)


def _in_bytes_of(short: ModelGraph, stacks: Stacks, parameters: Sequence[Parameter]) -> Iterator[Parameter]:
    """Yields the parameters in the bytes that their likes are kept in."""
    known = short.parameter_of
    for parameter in parameters:
        like = known[stacks.like(parameter.names[0])]
        same = like.shape != parameter.shape or like.size_bytes == parameter.size_bytes
        yield parameter if same else parameter.model_copy(update={"size_bytes": like.size_bytes})


def _refigured(unit: Unit, like: Unit) -> Unit:
    update: dict[str, Any] = {name: getattr(like, name) for name in _UNIT_FIGURES}
    for name in ("divided", "in_sequence"):
        share: ShardedFraction = getattr(unit, name)
        figures = {figure: getattr(getattr(like, name), figure) for figure in _SHARE_FIGURES}
        update[name] = share.model_copy(update=figures)
    return unit.model_copy(update=update)


def _with_added(graph: ModelGraph, short: ModelGraph, stacks: Stacks) -> ModelGraph:
    """Returns the whole graph with what was added to the short one that stands for it. Raises OtherLayer."""
    if any(
        _shares(short, fqn, stack.first + stack.alone - 1)
        != _shares(short, fqn, stack.first + stack.alone - 1 + stack.period)
        for fqn, stack in stacks.of.items()
    ):
        raise OtherLayer
    likes = {unit.name: unit for unit in short.units}
    whole = _with_figures(graph, short, stacks)
    experts = {name: parameter.experts for parameter in short.parameters for name in parameter.names}
    parameters = [(p, experts[stacks.like(p.names[0])]) for p in whole.parameters]
    fields = {name: getattr(whole, name) for name in type(whole).model_fields}
    fields |= {
        "units": tuple(_with_names(unit, likes[stacks.like(unit.name)], stacks) for unit in whole.units),
        "parameters": tuple(
            p.model_copy(update={"experts": n}) if n != p.experts else p for p, n in parameters
        ),
        "tensor": None if short.tensor is None else _of_all_layers(short.tensor, stacks),
        "rows": short.rows,
        "bucket_bytes": short.bucket_bytes,
    }
    return ModelGraph(**fields)


def _shares(graph: ModelGraph, fqn: str, layer: int) -> list[Any]:
    """Returns what is divided of the units of a layer."""
    units = [unit for unit in graph.units if unit.name.startswith(f"{fqn}.{layer}.")]
    return [_figures(share, _SHARE_FIGURES) for u in units for share in (u.divided, u.in_sequence)]


def _with_names(unit: Unit, like: Unit, stacks: Stacks) -> Unit:
    """Returns the unit with the names of the weights that are divided of its like."""
    update: dict[str, ShardedFraction] = {}
    for name in ("divided", "in_sequence"):
        share: ShardedFraction = getattr(unit, name)
        names = {
            kind: tuple(stacks.moved(n, like.name, unit.name) for n in getattr(getattr(like, name), kind))
            for kind in ("parameters", "beside")
        }
        update[name] = share.model_copy(update=names)
    return unit.model_copy(update=update)


def _of_all_layers(styles: TensorStyles, stacks: Stacks) -> TensorStyles:
    """Returns the styles of the whole model; the modules of a layer are beside each other."""
    modules: list[ModuleStyle] = []
    by_stack = groupby(styles.modules, lambda style: (stacks.number(style.module) or ("",))[0])
    for fqn, together in by_stack:
        if fqn not in stacks.of:
            modules += (
                style.model_copy(update={"why": stacks.moved(style.why, style.module, style.module)})
                for style in together
            )
            continue
        standing, layers = stacks.of[fqn].standing, dict[int, list[ModuleStyle]]()
        for style in together:
            place = stacks.number(style.module)
            assert place is not None, "a module of a stack is in one of its layers"
            short = f"{fqn}.{place[1]}"
            for number in standing.get(place[1], ()):
                name = f"{fqn}.{number}{style.module[len(short) :]}"
                why = stacks.moved(style.why, style.module, name)
                layers.setdefault(number, []).append(style.model_copy(update={"module": name, "why": why}))
        modules += (style for number in sorted(layers) for style in layers[number])
    return styles.model_copy(update={"modules": tuple(modules)})
