"""Puts off imports that take long until they are used: a process that only plans never uses them.

    torch._dynamo     1.0 s    torch asks it to leave functions alone when something is compiled: nothing is
    scipy.optimize    0.3 s    a function that transformers calls in losses of object detection
    sympy             0.4 s    fakes ask whether sizes are symbols: here they are numbers
    torch.distributed.tensor   0.1 s    they ask whether a tensor is one of these; layouts of transformers
    torchvision's     0.2 s    data sets, and for transformers its models and operators
    accelerate, FSDP, checkpoints   0.3 s    functions that transformers calls on devices that are there

CPU seconds of `outsize fit MODEL --cluster 2x12GB`, in turns with and without (2026-11-22, medians of four
runs, user and system time):

    transformers:LlamaConfig?num_hidden_layers=2     3.65 with, 5.28 without     1.63 s, 31 % saved
    torchvision:resnet50                             4.03 with, 4.98 without     0.95 s, 19 %
    torch.nn:Identity                                3.83 with, 4.86 without     1.03 s, 21 %

A stand-in has the few names that are looked up in such a process. Any other name, or a call, imports the real
module. Only the command line calls this, because what torch has read stays for the life of the process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, final

# transformers imports and calls these when it places, shards or saves a model.
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
# These functions of torch.fx.experimental.symbolic_shapes are sorted by their results for sizes that are
# numbers.
_ITSELF = ("expect_true", "guard_int", "guard_or_false", "guard_or_true", "guard_size_oblivious")
_ITSELF += ("guarding_hint_or_throw", "statically_known_true")
_NO_SYMBOLS = ("_iterate_exprs", "_iterate_nodes", "free_unbacked_symbols")
_SHARDED = ("DTensor", "Partial", "Replicate", "Shard", "_StridedShard")
_FALSE = ("has_free_unbacked_symbols", "is_nested_int", "is_symbolic")


def stand_in(provider: str = "") -> None:
    """Installs stand-ins for those modules that are not imported yet.

    `provider` is where the model comes from, as in its spec, on which the set of unneeded modules depends.
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
    known |= {"sym_and": lambda *values: all(values), "sym_or": lambda *values: any(values)}
    _place("torch.fx.experimental.symbolic_shapes", GuardOnDataDependentSymNode=_NoError, **known)
    _place("torch.utils._sympy.functions", Max=_NoSource)
    _place("sympy", Basic=_NoSource)
    _place("torch.distributed.tensor", distribute_tensor=None, **dict.fromkeys(_SHARDED, _NoSource))
    _place("torch.distributed.tensor.placement_types", **dict.fromkeys(_SHARDED, _NoSource))
    _place("torch.distributed.tensor._utils", compute_local_shape_and_global_offset=None)


@final
class _StandIn(ModuleType):
    """Becomes the real module at the first name that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


@final
class _NoSource:
    """Stands for a class without instances, except layouts that transformers makes and never reads."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


@final
class _Alone:
    """Stands for accelerate's PartialState without started processes; losses of object detection read it."""

    _shared_state: ClassVar[dict[str, object]] = {}


@final
class _NoError(Exception):
    """Stands for an error that is never raised."""


def _place(name: str, **known: Callable[..., Any] | None) -> None:
    """Installs a stand-in with functions `known`; those given as None are called on the real module."""
    top, *between = name.split(".")
    spec = None if name in sys.modules else find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return
    module = _StandIn(name)
    folders = [Path(place, *between) for place in spec.submodule_search_locations]
    if any(
        folder.is_dir() for folder in folders
    ):  # Python imports names faster of modules that are no packages.
        module.__path__ = [str(folder) for folder in folders]
    for function, value in known.items():
        setattr(module, function, value or _later(name, function))
    sys.modules[name] = module
    if not between:
        module.__spec__ = spec  # Code that asks whether the package is installed looks there.
    elif (parent := name.rpartition(".")[0]) in sys.modules:
        setattr(sys.modules[parent], between[-1], module)


def _later(module: str, function: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), function)(*args, **kwargs)

    return call


def _real(name: str) -> ModuleType:
    """Imports the real module with its whole package; existing stand-ins get the real names."""
    here = [n for n, m in sys.modules.items() if isinstance(m, _StandIn) and _package(n) == _package(name)]
    gone = {other: sys.modules.pop(other) for other in here}
    module = importlib.import_module(name)
    for other, left in gone.items():
        vars(left).update(vars(sys.modules.get(other, left)))
    return module


def _package(name: str) -> str:
    return name.partition(".")[0]


def _left_alone(function: Any = None, *_: Any, **__: Any) -> Any:
    """Serves as a decorator, with arguments or without."""
    return _left_alone if function is None else function


def _named(name: str) -> SimpleNamespace:
    """Names fakes of real tensors where sizes are symbols; here they are numbers."""
    return SimpleNamespace(name=name)


def _itself(name: str) -> Callable[..., Any]:
    """Returns a function that returns a plain bool or number unchanged."""

    def answer(value: Any, *rest: Any) -> Any:
        if value.__class__ is bool or value.__class__ is int:
            return value
        return getattr(_real("torch.fx.experimental.symbolic_shapes"), name)(value, *rest)

    return answer


def _equal(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, int) else tuple(one) == tuple(other)


def _never(*_: Any) -> bool:
    return False
