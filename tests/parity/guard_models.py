"""Models and losses that read a Python value of each kind, and what a user changes between two steps."""

from __future__ import annotations

import array
import contextvars
import copy
import functools
import itertools
import operator
import random
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
SCALE = 1.0
FACTOR = contextvars.ContextVar("FACTOR", default=1.0)
CENTER = torch.zeros(WIDTH)


@final
@dataclass
class Settings:
    """Values as a dataclass."""

    scale: float = 1.0


@final
class Pair(NamedTuple):
    """Values in the fields of a tuple."""

    scale: float


@final
class Slotted:
    """Values in slots."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@final
class Doubling(list[float]):
    """A list that yields other numbers than it holds."""

    def __iter__(self) -> Iterator[float]:
        return (2 * number for number in super().__iter__())


@final
class Plain:
    """A class whose objects become Other."""

    def scale(self) -> float:
        return 1.0


@final
class Other:
    """What objects of Plain become."""

    def scale(self) -> float:
        return 0.5


@final
class Switch:
    """What models and losses read; a fresh one for each run."""

    of_class: ClassVar[float] = 1.0

    def __init__(self) -> None:
        self.number = 1.0
        self.numbers = [1.0, 2.0]
        self.pair = (1.0, 2.0)
        self.table = {"scale": 1.0}
        self.names = {"relu"}
        self.namespace = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.settings, self.slotted, self.fields = Settings(), Slotted(), Pair(1.0)
        self.of_thread = threading.local()
        self.of_thread.scale = 1.0
        self.scalar, self.array = np.float32(1.0), np.ones(WIDTH, dtype=np.float32)
        self.function: Callable[[Tensor], Tensor] = F.gelu
        self.partial = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.optional: Any = None
        self.tensor = torch.ones(WIDTH)
        self.calls, self.log, self.mean = 0, list[int](), torch.ones(())
        self.draw = torch.Generator().manual_seed(3)
        self.pair_of_objects = [SimpleNamespace(scale=1.0), SimpleNamespace(scale=2.0)]
        self.alone: Any = Slotless()
        self.reference = weakref.ref(self.alone)
        self.kept_weakly = weakref.WeakValueDictionary({"alone": self.alone})
        self.view, self.bytes = MappingProxyType(self.table), bytearray(b"\x01\x02")
        self.doubles = array.array("d", [1.0, 2.0])
        self.get_scale, self.get_nested = operator.attrgetter("scale"), operator.attrgetter("inner.scale")
        self.get_item = operator.itemgetter("scale")
        self.counter, self.cycle = itertools.count(1.0), itertools.cycle([1.0, 2.0, 3.0])
        self.rows = iter([float(n) for n in range(1, 99)])
        self.zipped = zip(itertools.count(1.0), iter(range(99)), strict=False)
        self.python_random, self.numpy_random = random.Random(3), np.random.default_rng(3)
        self.closure, self.set_closure = _closure()
        self.twin, self.set_twin = _closure()
        self.default = _default()
        self.doubling, self.kind, self.name = Doubling([1.0]), Plain(), "number"
        self.ordered = OrderedDict(first=1.0, last=2.0)

    @property
    def computed(self) -> float:
        return self.namespace.inner.scale


class Slotless:
    """An object that can be referred to weakly."""

    later: float

    def __init__(self) -> None:
        self.scale = 1.0


def _closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    beta = 1.0

    def apply(x: Tensor) -> Tensor:
        return x * beta

    def change(value: float) -> None:
        nonlocal beta
        beta = value

    return apply, change


def _default() -> Any:
    def apply(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    return apply


Use = Callable[[Switch, Tensor], Tensor]
Change = Callable[[Switch], Any]


def _branch(s: Switch, x: Tensor) -> Tensor:
    return x.relu() if "relu" in s.names else x


def _looped(s: Switch, x: Tensor) -> Tensor:
    for number in s.numbers:
        x = x * number
    return x


def _scale_of(value: Any) -> float:
    match value:
        case SimpleNamespace(scale=scale):
            return scale
        case _:
            return 1.0


def _first_scale(value: Any, scale: float) -> None:
    value.pair_of_objects[0].scale = scale


def _optional(s: Switch, x: Tensor) -> Tensor:
    return x if s.optional is None else x * s.optional.scale


def _set_global(name: str, value: Any) -> None:
    globals()[name] = value


KINDS: dict[str, tuple[Use, Change]] = {
    "number": (lambda s, x: x * s.number, lambda s: setattr(s, "number", 0.5)),
    "reentrant region": (
        lambda s, x: checkpoint(lambda t: t * s.number, x, use_reentrant=True),
        lambda s: setattr(s, "number", 0.5),
    ),
    "list": (lambda s, x: x * s.numbers[1], lambda s: s.numbers.__setitem__(1, 0.5)),
    "new list": (_looped, lambda s: setattr(s, "numbers", [1.0, 0.25])),
    "longer list": (_looped, lambda s: s.numbers.append(3.0)),
    "tuple": (lambda s, x: x * sum(s.pair), lambda s: setattr(s, "pair", (3.0, 1.0))),
    "dict": (lambda s, x: x * s.table["scale"], lambda s: s.table.update(scale=0.5)),
    "dict get": (lambda s, x: x * s.table.get("shift", 2.0), lambda s: s.table.update(shift=0.5)),
    "set": (_branch, lambda s: s.names.clear()),
    "namespace": (
        lambda s, x: x * s.namespace.inner.scale,
        lambda s: setattr(s.namespace.inner, "scale", 0.5),
    ),
    "new namespace": (lambda s, x: x * s.computed, lambda s: setattr(s, "namespace", _other_namespace())),
    "dataclass": (lambda s, x: x * s.settings.scale, lambda s: setattr(s.settings, "scale", 0.5)),
    "slots": (lambda s, x: x * s.slotted.scale, lambda s: setattr(s.slotted, "scale", 0.5)),
    "named tuple": (lambda s, x: x * s.fields.scale, lambda s: setattr(s, "fields", Pair(0.5))),
    "thread local": (lambda s, x: x * s.of_thread.scale, lambda s: setattr(s.of_thread, "scale", 0.5)),
    "property": (lambda s, x: x * s.computed, lambda s: setattr(s.namespace.inner, "scale", 0.5)),
    "numpy scalar": (lambda s, x: x * float(s.scalar), lambda s: setattr(s, "scalar", np.float32(0.5))),
    "numpy array": (lambda s, x: x * float(s.array.sum()), lambda s: s.array.__setitem__(0, 5.0)),
    "function": (lambda s, x: s.function(x), lambda s: setattr(s, "function", torch.tanh)),
    "partial": (
        lambda s, x: s.partial(x),
        lambda s: setattr(s, "partial", functools.partial(F.leaky_relu, negative_slope=0.5)),
    ),
    "none": (_optional, lambda s: setattr(s, "optional", SimpleNamespace(scale=0.5))),
    "getattr": (lambda s, x: x * getattr(s, "later", 2.0), lambda s: setattr(s, "later", 0.5)),
    "class": (lambda s, x: x * s.of_class, lambda s: setattr(Switch, "of_class", 0.5)),
    "global": (lambda s, x: x * SCALE, lambda s: _set_global("SCALE", 0.5)),
    "global tensor": (lambda s, x: x + CENTER, lambda s: _set_global("CENTER", torch.ones(WIDTH))),
    "tensor in an object": (lambda s, x: x * s.tensor, lambda s: setattr(s, "tensor", torch.arange(4.0))),
    "context variable": (lambda s, x: x * FACTOR.get(), lambda s: FACTOR.set(0.5)),
    "weak reference": (lambda s, x: x * s.reference().scale, lambda s: setattr(s.alone, "scale", 0.5)),
    "weak reference that dies": (
        lambda s, x: x if s.reference() is None else x * 2,
        lambda s: setattr(s, "alone", None),
    ),
    "weak dict": (lambda s, x: x * s.kept_weakly["alone"].scale, lambda s: setattr(s.alone, "scale", 0.5)),
    "read-only view": (lambda s, x: x * s.view["scale"], lambda s: s.table.update(scale=0.5)),
    "bytes": (lambda s, x: x * s.bytes[0], lambda s: s.bytes.__setitem__(0, 5)),
    "array of doubles": (lambda s, x: x * s.doubles[0], lambda s: s.doubles.__setitem__(0, 5.0)),
    "attrgetter": (lambda s, x: x * s.get_scale(s.slotted), lambda s: setattr(s.slotted, "scale", 0.5)),
    "nested attrgetter": (
        lambda s, x: x * s.get_nested(s.namespace),
        lambda s: setattr(s.namespace.inner, "scale", 0.5),
    ),
    "itemgetter": (lambda s, x: x * s.get_item(s.table), lambda s: s.table.update(scale=0.5)),
    "object getattribute": (
        lambda s, x: x * object.__getattribute__(s.settings, "scale"),
        lambda s: setattr(s.settings, "scale", 0.5),
    ),
    "next of iter": (lambda s, x: x * next(iter(s.pair_of_objects)).scale, lambda s: _first_scale(s, 0.5)),
    "key function": (
        lambda s, x: x * max(s.pair_of_objects, key=operator.attrgetter("scale")).scale,
        lambda s: _first_scale(s, 3.0),
    ),
    "unpacked attributes": (
        lambda s, x: x * dict(**vars(s.settings))["scale"],
        lambda s: setattr(s.settings, "scale", 0.5),
    ),
    "formatted": (
        lambda s, x: x * float("{.scale}".format(s.settings)),  # noqa: UP032
        lambda s: setattr(s.settings, "scale", 0.5),
    ),
    "pattern": (
        lambda s, x: x * _scale_of(s.namespace.inner),
        lambda s: setattr(s.namespace.inner, "scale", 0.5),
    ),
    "class attribute that comes": (
        lambda s, x: x * getattr(s.alone, "later", 2.0),
        lambda s: setattr(Slotless, "later", 0.5),
    ),
    "closure": (lambda s, x: s.closure(x), lambda s: s.set_closure(0.5)),
    "closure with a twin, called out of sight": (
        lambda s, x: list(map(s.twin, [x]))[0],  # noqa: RUF015
        lambda s: s.set_twin(0.5),
    ),
    "default": (lambda s, x: s.default(x), lambda s: setattr(s.default, "__defaults__", (0.5,))),
    "code": (lambda s, x: s.default(x), lambda s: setattr(s.default, "__code__", _halved.__code__)),
    "class of an object": (lambda s, x: x * s.kind.scale(), lambda s: setattr(s.kind, "__class__", Other)),
    "odd list": (lambda s, x: x * sum(s.doubling), lambda s: s.doubling.append(3.0)),
    "order": (
        lambda s, x: x * next(iter(s.ordered.values())),
        lambda s: s.ordered.move_to_end("first"),
    ),
    "formatted name": (lambda s, x: x * getattr(s, f"{s.name}"), lambda s: setattr(s, "number", 0.5)),
    "padded name": (
        lambda s, x: x * getattr(s, f"{'num':s}{s.name[3:]!s}"),
        lambda s: setattr(s, "number", 0.5),
    ),
    "joined name": (lambda s, x: x * getattr(s, "num" + "%s" % "ber"), lambda s: setattr(s, "number", 0.5)),  # noqa: UP031
    "computed name": (
        lambda s, x: x * getattr(s, "".join(["num", "ber"])),
        lambda s: setattr(s, "number", 0.5),
    ),
}


def _halved(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale * 0.5


def _counted(s: Switch, x: Tensor) -> Tensor:
    s.calls += 1
    return x * s.calls


def _warm(s: Switch, x: Tensor) -> Tensor:
    s.calls += 1
    return x * 2 if s.calls > 5 else x


def _logged(s: Switch, x: Tensor) -> Tensor:
    s.log.append(len(s.log))
    return x


def _counted_in_a_table(s: Switch, x: Tensor) -> Tensor:
    s.table["scale"] += 1.0
    return x * s.table["scale"]


def _counted_in_a_global(_: Switch, x: Tensor) -> Tensor:
    global SCALE
    SCALE += 1.0
    return x * SCALE


def _averaged(s: Switch, x: Tensor) -> Tensor:
    s.mean = 0.9 * s.mean + 0.1 * x.detach().mean()
    return x / s.mean


def _drawn(s: Switch, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=s.draw)


def _seeded(_: Switch, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x + torch.rand(x.shape)


def _forked(_: Switch, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return x + torch.rand(x.shape)


def _counted_beside(s: Switch, x: Tensor) -> Tensor:
    s.calls = calls = s.calls + 1
    return x * calls


def _counted_past_setattr(s: Switch, x: Tensor) -> Tensor:
    object.__setattr__(s, "calls", s.calls + 1)
    return x * s.calls


def _listed(s: Switch, x: Tensor) -> Tensor:
    return x * [*itertools.islice(s.rows, 1)][0]  # noqa: RUF015


def _looped_over_rows(s: Switch, x: Tensor) -> Tensor:
    for row in s.rows:
        x = x * row
        break
    return x


def _counted_in_the_class(s: Switch, x: Tensor) -> Tensor:
    type(s).of_class += 1.0
    return x * s.of_class


def _counted_in_a_late_array(s: Switch, x: Tensor) -> Tensor:
    if s.optional is None:
        s.optional = np.zeros(2)
    s.optional[0] += 1.0
    return x * float(s.optional[0])


def _counted_in_a_late_object(s: Switch, x: Tensor) -> Tensor:
    if s.optional is None:
        s.optional = SimpleNamespace(calls=0)
    s.optional.calls += 1
    return x * s.optional.calls


def _drawn_of_a_late_generator(s: Switch, x: Tensor) -> Tensor:
    s.optional = s.optional or random.Random(3)
    return x * s.optional.random()


# What user code writes into objects that are no modules, and draws by seeds and generators of its own.
WRITES: dict[str, Use] = {
    "counter": _counted,
    "warm-up": _warm,
    "log": _logged,
    "table": _counted_in_a_table,
    "global": _counted_in_a_global,
    "average": _averaged,
    "generator": _drawn,
    "seed": _seeded,
    "seed under a fork": _forked,
    "counter beside": _counted_beside,
    "counter past setattr": _counted_past_setattr,
    "itertools.count": lambda s, x: x * next(s.counter),
    "method of an iterator": lambda s, x: x * s.counter.__next__(),
    "itertools.cycle": lambda s, x: x * next(s.cycle),
    "iterator of a list": _listed,
    "loop over an iterator": _looped_over_rows,
    "zip": lambda s, x: x * next(s.zipped)[0],
    "random of Python": lambda s, x: x * s.python_random.gauss(1.0, 0.1),
    "random of NumPy": lambda s, x: x * float(s.numpy_random.random()),
    "counter in the class": _counted_in_the_class,
    "array made at the first call": _counted_in_a_late_array,
    "object made at the first call": _counted_in_a_late_object,
    "generator made at the first call": _drawn_of_a_late_generator,
}


# Since Python 3.14 iterators of itertools have no copies, so that code which uses one is refused.
COPIES_ITERTOOLS = sys.version_info < (3, 14)
OF_ITERTOOLS = frozenset(("itertools.count", "itertools.cycle", "method of an iterator", "zip"))


def written(switch: Switch) -> tuple[Any, ...]:
    """Returns what WRITES write."""
    iterators = (switch.cycle, switch.rows, switch.zipped) if COPIES_ITERTOOLS else (switch.rows,)
    random_states = switch.python_random.getstate(), switch.numpy_random.bit_generator.state
    return (
        *(switch.calls, switch.log, switch.table["scale"], float(switch.mean), SCALE, random_states),
        repr(switch.counter),
        *(next(iterator) for iterator in copy.deepcopy(iterators)),
    )


def _other_namespace() -> Any:
    return SimpleNamespace(inner=SimpleNamespace(scale=0.5))


def reset() -> None:
    """Gives what belongs to the process its first value."""
    Switch.of_class = 1.0
    if hasattr(Slotless, "later"):
        del Slotless.later
    FACTOR.set(1.0)
    _set_global("SCALE", 1.0)
    _set_global("CENTER", torch.zeros(WIDTH))


@final
class Reading(nn.Module):
    """Four layers; `use` reads the switch between the second and the third, in the model's own forward."""

    def __init__(self, use: Use | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.use, self.switch = use, Switch()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1 and self.use is not None:
                x = self.use(self.switch, x)
        return x


@final
class Inner(nn.Module):
    """A submodule whose code uses the switch."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use, self.switch = use, Switch()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.use(self.switch, self.first(x).tanh()))


@final
class ReadingInside(nn.Module):
    """A submodule uses the switch, and the model's own forward does not."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Inner(use), nn.Linear(WIDTH, WIDTH)])

    @property
    def switch(self) -> Switch:
        inner: Any = self.layers[1]
        return inner.switch

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@final
class ReadingLoss:
    """A loss that reads the switch."""

    def __init__(self, use: Use) -> None:
        self.use, self.switch = use, Switch()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.use(self.switch, output) - target).square().mean()


@final
class Scaled(nn.Module):
    """One instruction of the program, which reads attributes that other code sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.scale, self.shift = 1.0, torch.zeros(WIDTH)
        self.namespace, self.table = SimpleNamespace(scale=1.0), {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * self.namespace.scale * self.table["scale"]
        return x * self.weight * scale + self.shift


@final
class Setting(nn.Module):
    """`change` sets attributes of a layer, with a number that moves, before or after the layer is called."""

    def __init__(self, change: Callable[[Any, Tensor], Any], *, late: bool = False) -> None:
        super().__init__()
        self.layer, self.scaled = nn.Linear(WIDTH, WIDTH), Scaled()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.change, self.late, self.number = change, late, 0.1

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.change(self, x)
        x = self.norm(self.scaled(self.layer(x).tanh()))
        if self.late:
            self.change(self, x)
        return x


# What a forward may set of the modules that it calls.
SETTINGS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a number that moves": lambda m, x: setattr(m.scaled, "scale", 1 - m.number),
    "a constant": lambda m, x: setattr(m.scaled, "scale", 0.5),
    "past setattr": lambda m, x: vars(m.scaled).update(scale=1 - m.number),
    "a tensor": lambda m, x: setattr(m.scaled, "shift", x),
    "an object": lambda m, x: setattr(m.scaled.namespace, "scale", 1 - m.number),
    "a constant in an object": lambda m, x: setattr(m.scaled.namespace, "scale", 0.5),
    "a table": lambda m, x: m.scaled.table.__setitem__("scale", 1 - m.number),
    "an update of a table": lambda m, x: m.scaled.table.update(scale=1 - m.number),
    "the epsilon of a norm": lambda m, x: setattr(m.norm, "eps", m.number),
    "the mode of a norm": lambda m, x: m.norm.eval(),
}


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A loss that reads nothing."""
    return (output - target).square().mean()
