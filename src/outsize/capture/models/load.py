"""Builds an `nn.Module` with seeded random weights from a MODEL spec of the command line.

    torchvision:resnet50                      torchvision:deeplabv3_resnet101?num_classes=5
    transformers:LlamaConfig?hidden_size=256  transformers:./config.json        (heads: see `heads`)
    package.module:builder                    package.module:builder?width=64

A builder is a callable without required arguments, a Module class, or a Module. The part after `?` is
`name=value` joined by `&`; a value is read as a Python literal (numbers, True, None, [2, 2]; `true`, `false`
and `null` too), otherwise as text. No weights are ever downloaded unless the query asks for them.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from outsize.capture.models.examples import example
from outsize.capture.models.imports import import_torchvision
from outsize.capture.models.on_meta import built_on_meta
from outsize.capture.models.transformers_classes import from_hub, transformers_builder
from outsize.errors import BadOption, ModelNotImportable, OutsizeError, UnknownModel
from outsize.errors.interruptions import raise_interruption
from outsize.program.source_line import frames_outside_outsize

__all__ = ["Spec", "example", "import_torchvision", "load", "parse_spec"]

_FORMS = "torchvision:resnet50, transformers:LlamaConfig?num_hidden_layers=4 or package.module:builder"
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_SITE_PACKAGES = Path(torch.__file__).parent.parent


@final
@dataclass(frozen=True)
class Spec:
    """Holds a MODEL spec in its parts: `torchvision:resnet50?num_classes=5` has provider, name and
    options.
    """

    provider: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.provider}:{self.name}"


def load(spec: str, *, meta: bool = False, seed: int = 0) -> nn.Module:
    """Builds the model of `spec`; on the meta device if asked (shapes only, no memory).

    The same seed gives the same CPU weights; the caller's generator is restored. Raises UnknownModel (no such
    name), ModelNotImportable (the builder or its module raised) and BadOption.
    """
    parsed = parse_spec(spec)
    with ExitStack() as stack:
        stack.enter_context(_errors_explained(parsed))
        stack.enter_context(_working_directory_importable())
        stack.enter_context(_seeded(seed))
        builder = _builder(parsed)
        return _as_module(built_on_meta(builder) if meta else builder(), parsed, meta)


def parse_spec(spec: str) -> Spec:
    """Reads a MODEL spec. Raises UnknownModel without `provider:name`, and BadOption for a bad query."""
    head, _, query = spec.partition("?")
    provider, colon, name = head.partition(":")
    if not (colon and provider and name):
        raise UnknownModel(f"{spec!r} is no model spec", next_step=guess_provider(head))
    return Spec(provider, name, _options(query))


def with_option(spec: str, names: Sequence[str], value: int) -> str:
    """Returns a MODEL spec in which the option of the first name has this value, and the other names none."""
    head, _, query = spec.partition("?")
    others = (part for part in query.split("&") if part and part.partition("=")[0] not in names)
    return f"{head}?{'&'.join([*others, f'{names[0]}={value}'])}"


def _options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, text = part.partition("=")
        if not (equals and key.isidentifier() and text) or key in options:
            raise BadOption(
                f"{part!r} cannot be read in the model spec",
                next_step="write ?name=value&other=value, each once",
            )
        options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# -- where models come from ------------------------------------------------------------------------


def _builder(spec: Spec) -> Callable[[], Any]:
    if spec.provider == "torchvision":
        return _torchvision_builder(spec)
    if spec.provider == "transformers":
        return transformers_builder(spec.name, spec.options)
    return _module_builder(spec)


def _torchvision_builder(spec: Spec) -> Callable[[], nn.Module]:
    models = import_torchvision().models
    if spec.name.lower() not in models.list_models():
        raise UnknownModel(
            f"torchvision has no model {spec.name!r}",
            numbers=f"it has {len(models.list_models())}",
            next_step=_nearest(spec.name, models.list_models(), "torchvision:"),
        )
    accepted = inspect.signature(models.get_model_builder(spec.name)).parameters
    untrained = {name: None for name in ("weights", "weights_backbone") if name in accepted}
    return lambda: models.get_model(spec.name, **{**untrained, **spec.options})


def _module_builder(spec: Spec) -> Callable[[], Any]:
    if spec.provider.endswith(".py") or "/" in spec.provider:
        dotted = spec.provider.removesuffix(".py").strip("./").replace("/", ".")
        raise UnknownModel(f"{spec.provider!r} is a path", next_step=f"write {dotted}:{spec.name}")
    if spec.provider.startswith("torchvision."):
        import_torchvision()
    module = importlib.import_module(spec.provider)
    if not hasattr(module, spec.name):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise UnknownModel(
            f"module {spec.provider} has no {spec.name!r}",
            next_step=_nearest(spec.name, names, f"{spec.provider}:"),
        )
    builder = getattr(module, spec.name)
    if isinstance(builder, nn.Module) or not callable(builder):
        return lambda: builder
    return lambda: builder(**spec.options)


def _as_module(made: Any, spec: Spec, meta: bool) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise UnknownModel(
            f"{spec} gives a {type(made).__name__}, not an nn.Module", next_step=f"give one of {_FORMS}"
        )
    on_meta = all(weight.is_meta for weight in made.parameters())
    return made if on_meta or not meta else copy.deepcopy(made).to("meta")


# -- around the build ------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the caller's GPUs too.
        yield


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """Lets `my_model:build` name a file of the working directory, as `python -m` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


@contextmanager
def _errors_explained(spec: Spec) -> Iterator[None]:
    """Turns what the user's module or the library raises into an error with its text and file:line."""
    try:
        yield
    except OutsizeError:
        raise
    except Exception as error:
        raise_interruption(error)
        text = f"{type(error).__name__}: {' '.join(str(error).split())}{_place(error)}"
        if spec.options and isinstance(error, (TypeError, ValueError)):
            options = ", ".join(f"{k}={v!r}" for k, v in spec.options.items())
            raise BadOption(
                f"{spec} does not take {options}", numbers=text, next_step=f"try {spec} alone"
            ) from error
        raise ModelNotImportable(
            f"{spec} cannot be built", numbers=text, next_step=_remedy(spec, error)
        ) from error


def _place(error: BaseException) -> str:
    """Returns ` (file:line)` of the last frame in the user's code, else in a library's; empty without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    importing = ("<frozen", str(Path(importlib.__file__).parent))
    foreign = [f for f in frames_outside_outsize(error) if not f.filename.startswith(importing)]
    users = [f for f in foreign if not Path(f.filename).is_relative_to(_SITE_PACKAGES)]
    frames = users or foreign
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _remedy(spec: Spec, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and spec.provider.startswith(f"{error.name}"):
        close = get_close_matches(spec.provider, ("torchvision", "transformers"), n=1)
        return (
            f"{close[0]}:{spec.name}"
            if close
            else "run from the folder of the module, or install its package"
        )
    if spec.provider in ("torchvision", "transformers"):
        return "do what the text says, or give another model"
    module = spec.provider
    return f"python -c 'import {module}; {module}.{spec.name}()' shows the whole traceback"


def _nearest(name: str, names: list[str], prefix: str) -> str:
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return " or ".join(prefix + match for match in close) if close else f"give one of {_FORMS}"


def guess_provider(name: str) -> str:
    """Returns what to write for a name without a provider: a file, one of torchvision, or one of the Hub."""
    if name.endswith(".json"):
        return f"write transformers:{name}"
    with suppress(ModelNotImportable):
        if name.lower() in import_torchvision().models.list_models():
            return f"write torchvision:{name}"
    return f"give one of {_FORMS}; {from_hub(name)}"
