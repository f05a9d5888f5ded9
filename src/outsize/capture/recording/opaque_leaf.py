"""Finds what a leaf returns whose Python decides on its input or on random numbers, by running two real
copies.

    probe 1   small values, booleans and integers 0, every single random number drawn is 0
    probe 2   larger values, booleans and integers 1, every single random number drawn is almost 1

So a layer that is dropped at random is dropped in one probe and runs in the other. What differs between the
two is `loose`: a list of another length (with all that is in it), a tensor of another shape. No code outside
may use a loose tensor, since Python that has read it (`states[-1]`, `keys.shape[0]`) would be recorded for
good. Where the second probe fails, its values were out of the leaf's range, and it is ignored.

Oracle: the tests of rule 11 in `tests/unit/capture/recording/test_rules_leaves.py`. Cost: two forwards of the
leaf.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.costs.live_memory import kept_storages, storage_bytes, storage_key
from outsize.capture.costs.meter import CostMeter
from outsize.capture.costs.real_runs import insist_on_room, limited
from outsize.capture.costs.scaled_products import stacks_of
from outsize.capture.fakes.fake_model import FakeModel, fake_like, is_fake
from outsize.capture.recording.intercept import copying_tensors, observing_real_ops
from outsize.errors.interruptions import raise_interruption
from outsize.program.tape import Cost
from outsize.program.tree import children, leaves, map_leaves


@final
@dataclass(frozen=True)
class ProbeResult:
    """Holds the output of a leaf on fakes, its loose tensors, its cost, and whether it draws at random.

    `saved` are the fakes among arguments and output that autograd saves; `cost` counts what else it saves.
    """

    out: Any
    loose: list[Tensor]
    cost: Cost
    saved: list[Tensor]
    draws: bool


@final
@dataclass(frozen=True)
class _ProbeValues:
    """Sets the values of a probe: spread of floats, value of integers and booleans, value of a
    single draw.
    """

    spread: float
    integer: int
    draw: float


_SMALL = _ProbeValues(spread=0.02, integer=0, draw=0.0)
_LARGE = _ProbeValues(spread=1.0, integer=1, draw=1.0 - 2.0**-24)


def probe(module: nn.Module, args: Any, kwargs: Any, fakes: FakeModel, *, saved: bool) -> ProbeResult:
    """Runs real copies of `module`; tensors that they pass to other code are not taken for data.

    `saved` says that the recorder asks what autograd saves. Raises whatever the first copy raises, and
    TooLarge.
    """

    def fake(leaf: Any) -> Any:
        return fake_like(leaf, fakes.mode, fakes.device) if isinstance(leaf, Tensor) else leaf

    first, second = (_ProbeRun(world, fakes, saved=saved) for world in (_SMALL, _LARGE))
    out, draws = first(module, args, kwargs)
    loose = _loose(out, _other(second, module, args, kwargs))
    # Fakes are made first: the autograd graph of the real results would reference everything.
    out = map_leaves(fake, out)
    fakes.strays.extend(first.survivors() + second.survivors())
    tensors = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor)]
    around = [leaf for leaf in leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
    saved_fakes = [tensor for tensor, is_kept in zip(around, first.keeps, strict=True) if is_kept]
    return ProbeResult(out, [tensors[i] for i in loose], first.cost, saved_fakes, draws)


def _other(run: _ProbeRun, module: nn.Module, args: Any, kwargs: Any) -> Any:
    try:
        return run(module, args, kwargs)[0]
    except Exception as error:
        raise_interruption(error)
        return None


def _loose(one: Any, other: Any) -> list[int]:
    """Returns the indices of tensors of `one` that `other` does not have in the same position and shape."""
    marks = _marks(one, other) if other is not None else ()
    return [index for index, matches in enumerate(marks) if not matches]


def _marks(one: Any, other: Any) -> Iterator[bool]:
    """Yields for each tensor of `one` whether `other` matches it."""
    if isinstance(one, Tensor):
        yield isinstance(other, Tensor) and one.shape == other.shape
        return
    of_one, of_other = dict(children(one)), dict(children(other))
    if of_one.keys() == of_other.keys():
        for place, value in of_one.items():
            yield from _marks(value, of_other[place])
    else:
        yield from (False for leaf in leaves(one) if isinstance(leaf, Tensor))


@final
class _ProbeRun:
    """Runs one real copy with the values of one probe.

    FlopCounterMode is not used, since it hooks all modules and fails on some views of weights.
    """

    def __init__(self, world: _ProbeValues, fakes: FakeModel, *, saved: bool) -> None:
        self._fakes = fakes
        self.cost = Cost()
        # Each entry says whether autograd saves a tensor of arguments and output, in order.
        self.keeps: list[bool] = []
        self._meter: CostMeter | None = None
        self._world, self._generator = world, torch.Generator().manual_seed(world.integer)
        self._made: list[weakref.ref[Tensor]] = []
        self._saved = saved

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Returns the output, and whether random numbers were drawn.

        Autograd is on: which results require grad depends on the module, and is known only from a real run.
        """
        insist_on_room(
            t
            for t in (*module.parameters(), *module.buffers(), *leaves((args, kwargs)))
            if isinstance(t, Tensor)
        )
        with observing_real_ops(self._see), self._saved_tensors_hooks(), limited():
            clone = self._copy(module)
            args, kwargs = map_leaves(self._given, args), map_leaves(self._given, kwargs)
            with torch.random.fork_rng(devices=[]):
                before = torch.random.get_rng_state()
                weights = kept_storages((*clone.parameters(), *clone.buffers()))
                self._meter = CostMeter(weights, stacks_of(clone.modules()))
                out = clone(*args, **kwargs)
                self._finish(self._meter.stop(), (args, kwargs, out))
                return out, not torch.equal(before, torch.random.get_rng_state())

    def _finish(self, cost: Cost, around: Any) -> None:
        """Ends the run; saved tensors of arguments and output are not the leaf's own, since the recording has
        them.
        """
        tensors = [leaf for leaf in leaves(around) if isinstance(leaf, Tensor)]
        self.keeps = [storage_key(t) in cost.saved_storages for t in tensors]
        outside = {storage_key(t): storage_bytes(t) for t, k in zip(tensors, self.keeps, strict=True) if k}
        saved = cost.saved_bytes - sum(outside.values())
        self.cost = replace(cost, saved_bytes=saved, saved_storages=frozenset())

    def _saved_tensors_hooks(self) -> AbstractContextManager[object]:
        hooks = torch.autograd.graph.saved_tensors_hooks
        return hooks(self._keep, lambda tensor: tensor) if self._saved else nullcontext()

    def _keep(self, tensor: Tensor) -> Tensor:
        if self._meter is not None:
            self._meter.saved(tensor, storage_key(tensor))
        return tensor

    def survivors(self) -> list[Tensor]:
        """Returns tensors made in the probe that are still referenced."""
        return [tensor for made in self._made if (tensor := made()) is not None]

    def _see(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._meter is not None:
            self._meter.count(op, args, kwargs, out)
        self._made += [weakref.ref(leaf) for leaf in leaves(out) if isinstance(leaf, Tensor)]
        if op in _DRAWS and out.numel() == 1:
            out.fill_(self._world.draw)

    def _copy(self, module: nn.Module) -> nn.Module:
        """Returns a deep copy with real tensors in place of all fakes, in whatever object they are.

        A forward may have left fakes behind, such as the parameters of a distribution that it has made. They
        have no memory, and torch's own copy of one reads it.
        """

        def copied(tensor: Tensor) -> Tensor | None:
            if not is_fake(tensor):
                return None
            real = self._value_of(tensor)
            return real.requires_grad_(tensor.requires_grad and real.is_floating_point())

        with copying_tensors(copied):
            return copy.deepcopy(module, self._weights(module))

    def _weights(self, module: nn.Module) -> dict[int, Any]:
        """Returns the memo that gives a deep copy its real weights."""
        memo: dict[int, Any] = {id(b): self._value_of(b) for b in module.buffers()}
        for fake in module.parameters():
            real = self._real(fake)
            is_parameter = isinstance(fake, nn.Parameter)
            memo[id(fake)] = nn.Parameter(real, requires_grad=fake.requires_grad) if is_parameter else real
        for fake in (*module.parameters(), *module.buffers()):
            carried = map_leaves(self._given, self._fakes.carried.get(id(fake), {}))
            vars(memo[id(fake)]).update(copy.deepcopy(carried, memo))
        return memo

    def _value_of(self, fake: Tensor) -> Tensor:
        """Returns the value of a buffer or another tensor of the model; of all else, one of this probe.

        Code may check such values (that a range is not empty), which those of a probe need not pass.
        """
        weight = self._fakes.weights.get(id(fake))
        value = None if weight is None else self._fakes.real.get(weight.name)
        is_there = value is not None and not value.is_meta and value.layout is torch.strided
        return value.detach().cpu().clone() if value is not None and is_there else self._real(fake)

    def _given(self, leaf: Any) -> Any:
        """Returns an alias where a gradient is wanted, since the module may write into an activation."""
        if not isinstance(leaf, Tensor):
            return leaf
        return self._real(leaf).requires_grad_().clone() if leaf.requires_grad else self._real(leaf)

    def _real(self, fake: Tensor) -> Tensor:
        if not fake.dtype.is_floating_point:
            return torch.full(fake.shape, self._world.integer, dtype=fake.dtype)
        drawn = torch.randn(fake.shape, generator=self._generator)
        return drawn.mul_(self._world.spread).to(fake.dtype)


_DRAWS = frozenset({torch.ops.aten.rand.default, torch.ops.aten.rand.generator})
