"""Makes the loss of a model that returns none: cross entropy against random classes of its output's shape.

    output                                   target               loss
    tensor [N, C, ...]                       integers [N, ...]    ce(output)
    mapping, named tuple or dataclass   of its main tensor     ce(main) + 0.4 ce(aux) + ...
    list of tensors of one shape             of the last          ce(last) + 0.4 ce(those before) + ...
    mapping of numbers (detectors)           none                 their sum

The main tensor of a mapping is `out` (torchvision's segmentation) or `logits` (its Inception and GoogLeNet,
transformers' heads), else the first floating one; auxiliary heads are the entries whose names begin with
`aux`. 0.4 is the weight of DeepLabV3 in torchvision's references and of Inception's auxiliary head
(arXiv 1512.00567, sec. 4, names no weight; 0.4 is what its users took over). GoogLeNet's paper says 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.fakes.untouched import untouched
from outsize.capture.models.output_shapes import output_on_meta
from outsize.capture.recording.fallbacks import LossFn, find_loss, record
from outsize.capture.recording.python_random import restored_generators
from outsize.errors import BadOption, NotCapturable
from outsize.errors.interruptions import suppressed
from outsize.program.tape import Ref, Tape
from outsize.program.tree import map_leaves

AUXILIARY_WEIGHT = 0.4
_MAIN = ("out", "logits")


@final
@dataclass(frozen=True)
class Objective:
    """Holds what a training step needs in addition to the model: nothing, or a loss function and
    its target.
    """

    loss_fn: LossFn | None = None
    target: Tensor | None = None


def default_loss(output: Any, target: Tensor) -> Tensor:
    """Returns the cross entropy of the main tensor [N, C, ...] of `output` with classes [N, ...].

    Auxiliary heads are added. The function is at the top level of a module, so that it can be pickled and
    sent to processes.
    """
    main, auxiliary = _heads(output)
    loss = F.cross_entropy(main, target)
    for head in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(head, target)
    return loss


def sum_of_losses(output: dict[str, Tensor]) -> Tensor:
    """Adds up the losses that a detector returns, as in torchvision's references."""
    return torch.stack([*output.values()]).sum()


def objective(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0) -> Objective:
    """Returns an empty objective when the model returns its loss; else `default_loss` with random classes.

    Raises BadOption (no tensor that classes could be drawn for), and what `record` raises.
    """
    output, has_loss = _output(model, args, kwargs)
    if has_loss:
        return Objective()
    if isinstance(output, dict) and all(isinstance(x, Tensor) and x.ndim == 0 for x in output.values()):
        return Objective(sum_of_losses)
    main, _ = _heads(output)
    samples, classes, *rest = main.shape
    generator = torch.Generator().manual_seed(seed)
    return Objective(default_loss, torch.randint(0, classes, (samples, *rest), generator=generator))


def _output(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Returns what the model returns, tensors perhaps without values; and whether there is a loss in it.

    A model without weights that runs by modules is planned without its loss, so it needs none.
    """
    on_meta = bool(parameters := [*model.parameters()]) and all(p.is_meta for p in parameters)
    if on_meta:
        with suppressed():  # The forward may ask for values; recording finds out for which.
            output = output_on_meta(model, args, kwargs)
            return output, find_loss(output) is not None
    try:
        tape = record(model, args, kwargs)
    except NotCapturable:
        output = None if on_meta else _real_output(model, args, kwargs)
        return output, output is None or find_loss(output) is not None
    return map_leaves(lambda leaf: _shaped(tape, leaf), tape.output), tape.loss is not None


def _real_output(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with restored_generators(), untouched(model, weights=True), torch.no_grad():
        return model(*args, **kwargs)


def _shaped(tape: Tape, leaf: Any) -> Any:
    """Returns a tensor without memory in place of a reference."""
    if not isinstance(leaf, Ref):
        return leaf
    meta = tape.metas[leaf.slot]
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")


def _heads(output: Any) -> tuple[Tensor, list[Tensor]]:
    named = {name: value for name, value in _named(output).items() if _is_head(value)}
    main = next((name for name in _MAIN if name in named), next(iter(named), None))
    if main is None:
        raise BadOption(
            f"no loss can be made up for an output of type {type(output).__name__}",
            numbers="it holds no floating tensor [N, C, ...]",
            next_step="give a builder whose model returns its loss as a scalar, or as output['loss']",
        )
    return named[main], [value for name, value in named.items() if name.startswith("aux")]


def _named(output: Any) -> dict[str, Any]:
    """Returns the parts of an output by name; positions count as names."""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    if hasattr(output, "_asdict"):
        return output._asdict()
    if isinstance(output, list) and len({getattr(part, "shape", None) for part in output}) == 1:
        *before, last = output  # Each part refines the one before it, as in RAFT.
        return {"out": last} | {f"aux.{position}": part for position, part in enumerate(before)}
    if isinstance(output, (tuple, list)):
        return {str(position): value for position, value in enumerate(output)}
    return {"out": output}


def _is_head(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2
