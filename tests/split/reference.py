"""What a split model has to equal: the plain model, called once per microbatch within one graph.

    x [8]  ──split──►  x0 [2]   x1 [2]   x2 [2]   x3 [2]
                         │ net    │ net    │ net    │ net
    out [8] ◄──cat───  o0 [2]   o1 [2]   o2 [2]   o3 [2]

The loss is one, over the whole batch, and so is the backward: autograd runs the last microbatch first. Under
autocast the cache of cast weights is cleared before each microbatch. Random instructions are seeded by (seed,
call, microbatch, instruction) as an engine seeds them by the step (law 6): which instructions draw is read
from a recording of the model, and the forward is the user's own. A model that draws nothing uses nothing of
outsize here.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.program.tape import Tape
from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.check.reference import eager


@final
class Microbatched(nn.Module):
    """A plain model that is called once per microbatch; weights, buffers and names are the model's own."""

    def __init__(self, net: nn.Module, cut: Cutting, seed: int, *, deferred: bool = False) -> None:
        """`deferred`: running statistics change once for a call, by those of the whole batch."""
        super().__init__()
        self._deferred = deferred
        # Not registered as a child, which would put its name before those of the weights.
        self.__dict__["net"] = net
        self._parameters, self._buffers, self._modules = net._parameters, net._buffers, net._modules
        self._cut, self._seed, self._calls = cut, seed, 0
        self._tapes: dict[Hashable, Tape] = {}

    @property
    def module(self) -> nn.Module:
        """The model as the user has written it."""
        return self.__dict__["net"]

    def train(self, mode: bool = True) -> Self:
        """Changes the mode of the plain model, too, which is no child."""
        self.module.train(mode)
        return super().train(mode)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips as PyTorch does; a split model over processes has a method of this name."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs on the whole batch."""
        sizes = self._cut.sizes(samples_in((args, kwargs)))
        parts = zip(cut(args, sizes), cut(kwargs, sizes), strict=True)
        call = self._calls
        self._calls += self.training
        outputs = []
        with users_generators(), deferred_statistics(self.module) if self._deferred else nullcontext():
            for number, (own_args, own_kwargs) in enumerate(parts):
                if torch.is_autocast_enabled("cpu"):
                    torch.clear_autocast_cache()
                outputs.append(self._one(Batch(own_args, own_kwargs), call, number))
        return join(outputs, sizes)

    def _one(self, part: Batch, call: int, microbatch: int) -> Any:
        if not (self.training and draws(self.module)):
            return self.module(*part.args, **part.kwargs)
        return eager(self.module, self._tape(part), part, seeder(self._seed, call, microbatch), None)[0]

    def _tape(self, part: Batch) -> Tape:
        key = part.signature(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        if key not in self._tapes:
            self._tapes[key] = record(self.module, part.args, part.kwargs, None, ())
        return self._tapes[key]


def draws(net: nn.Module) -> bool:
    """Says whether a model draws random numbers: these models do so in dropout alone."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in net.modules())


@contextmanager
def users_generators() -> Iterator[None]:
    """The user's generators are afterwards what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def deferred_statistics(net: nn.Module) -> Iterator[None]:
    """Running statistics are afterwards what PyTorch makes of each norm's inputs from all microbatches."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d) and m.training]
    before = [dict(norm.named_buffers()) for norm in norms]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}

    def see(norm: nn.Module, args: tuple[Any, ...]) -> None:
        seen[norm].append(args[0].detach())

    hooks = [norm.register_forward_pre_hook(see) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for hook, norm, buffers in zip(hooks, norms, before, strict=True):
            hook.remove()
            norm._buffers.update(buffers)
    for norm in norms:
        with torch.no_grad():
            norm(torch.cat(seen[norm]))


# -- cutting a batch ---------------------------------------------------------------------------------


def samples_in(tree: Any) -> int:
    """The number of samples: the first size of the first tensor that has one."""
    return next(tensor.shape[0] for tensor in tensors_of(tree) if tensor.ndim)


@final
@dataclasses.dataclass(frozen=True)
class Cutting:
    """How batches are cut: so many microbatches for a batch of `samples`; each replica has as many."""

    microbatches: int
    samples: int
    replicas: int = 1

    def sizes(self, samples: int) -> list[int]:
        """Sizes that differ by one at most, the larger ones first; a shorter batch has fewer of them."""
        each = -(-self.samples // self.microbatches) * self.replicas
        count = self.microbatches if samples >= self.samples else -(-samples // each) * self.replicas
        count = min(count, samples)  # No microbatch is empty.
        edges = [samples // count * m + min(m, samples % count) for m in range(count + 1)]
        return [end - start for start, end in pairwise(edges)]


def cut(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """The arguments of each microbatch; what has no dim of samples goes to each of them as it is."""
    samples = sum(sizes)

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == samples:
            return list(torch.split(leaf, list(sizes)))
        return [leaf] * len(sizes)

    # Each tensor is split once, so its parts are those of one node of the graph.
    leaves = [parts(leaf) for leaf in leaves_of(tree)]
    return [rebuilt(tree, iter([leaf[number] for leaf in leaves])) for number in range(len(sizes))]


# -- joining outputs ---------------------------------------------------------------------------------


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs on the whole batch, in the structure of those of a microbatch."""
    columns = zip(*(leaves_of(output) for output in outputs), strict=True)
    return rebuilt(outputs[0], iter([_joined(column, sizes) for column in columns]))


def _joined(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        assert all(value == first for value in column), "a plain value that differs between microbatches"
        return first
    if first.ndim:
        return torch.cat(list(column))
    shares = [size / sum(sizes) for size in sizes]
    total = column[0] * shares[0]
    for value, share in zip(column[1:], shares[1:], strict=True):
        total = total + value * share
    return total


# -- trees -------------------------------------------------------------------------------------------


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def leaves_of(tree: Any) -> list[Any]:
    """What a tree of tuples, lists, dicts and dataclasses holds, in order."""
    children = _children(tree)
    return [tree] if children is None else [leaf for child in children for leaf in leaves_of(child)]


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """A tree of the same structure with other leaves."""
    if _children(tree) is None:
        return next(leaves)
    if isinstance(tree, dict):
        values = {name: rebuilt(value, leaves) for name, value in tree.items()}
        return type(tree)(**values) if dataclasses.is_dataclass(tree) else type(tree)(values)
    if isinstance(tree, tuple | list):
        return _sequence(type(tree), [rebuilt(value, leaves) for value in tree])
    fields = {field.name: rebuilt(getattr(tree, field.name), leaves) for field in dataclasses.fields(tree)}
    return type(tree)(**fields)


def _sequence(kind: Callable[..., Any], values: Iterable[Any]) -> Any:
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _children(tree: Any) -> list[Any] | None:
    if isinstance(tree, dict):  # also the outputs of transformers, which are both
        return list(tree.values())
    if isinstance(tree, tuple | list):
        return list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None
