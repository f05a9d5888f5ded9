"""Makes the example of a model that only runs forward, and finds what it keeps of every token.

A model of transformers that generates is recorded as `generate` reads a prompt: without labels, with the
scores of the last token alone. What it caches is found in a second recording with `use_cache=True`: the
tensors that its output holds in Python objects (keys and values, states of a state-space model) belong to the
units that make them. So grouped heads, sliding windows and cross attention are counted as they are.
Complexity: one recording at one sample; a cache has an equal part for each sample.
Oracle: tests/unit/capture/models/test_recorded_caches.py compares with the caches of real forwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, final

from torch import Tensor, nn

from outsize.capture.costs.saved_memory import TapeStorages
from outsize.capture.graph.build import Captured
from outsize.capture.graph.by_modules import capture_model
from outsize.program.objects import Scope, walk

_IN_OBJECTS: Final = Scope()
# The recorded module is an attribute of the one that returns its cache.
_ATTRIBUTE: Final = "model"


def generates(model: nn.Module) -> bool:
    """Tells whether this is a model of transformers (or peft) that generates text with a cache."""
    can_generate = getattr(model, "can_generate", None)
    return bool(callable(can_generate) and can_generate())


def forward_arguments(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a forward without a loss, from those of a training step.

    Labels of transformers are left out; where a decoder made its inputs of them, they are its inputs. A
    model that generates scores its last token alone.
    """
    given = {name: value for name, value in kwargs.items() if name != "labels"}
    if not hasattr(model, "config"):
        return dict(kwargs)
    if getattr(model.config, "is_encoder_decoder", False) and "labels" in kwargs:
        given.setdefault("decoder_input_ids", kwargs["labels"].clamp(min=0))
    if generates(model):
        base = getattr(model, "get_base_model", lambda: model)()
        accepted = inspect.signature(base.forward).parameters
        given |= {name: value for name, value in _AS_GENERATING.items() if name in accepted}
    return given


_AS_GENERATING: Final = {"use_cache": False, "logits_to_keep": 1}


def cache_bytes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes that each unit leaves in the cache for this example, by the unit's name.

    Empty where the output has no cache, or the model runs by modules. Raises NotCapturable and
    ExampleRejected.
    """
    captured = capture_model(_CacheOf(model), args, {**kwargs, "use_cache": True}, None, ())
    return _by_unit(captured) if captured.graph.form == "tape" else {}


@final
class _CacheOf(nn.Module):
    """Returns the tensors of the cache that a model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Runs the model, and returns every tensor in the objects of its output, each once."""
        output = self.model(*args, **kwargs)
        parts = output.values() if isinstance(output, dict) else output
        objects = [part for part in parts if not isinstance(part, Tensor | tuple | list)]
        held = {id(value): value for _, value in walk(objects, _IN_OBJECTS) if isinstance(value, Tensor)}
        return list(held.values())


def _by_unit(captured: Captured) -> dict[str, int]:
    """Returns the bytes of the outputs' storages by the unit that makes them."""
    tape, graph = captured.tape, captured.graph
    storages = TapeStorages.of(tape, captured.starts).size_bytes
    made = {tape.storage(slot): tape.producer[slot] for slot in tape.output_slots() if slot in tape.producer}
    sizes = dict[str, int]()
    for storage, instruction in made.items():
        unit = max(number for number, start in enumerate(captured.starts[:-1]) if start <= instruction)
        name = graph.units[unit].name.removeprefix(f"{_ATTRIBUTE}.")
        sizes[name] = sizes.get(name, 0) + storages[storage]
    return sizes
