"""Splits a model by its modules when its own forward cannot be recorded.

    NotCapturable at the root  ->  units are whole modules, the tape is empty, `graph.form` is "modules"

Such a model runs in its own Python on every rank and each unit on its owner (run/by_module/run.py): any split
is legal, nothing overlaps. Units follow the order of definition: the finest modules that hold no more than a
sixteenth of the weights, or that are leaves of torch. Costs are measured in one forward of the real model,
where its weights have values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from outsize.capture.costs.fused_attention import KERNEL_FLOPS
from outsize.capture.fakes.untouched import untouched
from outsize.capture.graph.build import Captured, build_graph, fingerprint_of, parameters_of
from outsize.capture.guards.trace.undone_writes import without_writes
from outsize.capture.recording.call_advice import rejected_by_model
from outsize.capture.recording.fallbacks import LossFn, record
from outsize.capture.recording.leaf_rule import LeafRule
from outsize.capture.recording.python_random import restored_python_generators
from outsize.errors import NotCapturable, OutsizeError
from outsize.errors.interruptions import raise_interruption
from outsize.ir.graph import ModelGraph, Unit, Value
from outsize.program.replaying.modes import current_modes
from outsize.program.tape import Tape
from outsize.program.tree import leaves, tensors_in, with_copied_tensors
from outsize.program.values.wrapper_tensors import stored_bytes
from outsize.program.weights.of_loss import with_loss

# Broadcasts cost time, but uneven stages cost more: a unit has at most this share of all weights.
_LARGEST = 1 / 16


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None = None,
    target: tuple[Any, ...] = (),
    samples: int | None = None,
) -> Captured:
    """Captures a model as a tape, or by its modules where it cannot be taped.

    Raises NotCapturable for a model without submodules, ExampleRejected for one that refuses the example, and
    what else `record` raises.
    """
    try:
        tape = record(model, args, kwargs, loss_fn, target)
    except NotCapturable as refusal:
        return captured_by_modules(model, args, kwargs, samples, refusal)
    return build_graph(tape, with_loss(model, loss_fn), samples)


def captured_by_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int | None,
    refusal: NotCapturable,
) -> Captured:
    """Returns a model that is not taped, by its modules. Raises the refusal where it has none."""
    if not unit_modules(model):
        raise refusal
    return _by_modules(model, args, kwargs, samples, f"{refusal.what} ({refusal.numbers})")


def unit_modules(model: nn.Module) -> list[str]:
    """Returns the FQNs of the modules that become units, in the order of definition."""
    limit = _bytes(model) * _LARGEST
    return list(_below(model, "", limit, set()))


def _below(module: nn.Module, prefix: str, limit: float, seen: set[int]) -> Iterator[str]:
    rule = LeafRule()
    for name, child in module.named_children():
        fqn = f"{prefix}.{name}" if prefix else name
        if id(child) in seen or not any(True for _ in child.parameters()):
            continue
        seen.add(id(child))
        if _bytes(child) <= limit or rule.is_leaf(fqn, child):
            yield fqn
        else:
            yield from _below(child, fqn, limit, seen)


def _by_modules(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int | None, reason: str
) -> Captured:
    seen = {name: _ModuleCosts() for name in unit_modules(model)}
    outputs, on_meta = 0, any(p.is_meta for p in model.parameters())
    if not on_meta:
        generators = restored_python_generators(), torch.random.fork_rng(devices=[])
        with generators[0], generators[1], untouched(model, weights=True), without_writes(model.forward):
            outputs = _watched(model, seen, args, kwargs)
    note = f"runs by modules, without overlap, and microbatches count by samples: {reason}"
    if on_meta:
        note += "; of weights on meta neither its seconds nor its activations are known"
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim]
    graph = _graph(model, seen, samples or (tensors[0].shape[0] if tensors else 1), outputs, note)
    tape = Tape((), (), (), {}, None, None, (), current_modes(), (note,))
    return Captured(tape, graph, (0,) * (len(graph.units) + 1))


def module_graph(model: nn.Module) -> ModelGraph:
    """Returns the graph without costs; nothing is run."""
    return _graph(model, {name: _ModuleCosts() for name in unit_modules(model)}, 1, 0, "")


def _graph(
    model: nn.Module, seen: dict[str, _ModuleCosts], samples: int, outputs: int, note: str
) -> ModelGraph:
    parameters, units = parameters_of(model), tuple(_units(model, seen))
    return ModelGraph(
        model=type(model).__name__,
        fingerprint=fingerprint_of(model, parameters, units),
        form="modules",
        batch_size=samples,
        units=units,
        values=tuple(_values(seen)),
        parameters=parameters,
        output_bytes=outputs,
        notes=(note,),
    )


# -- costs ---------------------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class _ModuleCosts:
    """Sums what one forward did in a module; `saved` maps storages that autograd saves to bytes."""

    flops: int = 0
    out_bytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    saved: dict[int, int] = field(default_factory=dict)


def _watched(
    model: nn.Module, seen: dict[str, _ModuleCosts], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Returns what `_watch` does; raises ExampleRejected where the model raises."""
    try:
        try:
            # A forward may write into its inputs; the user's stay as they are.
            return _watch(model, seen, *with_copied_tensors((args, kwargs)))
        except TypeError:  # torch's counter of FLOPs does not know nested tensors.
            seen.update({name: _ModuleCosts() for name in seen})
            return _watch(model, seen, *with_copied_tensors((args, kwargs)), counts=False)
    except OutsizeError:
        raise
    except Exception as error:
        raise_interruption(error)
        raise rejected_by_model(error, model, args, kwargs) from error


def _watch(
    model: nn.Module,
    seen: dict[str, _ModuleCosts],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    counts: bool = True,
) -> int:
    """Runs one forward, sums the costs of each unit and returns the bytes of the outputs; FLOPs where it
    `counts` them.
    """
    inside: list[_ModuleCosts] = []
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    handles = []

    def save(tensor: Tensor) -> Tensor:
        storage = _with_memory(tensor).untyped_storage()
        if inside and storage.data_ptr() not in weights:
            inside[-1].saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    counting = FlopCounterMode(display=False, custom_mapping=dict(KERNEL_FLOPS))
    with counting if counts else nullcontext(counting) as counter, saved_tensors_hooks(save, _same):
        for name, costs in seen.items():

            def enter(*_: Any, costs: _ModuleCosts = costs) -> None:
                inside.append(costs)
                costs.flops -= counter.get_total_flops()

            def leave(_m: Any, _a: Any, out: Any, costs: _ModuleCosts = costs) -> None:
                inside.pop()
                costs.flops += counter.get_total_flops()
                _add_output(costs, out)

            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter))
            # A module may raise, and the model's own forward catch it.
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            return sum(_nbytes(leaf) for leaf in leaves(model(*args, **kwargs)))
        finally:
            for handle in handles:
                handle.remove()


def _with_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor that has the memory: that of all rows, of a nested one."""
    return tensor.values() if tensor.is_nested else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _add_output(costs: _ModuleCosts, out: Any) -> None:
    tensors = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor)]
    costs.out_bytes += sum(map(_nbytes, tensors))
    if tensors:
        costs.shape = tuple(_with_memory(tensors[0]).shape)
        costs.dtype = str(tensors[0].dtype).removeprefix("torch.")


def _units(model: nn.Module, seen: dict[str, _ModuleCosts]) -> Iterator[Unit]:
    canonical = {id(p): name for name, p in model.named_parameters()}
    inside = {id(p) for name in seen for p in model.get_submodule(name).parameters()}
    # The first stage sends weights that only the glue reads to the others.
    loose = tuple(name for key, name in canonical.items() if key not in inside)
    for index, (name, costs) in enumerate(seen.items()):
        module = model.get_submodule(name)
        names = tuple(canonical[id(p)] for p in module.parameters())
        weight_bytes = _bytes(module)
        yield Unit(
            index=index,
            name=name,
            kind=type(module).__name__,
            parameters=names + (loose if index == 0 else ()),
            buffer_bytes=sum(map(_nbytes, module.buffers())),
            flops=costs.flops,
            moved_bytes=weight_bytes + 2 * costs.out_bytes,
            saved_bytes=sum(costs.saved.values()),
        )


def _values(seen: dict[str, _ModuleCosts]) -> Iterator[Value]:
    """Yields one value per unit; its output is broadcast, and the next unit stands for all receivers."""
    for index, costs in enumerate(list(seen.values())[:-1]):
        if costs.out_bytes:
            yield Value(
                id=index,
                shape=costs.shape,
                dtype=costs.dtype,
                size_bytes=costs.out_bytes,
                requires_grad=True,
                producer=index,
                consumers=(index + 1,),
            )


def _bytes(module: nn.Module) -> int:
    return sum(_nbytes(p) for p in module.parameters())


def _nbytes(leaf: Any) -> int:
    return stored_bytes(_with_memory(leaf)) if isinstance(leaf, Tensor) else 0
