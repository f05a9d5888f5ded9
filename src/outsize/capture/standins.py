"""Modules that a process which only plans never uses, and which take long to import, come when they are used.

    torch._dynamo     1.0 s    torch asks it to leave functions alone when something is compiled: nothing is
    scipy.optimize    0.3 s    a function that transformers calls in losses of object detection
    sympy             0.4 s    fakes ask whether sizes are symbols: here they are numbers
    torch.distributed.tensor   0.1 s    they ask whether a tensor is one of these; layouts of transformers
    torchvision's     0.2 s    data sets, and for transformers its models and operators
    accelerate, FSDP, checkpoints   0.3 s    functions that transformers calls on devices that are there

A stand-in has the few names that are looked up on the way. Any other name, or a call, brings the real module.
For the command line alone: what torch was told here stays for the life of the process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, final

# What transformers imports and calls when it places, shards or saves a model.
_CALLED = {
    "accelerate.hooks": ("add_hook_to_module", "AlignDevicesHook"),
    "accelerate.utils": (
        *("get_max_memory", "extract_model_from_parallel"),
        *("get_balanced_memory", "infer_auto_device_map", "reduce"),
    ),
    "accelerate.utils.modeling": ("clean_device_map", "get_max_layer_size"),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
    "torch.distributed.checkpoint.hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
    "torchvision.datasets": (),
    "torchvision.models": (),
    "torchvision.ops": (),
}
# Functions of torch.fx.experimental.symbolic_shapes, by what they give for sizes that are numbers.
_ITSELF = ("expect_true", "guard_int", "guard_or_false", "guard_or_true", "guard_size_oblivious")
_ITSELF += ("guarding_hint_or_throw", "statically_known_true")
_NO_SYMBOLS = ("_iterate_exprs", "_iterate_nodes", "free_unbacked_symbols")
_SHARDED = ("DTensor", "Partial", "Replicate", "Shard", "_StridedShard")
_FALSE = ("has_free_unbacked_symbols", "is_nested_int", "is_symbolic")


def stand_in(provider: str = "") -> None:
    """Put the stand-ins in the places of those modules that are not imported yet.

    `provider` is where the model comes from, as in its spec: what is known not to be needed differs.
    """
    importlib.import_module("torch")
    marks = ("disable", "allow_in_graph", "assume_constant_result", "forbid_in_graph", "disallow_in_graph")
    _place("torch._dynamo", is_compiling=_never, **dict.fromkeys(marks, _left_alone))
    if isinstance(sys.modules.get("torch._dynamo"), _StandIn):
        _place("torch._dynamo.utils", is_compile_supported=None)
        _place("torch._dynamo.source", ConstantSource=_named, RandomValueSource=_NoSource)
    _place("scipy.optimize", linear_sum_assignment=None)
    if provider in ("torchvision", "transformers"):
        _place_sizes()
    if provider == "torchvision":
        _place("torchvision.datasets")
    if provider == "transformers":
        for name, called in _CALLED.items():
            _place(name, **dict.fromkeys(called))
        _place("accelerate", dispatch_model=None, PartialState=_Alone)


def _place_sizes() -> None:
    known = {name: _itself(name) for name in _ITSELF}
    known |= dict.fromkeys(_NO_SYMBOLS, lambda _: ()) | dict.fromkeys(_FALSE, _never)
    known |= {
        "has_guarding_hint": lambda _: True,
        "compute_unbacked_bindings": lambda *_, **__: None,
        "sym_eq": _equal,
    }
    known |= {"sym_and": lambda *given: all(given), "sym_or": lambda *given: any(given)}
    _place("torch.fx.experimental.symbolic_shapes", GuardOnDataDependentSymNode=_NoError, **known)
    _place("torch.utils._sympy.functions", Max=_NoSource)
    _place("sympy", Basic=_NoSource)
    _place("torch.distributed.tensor", distribute_tensor=None, **dict.fromkeys(_SHARDED, _NoSource))
    _place("torch.distributed.tensor.placement_types", **dict.fromkeys(_SHARDED, _NoSource))
    _place("torch.distributed.tensor._utils", compute_local_shape_and_global_offset=None)


@final
class _StandIn(ModuleType):
    """Becomes the real module at the first name that it has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


@final
class _NoSource:
    """A class of which nothing is an instance, but layouts that transformers makes and nobody asks for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


@final
class _Alone:
    """accelerate's PartialState where no process was started: losses of object detection ask."""

    _shared_state: ClassVar[dict[str, object]] = {}


@final
class _NoError(Exception):
    """Never raised."""


def _place(name: str, **known: Callable[..., Any] | None) -> None:
    """`known` are its functions; those given as None are called on the real module."""
    top, *between = name.split(".")
    found = None if name in sys.modules else find_spec(top)
    if found is None or found.submodule_search_locations is None:
        return
    module = _StandIn(name)
    folders = [Path(place, *between) for place in found.submodule_search_locations]
    if any(
        folder.is_dir() for folder in folders
    ):  # of modules that are no packages Python imports names faster
        module.__path__ = [str(folder) for folder in folders]
    for function, given in known.items():
        setattr(module, function, given or _later(name, function))
    sys.modules[name] = module
    if not between:
        module.__spec__ = found  # who asks whether it is installed looks there
    elif (parent := name.rpartition(".")[0]) in sys.modules:
        setattr(sys.modules[parent], between[-1], module)


def _later(module: str, function: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), function)(*args, **kwargs)

    return call


def _real(name: str) -> ModuleType:
    """The module itself, with all others of its package; who has a stand-in finds the real names in it."""
    here = [n for n, m in sys.modules.items() if isinstance(m, _StandIn) and _package(n) == _package(name)]
    gone = {other: sys.modules.pop(other) for other in here}
    module = importlib.import_module(name)
    for other, left in gone.items():
        vars(left).update(vars(sys.modules.get(other, left)))
    return module


def _package(name: str) -> str:
    return name.partition(".")[0]


def _left_alone(function: Any = None, *_: Any, **__: Any) -> Any:
    """As a decorator, with arguments or without."""
    return _left_alone if function is None else function


def _named(name: str) -> SimpleNamespace:
    """What fakes of real tensors are called by where sizes are symbols: here they are numbers."""
    return SimpleNamespace(name=name)


def _itself(name: str) -> Callable[..., Any]:
    """A plain bool or number is its own answer."""

    def answer(given: Any, *rest: Any) -> Any:
        if given.__class__ is bool or given.__class__ is int:
            return given
        return getattr(_real("torch.fx.experimental.symbolic_shapes"), name)(given, *rest)

    return answer


def _equal(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, int) else tuple(one) == tuple(other)


def _never(*_: Any) -> bool:
    return False
