"""Finds out by trial what an optimizer's update of one element depends on.

    elementwise    on this element alone            AdamW, SGD           steps on any part of a weight
    per weight     on all elements of its weight    Muon, Adafactor      steps where the weight is whole
    all weights    on all of them                   Prodigy              steps where all weights are

Nothing is known by name: the user's factory is called for small weights of the kinds that the model has, and
the optimizers that it makes take some steps side by side, on the same gradients:

    joint      one optimizer over all weights, which the others are compared with
    single     one for each weight: where it differs, weights are coupled
    halves     one over the first halves of all weights, one over the second ones along another dim: where
               they differ from that half of the joint one, elements of a weight are coupled
    large      the same for the largest weights of each number of dims, and for those that are least thin:
               some optimizers treat small weights, or thin ones, in a simpler way

Gradients keep their directions from step to step, as an estimate of a step size grows by that alone, and
their scales change differently for each weight, so that a norm over several is no constant factor; by no
more than ten times at first, since one step that outweighs all others looks like no direction at all. Weights
are in double precision where the optimizer takes that: then rounding is a billionth, and coupling is not.
Draws are seen by the generators before and after each step.

The factory and the steps are the user's code, which may raise anything for weights that it was not written
for, so every Exception is caught. None is lost: a run that fails beside one that does not is no match (then
weights have owners), a joint run that fails is told as `unknown`, and the real run calls the same code again.

The trial leaves nothing behind: generators and the model's tables are given back, hooks for all optimizers
are not called, and what a factory prints or warns of is not shown. Oracle:
tests/unit/train/optimizers/test_coupling.py, optimizers of each kind that are written there.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.device.accelerators import widest_float
from outsize.run.host.optimizer_step import without_global_hooks
from outsize.run.stage.rng import borrowed_generators, generator_states
from outsize.run.weights.ownership import places
from outsize.train.batch.checks import made_optimizer

Reach = Literal["elementwise", "per weight", "all weights"]
Wants = Literal["gradients", "a closure", "gradients of gradients"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]

STEPS: Final = 12  # some optimizers couple elements in every k-th step only
_LARGE_STEPS: Final = 4
_MOST_WEIGHTS: Final = 7
_SMALL: Final = (6, 10, 3, 2)  # the most elements along each dim of a small weight
_LARGE: Final = {1: (8192,), 2: (128, 160)}  # of a large one, by the number of dims
_LARGE_OF_MORE_DIMS: Final = (40, 48, 3, 3, 3)
_USUAL_STATES: Final = 2.0  # those of Adam, where the optimizer does not show its own
_RELATIVE: Final = 1e-5  # of the weight's movement: what rounding may differ by


@final
@dataclass(frozen=True, slots=True)
class Coupling:
    """Says what the update of one element of a weight depends on, besides numbers that all ranks know.

    `draws`: a step draws from generators of the program, so weights are stepped in one place and order.
    `states` is how many elements of states there are to one of a weight. `unknown` says why the trial had no
    answer; then the coupling is taken to be that of all weights. `kind` is the optimizer's class, for
    messages. `wants`: what a step needs; where that is more than gradients, nothing else was tried.
    """

    reach: Reach
    kind: str = "the optimizer"
    draws: bool = False
    states: float = 0.0
    unknown: str | None = None
    wants: Wants = "gradients"

    @property
    def of_all(self) -> bool:
        """Tells whether one step of all weights in one place has other numbers than steps of some."""
        return self.draws or self.reach == "all weights"


@final
class WeightKind(NamedTuple):
    """A weight of the model as the trial has to know it: its name, its whole shape, dtype and flag."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@final
@dataclass(frozen=True, slots=True)
class CouplingTrial:
    """Tries a factory on small weights that stand in for those of `model`.

    A factory that hands out an optimizer which exists already may have a method `tried`, which makes another
    one of its kind over the weights that it is given. `divided`: ranks may hold parts of weights, so it
    matters whether elements of one weight are coupled.
    `sharded` makes of a tensor the shard of one as FSDP has them, where ranks have such: what cannot step
    these wants whole weights. `spread`: ranks have different weights, so it matters whether weights are.
    """

    make: MakeOptimizer
    model: nn.Module
    kinds: Sequence[WeightKind]
    device: torch.device
    divided: bool = True
    spread: bool = True
    sharded: Callable[[Tensor], Tensor] | None = None

    def run(self) -> Coupling:
        """Returns what the optimizer couples; one of all weights where the factory fails on small ones."""
        with ExitStack() as stack:
            for context in _undisturbed():
                stack.enter_context(context)
            try:
                try:
                    return self._found(widest_float(self.device))
                except Exception:  # Not every optimizer takes double precision.
                    return self._found(torch.float32)
            except Exception as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                return Coupling("all weights", unknown=what)

    def _found(self, dtype: torch.dtype) -> Coupling:
        chosen = _chosen(self.kinds)
        samples = _samples(chosen, [_small(kind.shape) for kind in chosen], dtype, self.device)
        kind, wants = self._first_step(samples)
        if wants != "gradients":
            return Coupling("all weights", kind, wants=wants)
        reach, joint = self._compared(samples, STEPS)
        if reach == "elementwise" and self.divided:
            shapes = _with_large(self.kinds, chosen)
            if shapes:
                large = replace(self, spread=False)
                some_large = _samples([*shapes], [*shapes.values()], dtype, self.device)
                reach, _ = large._compared(some_large, _LARGE_STEPS)
        if reach == "elementwise" and not self._takes_shards(samples):
            reach = "per weight"
        return Coupling(reach, kind, joint.drew or self._draws(chosen, dtype), joint.states())

    def _first_step(self, samples: Sequence[_Sample]) -> tuple[str, Wants]:
        """Returns the class of the optimizer and what its step needs; raises what a step of gradients raises
        where more does not help.
        """
        run = self._run(samples)
        try:
            run.step(0)
        except Exception as error:
            for evaluates in ("a closure", "gradients of gradients"):
                with suppress(Exception):  # The step of gradients has said why.
                    self._run(samples).step(0, evaluates)
                    return run.kind, evaluates
            raise error from None
        return run.kind, "gradients"

    def _compared(self, samples: Sequence[_Sample], steps: int) -> tuple[Reach, _OptimizerRun]:
        """Returns how far the optimizer reaches, and the run over all weights."""
        joint = self._run(samples)
        singles = list[_Other]() if not self.spread else [self._alone(samples, each) for each in samples]
        halves = [self._halves(samples, of) for of in (_first_half, _second_half)] if self.divided else []
        is_coupled = False
        for step in range(steps):
            if joint.step_and_watch(step):
                return "all weights", joint
            compares = step + 1 == steps or step % 3 == 1  # Weights that differ once differ ever after.
            if not all(one.agrees(joint, step, compares=compares) for one in singles):
                return "all weights", joint
            if halves and not all(one.agrees(joint, step, compares=compares) for one in halves):
                is_coupled, halves = True, []
        joint.insist_on_movement()
        return "per weight" if is_coupled else "elementwise", joint

    def _alone(self, samples: Sequence[_Sample], one: _Sample) -> _Other:
        """Returns a run in which the other weights are not there, or else have other gradients."""
        try:
            self._run([one]).step(0)
            run = self._run([one])
        except Exception:  # It may want a weight of each kind; if these fail too, there is no answer.
            run = self._run([sample if sample is one else sample.changed() for sample in samples])
        return _Other(run, {one.kind.name: one.every})

    def _halves(self, samples: Sequence[_Sample], of: Callable[[Sequence[int]], tuple[slice, ...]]) -> _Other:
        boxes = {sample.kind.name: of(sample.value.shape) for sample in samples}
        return _Other(self._run([sample.part(boxes[sample.kind.name]) for sample in samples]), boxes)

    def _takes_shards(self, samples: Sequence[_Sample]) -> bool:
        """Tells whether steps run on shards; not every operation knows them."""
        if self.sharded is None:
            return True
        try:
            run = self._run([sample.over(self.sharded) for sample in samples])
            for step in range(STEPS):
                run.step(step)
        except Exception:  # Operations without a rule for shards raise errors of many classes.
            return False
        return True

    def _draws(self, kinds: Sequence[WeightKind], dtype: torch.dtype) -> bool:
        """Tells whether steps draw with the model's own dtypes: rounding may be random in some of them."""
        if {kind.dtype for kind in kinds} <= {dtype, torch.float32, torch.float64}:
            return False
        samples = _samples(kinds, [_small(kind.shape) for kind in kinds], None, self.device)
        try:
            run = self._run(samples)
            return any(run.step_and_watch(step) for step in range(_LARGE_STEPS))
        except Exception:  # It has been tried in another dtype, where it draws nothing.
            return False

    def _run(self, samples: Sequence[_Sample]) -> _OptimizerRun:
        weights = _fresh(samples)
        optimizer = self._optimizer(samples, weights)
        return _OptimizerRun(list(zip(samples, weights, strict=True)), optimizer)

    def _optimizer(self, samples: Sequence[_Sample], weights: Sequence[nn.Parameter]) -> Any:
        """Returns an optimizer of these weights, which the model has while the factory looks at it."""
        make = getattr(self.make, "tried", self.make)
        named = {sample.kind.name: weight for sample, weight in zip(samples, weights, strict=True)}
        with standing_in(self.model, named):
            optimizer = made_optimizer(make, list(weights), weights)
        groups: list[Any] = list(getattr(optimizer, "param_groups", ()))
        for group in groups:
            if isinstance(group.get("lr"), int | float) and group["lr"] == 0:
                group["lr"] = 1e-2  # A schedule sets it later; without movement nothing could be seen.
        return optimizer


# -- weights of the trial ------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class _Sample:
    """A small weight: its first value, and its gradients, one for each step."""

    kind: WeightKind
    value: Tensor
    gradients: tuple[Tensor, ...]

    @property
    def every(self) -> tuple[slice, ...]:
        """Returns the box of all of it."""
        return (slice(None),) * self.value.ndim

    def part(self, box: tuple[slice, ...]) -> _Sample:
        """Returns the weight that a rank would have which has this box."""
        return _Sample(self.kind, self.value[box].clone(), tuple(g[box].clone() for g in self.gradients))

    def over(self, sharded: Callable[[Tensor], Tensor]) -> _Sample:
        """Returns the weight of which each rank has a shard like this one."""
        return _Sample(
            self.kind, sharded(self.value.clone()), tuple(sharded(g.clone()) for g in self.gradients)
        )

    def changed(self) -> _Sample:
        """Returns a weight of the same shape with other values and gradients."""
        return _Sample(self.kind, 0.5 - self.value, tuple(g.flip(0) * -7 for g in self.gradients))


def _chosen(kinds: Sequence[WeightKind]) -> list[WeightKind]:
    """Returns a few weights, at least one of each number of dims and last name, two of the first kinds."""
    with_elements = [kind for kind in kinds if 0 not in kind.shape]
    trained = [kind for kind in with_elements if kind.requires_grad] or with_elements
    by_kind: dict[tuple[int, str], list[WeightKind]] = {}
    for kind in trained:
        by_kind.setdefault((len(kind.shape), kind.name.rpartition(".")[2]), []).append(kind)
    firsts, seconds = ([some[at] for some in by_kind.values() if some[at:]] for at in (0, 1))
    of_dims = {len(kind.shape): kind for kind in reversed(trained)}.values()
    return list(dict.fromkeys([*of_dims, *firsts, *seconds]))[:_MOST_WEIGHTS]


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a small shape of as many dims; different dims have different sizes."""
    most = (*_SMALL, *(2 for _ in shape[len(_SMALL) :]))
    if len(shape) == 1:
        most = (most[1],)
    return tuple(min(size, limit) for size, limit in zip(shape, most, strict=False))


def _with_large(
    kinds: Sequence[WeightKind], chosen: Sequence[WeightKind]
) -> dict[WeightKind, tuple[int, ...]]:
    """Returns the shapes of the chosen weights, small, and of the largest ones; empty where none is large.

    States are factored where the shorter one of the two longest dims has a certain size.
    """

    def elements(kind: WeightKind) -> int:
        return prod(kind.shape)

    def second_longest(kind: WeightKind) -> int:
        return sorted(kind.shape)[-2:][0]

    by_dims: dict[int, list[WeightKind]] = {}
    for kind in kinds:
        if kind.requires_grad and 0 not in kind.shape and kind.shape:
            by_dims.setdefault(len(kind.shape), []).append(kind)
    largest = {max(some, key=of): None for some in by_dims.values() for of in (elements, second_longest)}
    shapes = {kind: _limited(kind.shape) for kind in largest}
    shapes = {kind: shape for kind, shape in shapes.items() if shape != _small(kind.shape)}
    others = (kind for kind in chosen if kind not in shapes)
    return {**{kind: _small(kind.shape) for kind in others}, **shapes} if shapes else {}


def _limited(shape: Sequence[int]) -> tuple[int, ...]:
    most = _LARGE.get(len(shape), _LARGE_OF_MORE_DIMS)
    return (*map(min, shape, most), *(min(size, 2) for size in shape[len(most) :]))


def _samples(
    kinds: Sequence[WeightKind],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype | None,
    device: torch.device,
) -> list[_Sample]:
    """Returns weights of these shapes, in `dtype` or their own; the same on every rank."""
    drawn = torch.Generator().manual_seed(0)
    samples = list[_Sample]()
    for at, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        value, direction = (torch.randn(list(shape), generator=drawn, dtype=torch.float64) for _ in range(2))
        noise = torch.randn([STEPS, *shape], generator=drawn, dtype=torch.float64)
        wide = [2 if step >= STEPS - 3 else 6 for step in range(STEPS)]
        scales = [10.0 ** (((3 * at + 5 * step) % 7 - 3) / wide[step]) for step in range(STEPS)]
        gradients = [scale * (direction + 0.2 * one) for scale, one in zip(scales, noise, strict=True)]
        made = [t.to(device, dtype or kind.dtype) for t in (0.3 * value * (1 + at), *gradients)]
        samples.append(_Sample(kind, made[0], tuple(made[1:])))
    return samples


def _fresh(samples: Sequence[_Sample]) -> list[nn.Parameter]:
    return [nn.Parameter(s.value.clone(), requires_grad=s.kind.requires_grad) for s in samples]


def _first_half(shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the box of the first rows, as ranks of dp_shard and of tp divide a weight."""
    return tuple(slice(0, max(1, n // 2)) if dim == 0 else slice(None) for dim, n in enumerate(shape))


def _second_half(shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the box of the last columns; of a vector that of its last elements."""
    along = min(1, len(shape) - 1)
    return tuple(slice(n // 2, n) if dim == along else slice(None) for dim, n in enumerate(shape))


# -- optimizers that step side by side ----------------------------------------------------------------


@final
class _OptimizerRun:
    """One optimizer that takes steps."""

    def __init__(self, weights: Sequence[tuple[_Sample, nn.Parameter]], optimizer: Any) -> None:
        self._pairs, self._optimizer = list(weights), optimizer
        self._device = self._pairs[0][1].device
        begin_training = getattr(optimizer, "train", None)
        if callable(begin_training):
            begin_training()  # as those without a schedule want it before they step
        self.drew = False

    @property
    def kind(self) -> str:
        """Returns the name of the optimizer's class."""
        return type(self._optimizer).__name__

    def step(self, number: int, wants: Wants = "gradients") -> None:
        """Takes a step with the gradients of this number."""

        def evaluated() -> Tensor:
            for sample, weight in self._pairs:
                weight.grad = sample.gradients[number].clone()
            return torch.ones(())

        evaluated()
        if wants == "a closure":
            self._optimizer.step(evaluated)
            return
        if wants == "gradients of gradients":
            for sample, weight in self._pairs:
                weight.grad = None
                (sample.gradients[number] * weight.square()).sum().backward(create_graph=True)
        self._optimizer.step()

    def step_and_watch(self, number: int) -> bool:
        """Takes a step, and tells whether it or an earlier one has drawn random numbers."""
        before = generator_states(self._device)
        self.step(number)
        after = generator_states(self._device)
        self.drew = self.drew or not all(map(torch.equal, before, after))
        return self.drew

    def weight(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns a weight's values now and at first."""
        return next((w.detach(), s.value) for s, w in self._pairs if s.kind.name == name)

    def states(self) -> float:
        """Returns the elements of states to one element of a weight."""
        states: Any = getattr(self._optimizer, "state", None)
        if states is None:
            return _USUAL_STATES
        held = [v for s in dict(states).values() if isinstance(s, dict) for v in s.values()]
        elements = sum(value.numel() for value in held if isinstance(value, Tensor))
        return elements / max(1, sum(weight.numel() for _, weight in self._pairs))

    def insist_on_movement(self) -> None:
        """Raises RuntimeError where no weight has moved or one has become infinite: then nothing is known."""
        if not all(bool(weight.detach().isfinite().all()) for _, weight in self._pairs):
            raise RuntimeError("the small weights became infinite")
        if all(torch.equal(weight.detach(), sample.value) for sample, weight in self._pairs):
            raise RuntimeError(f"no small weight has moved in {STEPS} steps")


@final
@dataclass(frozen=True, slots=True)
class _Other:
    """A run of some weights, or parts of them; `boxes` are those parts of the joint run's."""

    run: _OptimizerRun
    boxes: Mapping[str, tuple[slice, ...]]

    def agrees(self, joint: _OptimizerRun, step: int, *, compares: bool) -> bool:
        """Takes the same step; where it compares, tells whether these weights are still the joint run's.

        What cannot step on such weights is no match for them either.
        """
        try:
            self.run.step(step)
        except Exception:
            return False
        return not compares or all(self._is_same(name, box, joint) for name, box in self.boxes.items())

    def _is_same(self, name: str, box: tuple[slice, ...], joint: _OptimizerRun) -> bool:
        (here, _), (there, first) = self.run.weight(name), joint.weight(name)
        there, first = there[box], first[box]
        moved = torch.maximum((there - first).abs().max(), (here - first).abs().max())
        rounding = 8 * torch.finfo(first.dtype).eps * first.abs().max()
        return bool((here - there).abs().max() <= _RELATIVE * moved + rounding)


# -- what a trial must not touch ----------------------------------------------------------------------


@contextmanager
def standing_in(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Puts these parameters into the model under their (first) names while a factory looks at it."""
    swapped = [(table, key, name, table[key]) for table, key, name in places(model) if name in weights]
    try:
        for table, key, name, _ in swapped:
            table[key] = weights[name]
        yield
    finally:
        for table, key, _, known in swapped:
            table[key] = known


def _undisturbed() -> Iterable[AbstractContextManager[Any]]:
    """Yields contexts in which what a trial does is not seen outside of it."""
    yield borrowed_generators()
    yield without_global_hooks()
    yield redirect_stdout(io.StringIO())
    yield warnings.catch_warnings(action="ignore")
    if "torch._dynamo" in sys.modules:  # An optimizer may compile its step, which takes far longer than it.
        yield torch.compiler.set_stance("force_eager")
