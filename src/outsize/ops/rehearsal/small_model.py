"""Makes a model small without losing a kind of layer: the model of a rehearsal.

Three things are tried, and each is proven by building the model on meta and recording it:

1. fewer layers: numbers that count a list of modules (`num_hidden_layers` 80 -> 4), with at least as many as
   there are stages, and so many that every kind of module is still there;
2. narrower ones: all other numbers together (`hidden_size` 8192 -> 32), by one rule for each: what an axis
   divides evenly it still divides evenly, and what it does not, it does not (kv heads below tp); counts that
   differ keep their order (more heads than kv heads, more experts than a token chooses);
3. repeated children of nn.Sequential and nn.ModuleList are left out, where a model has no such numbers.

Then the example batch becomes smaller in the same way. What is proven is that the units of the recorded
program are of the same kinds (small_plan.kind_of) and that the small meshes can divide it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from outsize.api.options import CaseOptions
from outsize.api.problem import case_of, styled, with_lora
from outsize.api.records import Lora
from outsize.axes.axis import Axis
from outsize.axes.registry import AXES, DIVIDING
from outsize.capture.models.load import example, load
from outsize.capture.models.losses import Objective, objective
from outsize.errors import BadOption
from outsize.errors.interruptions import suppressed
from outsize.ir.answers.runs.rehearsal import SmallerNumber
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.ops.rehearsal.settings import Name, Numbers, Settings, named, settings_of
from outsize.ops.rehearsal.small_plan import kinds_of
from outsize.program.tree import tensors_in
from outsize.train.measure.training_case import TrainingCase

# A small model has no more parameters; ranks and the plain loop hold sixteen bytes of each.
MOST_PARAMETERS: Final = 100_000_000
# Numbers below count what stays as it is (channels, layers of a projection).
_LEAST_WIDTH: Final = 8
# Widths begin here, and counts (heads, experts) at two.
_NARROW: Final = 32
# Up to here a number may count something whose order with others matters: heads and kv heads, experts and
# choices.
_MOST_COUNT: Final = 512
_NUMBER: Final = re.compile(r"\d+")
# The standard deviation of adapters, as of most weights of transformers.
_DRAWN: Final = 0.02

Divided = Sequence[tuple[int, int]]


@final
@dataclass(frozen=True)
class SmallModel:
    """Says how the model is built: a MODEL spec, one sample's shape, the modules that are left out of it,
    and the adapters that peft puts on the rest.
    """

    spec: str
    input: str | None
    seed: int
    dropped: tuple[str, ...] = ()
    lora: Lora = field(default_factory=Lora)

    def made(self, batch: int, *, meta: bool = False, as_it_is: bool = False) -> BuiltModel:
        """Returns the model with an example batch and its loss, in float32 unless `as_it_is`. Raises what
        building raises.
        """
        bare = load(self.spec, meta=meta, seed=self.seed)
        _drop(bare, self.dropped)
        if not as_it_is:
            bare = bare.float()
        args, kwargs = example(bare, self.input, batch, self.seed, spec=self.spec)
        wanted = Objective() if "labels" in kwargs else objective(bare, args, kwargs, self.seed)
        return BuiltModel(_adapted(bare, self.lora, self.seed), args, kwargs, wanted, bare)


@final
@dataclass(frozen=True)
class BuiltModel:
    """Holds a model with its example batch and its loss; `bare` is the model without adapters."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objective: Objective
    bare: nn.Module

    @property
    def case(self) -> TrainingCase:
        """Returns what is recorded and run."""
        loss: CaseOptions = {"loss_fn": self.objective.loss_fn, "target": self.objective.target}
        return case_of(self.model, self.args, self.kwargs, loss)

    @property
    def parameters(self) -> int:
        """Returns the number of parameters."""
        return sum(weight.numel() for weight in self.model.parameters())


@final
@dataclass(frozen=True)
class Shrunken:
    """Is the small model with what became smaller, and the kinds of units that it lacks."""

    small: SmallModel
    graph: ModelGraph
    parameters: int
    changes: tuple[SmallerNumber, ...]
    missing: tuple[str, ...]


@final
@dataclass(frozen=True)
class ModelShrinker:
    """Makes a model small for a plan and its small meshes.

    `whole` is the recorded model that the plan is for; `stages` is how many stages the worlds have at most;
    `tell` is told what is done.
    """

    plan: Plan
    worlds: Sequence[Axes]
    whole: ModelGraph
    stages: int
    folder: Path
    tell: Callable[[str], None] = field(default=lambda _: None)
    recorded: dict[SmallModel, ModelGraph] = field(default_factory=dict, compare=False)

    def shrunken(self, large: SmallModel, model: nn.Module) -> Shrunken:
        """Returns the small model of `model`, which is on meta and has no adapters. Raises BadOption where it
        cannot become small enough.
        """
        settings = settings_of(large.spec, model, self.folder)
        small, changes = large, dict[Name, int]()
        if settings is not None:
            for changes in self._fewer_layers(settings, model):
                found = self._narrower(settings, changes, large)
                if found is not None:
                    small, changes = found
                    break
            else:
                changes = {}
        if small == large:
            small = self._without_repeats(large, model)
        small, shape = self._with_small_batch(small)
        graph = self._recorded(small, insists=True)
        assert graph is not None
        parameters = small.made(self._samples, meta=True).parameters
        if parameters > MOST_PARAMETERS:
            raise _too_large(large.spec, parameters)
        before = {} if settings is None else settings.numbers
        numbers = [
            SmallerNumber(name=named(name), before=before[name], now=now)
            for name, now in changes.items()
            if before[name] != now
        ]
        missing = sorted(" ".join(kind) for kind in kinds_of(self.whole) - kinds_of(graph))
        return Shrunken(small, graph, parameters, (*numbers, *shape), tuple(missing))

    # -- numbers ------------------------------------------------------------------------------------

    def _fewer_layers(self, settings: Settings, model: nn.Module) -> Iterator[dict[Name, int]]:
        """Yields smaller depths, the least first, with which every kind of module is there; at last the
        depths that the model has.
        """
        depths = _depths(settings, model)
        kinds, tried = _module_kinds(model), list[dict[Name, int]]()
        for level in _levels(max(2, self.stages), max(depths.values(), default=0)):
            fewer = {name: self._next(v, min(v, level)) or v for name, v in depths.items()}
            if fewer in tried:
                continue
            tried.append(fewer)
            built = _built(settings.spec(fewer))
            if built is not None and _module_kinds(built) >= kinds:
                yield fewer
        yield {}

    def _narrower(
        self, settings: Settings, depths: Mapping[Name, int], large: SmallModel
    ) -> tuple[SmallModel, dict[Name, int]] | None:
        """Returns the model with these depths, and all other numbers as small as they may be together; else
        one by one; None where not even the depths can be had.
        """
        widths = {n: v for n, v in settings.numbers.items() if n not in depths and v >= _LEAST_WIDTH}

        for level in (1, 2, 4, 8):
            changed = {**depths, **self._narrow(settings.numbers, widths, level)}
            if (small := self._with_numbers(settings, changed, large)) is not None:
                return small, changed
        changed, small = dict(depths), self._with_numbers(settings, depths, large)
        if small is None:
            return None
        for name in sorted(widths, key=lambda each: -widths[each]):
            for level in (1, 4, 16):
                now = self._next(widths[name], _least(widths[name]) * level)
                attempt = {**changed, name: widths[name] if now is None else now}
                smaller = attempt[name] < widths[name]
                found = self._with_numbers(settings, attempt, large) if smaller else None
                if found is not None:
                    changed, small = attempt, found
                    break
        return small, changed

    def _with_numbers(self, settings: Settings, changed: Numbers, large: SmallModel) -> SmallModel | None:
        """Returns the model with these numbers, where it keeps what it has to. A size of its input that is as
        large as a number follows it, or stays, or is left to the model.
        """
        spec, before = settings.spec(changed), settings.numbers
        following = {before[name]: now for name, now in changed.items()}
        inputs = dict.fromkeys((_with_sizes(large.input, following), large.input, None))
        models = (replace(large, spec=spec, input=shape) for shape in inputs)
        return next((small for small in models if self._keeps(small)), None)

    def _narrow(self, numbers: Numbers, widths: Numbers, level: int) -> dict[Name, int]:
        """Returns the widths made small; equal ones stay equal, and counts keep their order, also beside
        numbers that stay.
        """
        small = {value: value for value in numbers.values() if value < _LEAST_WIDTH}
        for value in sorted(set(widths.values())):
            least = _least(value) * level
            if value <= _MOST_COUNT and small:
                least = max(least, 1 + max(small.values()))
            now = self._next(value, least)
            small[value] = value if now is None else min(now, value)
        return {name: small[value] for name, value in widths.items()}

    def _next(self, value: int, least: int) -> int | None:
        """Returns the first number from `least` on that the small axes divide as the plan's divide `value`,
        and that is a power of two, if there is such a one, so that most numbers divide each other.
        """
        near = range(least, min(value, 2 * least + 64) + 1)
        alike = [now for now in near if self._divides_alike(value, now)]
        return next((now for now in alike if now.bit_count() == 1), next(iter(alike), None))

    def _divides_alike(self, value: int, now: int) -> bool:
        return all((value % size == 0) == (now % small == 0) for size, small in self._divided)

    @property
    def _divided(self) -> Divided:
        """Returns the sizes of what divides weights or tokens, in the plan and in each world."""
        axes = [(axis,) for axis in AXES if axis.divides_weights is not None or axis.divides_tokens]
        pairs = set[tuple[int, int]]()
        for along in (*axes, DIVIDING):
            size = _product(self.plan.axes, along)
            parts = {_product(world, along) for world in self.worlds}
            pairs |= {(size, small) for small in parts if small > 1}
        return sorted(pairs)

    # -- repeated modules ---------------------------------------------------------------------------

    def _without_repeats(self, large: SmallModel, model: nn.Module) -> SmallModel:
        """Returns the model without repeated children, so many of which stay that each stage has some."""
        repeats = list(_repeats(model))
        for kept in _levels(1, max((len(run) for run in repeats), default=0)):
            names = tuple(name for run in repeats for name in run[kept:])
            if not names:
                break
            small = replace(large, dropped=names)
            graph = self._recorded(small)
            if graph is not None and self._is_enough(graph):
                return small
        return large

    def _is_enough(self, graph: ModelGraph) -> bool:
        return len(graph.units) >= 2 * self.stages and kinds_of(graph) >= kinds_of(self.whole)

    # -- the batch ----------------------------------------------------------------------------------

    def _with_small_batch(self, small: SmallModel) -> tuple[SmallModel, tuple[SmallerNumber, ...]]:
        """Returns the model with shorter sequences or smaller images, as far as it takes them."""
        shape = _sample_shape(small.made(self._samples, meta=True))
        if shape is None:
            return small, ()
        # Of an image of 32 strides leave one pixel, over which BatchNorm has no statistics.
        first = _NARROW if len(shape) == 1 else 2 * _NARROW
        for level in (first, 2 * first, 4 * first):
            now = tuple(size if size < _NARROW else self._next(size, level) or size for size in shape)
            if now == shape:
                break
            attempt = replace(small, input="x".join(map(str, now)))
            if self._keeps(attempt):
                changes = (
                    SmallerNumber(name=f"--input [{place}]", before=before, now=after)
                    for place, (before, after) in enumerate(zip(shape, now, strict=True))
                    if before != after
                )
                return attempt, tuple(changes)
        return small, ()

    # -- proof --------------------------------------------------------------------------------------

    def _keeps(self, small: SmallModel) -> bool:
        """Tells whether a model is recorded, has all kinds of units, and can be divided as the worlds do."""
        self.tell(f"trying a smaller {small.spec.partition('?')[0]}")
        graph = self._recorded(small)
        return graph is not None and self._is_enough(graph)

    def _recorded(self, small: SmallModel, *, insists: bool = False) -> ModelGraph | None:
        """Returns the model, recorded once; None, or its error where one `insists`, if it is none for these
        worlds.
        """
        if small in self.recorded:
            return self.recorded[small]
        with nullcontext() if insists else suppressed():
            self.recorded[small] = _recorded(small, self._samples, self.plan, self.worlds)
        return self.recorded.get(small)

    @property
    def _samples(self) -> int:
        return min(2, self.plan.microbatch_size)


def _recorded(small: SmallModel, samples: int, plan: Plan, worlds: Sequence[Axes]) -> ModelGraph:
    case = small.made(samples, meta=True).case
    case = replace(case, slices=plan.slices)
    captured = case.captured(samples)
    for world in worlds:
        if captured.graph.form == "tape":
            styled(case, captured, world)
    return case.in_pieces(plan.loss_pieces, plan.module_pieces).captured(samples).graph


def _depths(settings: Settings, model: nn.Module) -> dict[Name, int]:
    """Returns the numbers that count a list of modules: as many as the list has, and with fewer the model has
    fewer modules.
    """
    lengths = {len(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    count = sum(1 for _ in model.modules())

    def counts(name: Name, value: int) -> bool:
        built = _built(settings.spec({name: value // 2})) if value in lengths else None
        return built is not None and sum(1 for _ in built.modules()) < count

    return {name: value for name, value in settings.numbers.items() if counts(name, value)}


def _built(spec: str) -> nn.Module | None:
    """Returns a model on meta; None where its numbers do not fit each other."""
    with suppressed():
        return load(spec, meta=True)
    return None


def _adapted(model: nn.Module, lora: Lora, seed: int) -> nn.Module:
    """Returns the model with its adapters. They begin at zero, where no gradient would go past them, so they
    are drawn: the same in every process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = with_lora(model, lora)
        for weight in adapted.parameters() if adapted is not model else ():
            if weight.requires_grad and not weight.is_meta:
                nn.init.normal_(weight, std=_DRAWN)
    return adapted


def _product(axes: Axes, along: Iterable[Axis]) -> int:
    return prod(axes.of(axis) for axis in along)


def _with_sizes(shape: str | None, now: Mapping[int, int]) -> str | None:
    """Returns a shape in which sizes have become smaller."""
    if shape is None:
        return None
    return re.sub(r"\d+", lambda found: str(now.get(int(found[0]), int(found[0]))), shape)


def _least(value: int) -> int:
    return 2 if value <= 2 * _NARROW else _NARROW


def _levels(first: int, last: int) -> Iterator[int]:
    """Yields growing numbers up to the last one, in steps of half of them."""
    level = first
    while level < last:
        yield level
        level += max(1, level // 2)


def _module_kinds(model: nn.Module) -> set[tuple[object, ...]]:
    """Returns the kinds of modules: place without numbers, class, and the words and switches that it has."""
    return {
        (_NUMBER.sub("*", name), type(module), *_switches(module)) for name, module in model.named_modules()
    }


def _switches(module: nn.Module) -> list[tuple[str, object]]:
    values = vars(module).items()
    return sorted((name, value) for name, value in values if type(value) in (bool, str))


def _repeats(model: nn.Module) -> Iterator[list[str]]:
    """Yields the runs of equal neighbours in lists of modules, outermost ones alone."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or name.startswith(tuple(inside)):
            continue
        run, before = list[str](), None
        for child_name, child in module.named_children():
            kind = _structure(child)
            if run and kind == before:
                run.append(f"{name}.{child_name}".lstrip("."))
            else:
                if len(run) > 1:
                    yield run
                run = [f"{name}.{child_name}".lstrip(".")]
            before = kind
        if len(run) > 1:
            inside.append(f"{name}.")
            yield run


def _structure(module: nn.Module) -> tuple[object, ...]:
    """Returns what makes two modules equal: classes, switches, and the shapes of weights."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    inside = tuple((name, type(m), *_switches(m)) for name, m in module.named_modules())
    return shapes, inside


def _drop(model: nn.Module, names: Sequence[str]) -> None:
    """Leaves modules out of the lists that have them."""
    for name in reversed(names):
        place, _, last = name.rpartition(".")
        container = model.get_submodule(place)
        if isinstance(container, nn.ModuleList):
            del container[int(last)]  # it counts its entries anew
        else:
            del container._modules[last]


def _sample_shape(built: BuiltModel) -> tuple[int, ...] | None:
    """Returns the shape of one sample, where the model takes one tensor."""
    labels = {"labels", "decoder_input_ids"}
    given = (*built.args, *(value for name, value in built.kwargs.items() if name not in labels))
    tensors = tensors_in(given)
    return tuple(tensors[0].shape[1:]) if len(tensors) == 1 and tensors[0].ndim > 1 else None


def _too_large(spec: str, parameters: int) -> BadOption:
    return BadOption(
        f"no small model could be made of {spec}: nothing says which of its numbers may be smaller",
        numbers=f"{parameters:,} parameters without repeated modules; a rehearsal takes {MOST_PARAMETERS:,}",
        next_step="a builder with numbers of its own, my_model:build?layers=4&width=64, or a config",
    )
