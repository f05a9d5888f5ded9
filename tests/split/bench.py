"""A bench on which a loop runs: it makes models of one kind, plain or split, and keeps what the loop leaves.

A loop is a function of a bench. It asks the bench for models, trains them as any script would, and notes
losses, gradients, buffers and weights by name. Two benches of one loop are compared to the bit. Over several
processes a rank notes what it has, which has to be what the reference noted under that name; together they
have all of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

import outsize
from outsize.errors import OutsizeError
from outsize.ir.plan import Plan
from split.cases import Case, Example
from split.reference import Cutting, Microbatched, samples_in, tensors_of

MICROBATCHES: Final = 4
REPLICAS: Final = frozenset({"dp_replicate", "dp_shard", "ep"})  # The ranks have parts of the microbatches.
SEED: Final = 3
OF_THE_MODEL: Final = re.compile("gradient|weight|buffer|input|norm|scale|drawn|hooks")
Notes = dict[str, Tensor]


@dataclass
class Bench(ABC):
    """What a loop asks for models, and tells what they have left.

    `notes` has tensors by what they are. `tried` has the names that were noted within each attempt, and
    `refused` the words of those attempts that were refused.
    """

    case: Case
    notes: Notes = field(default_factory=dict)
    tried: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def wrap(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Returns a plain model as one that a loop trains; the arguments are a batch of it."""

    @abstractmethod
    def refuses(self, what: str, action: Callable[[], None]) -> bool:
        """Runs an action; says whether it was refused in words, as a split model may do."""

    @abstractmethod
    def compiled(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns the step, given to the compiler; the reference needs none."""

    def model(self, seed: int = 0) -> Any:
        """Returns the case's model with the weights of a seed."""
        example = self.case.example(0)
        return self.wrap(self.case.net(seed), example.args, example.kwargs)

    def output(self, model: Any, example: Example) -> Any:
        """Calls a model on a batch."""
        return model(*example.args, **example.kwargs)

    def features(self, model: Any, example: Example) -> Tensor:
        """Calls a model on a batch and returns [samples, width]."""
        return self.case.features(self.output(model, example))

    def loss(self, model: Any, example: Example) -> Tensor:
        """Calls a model on a batch and returns the usual loss."""
        return self.case.loss(self.output(model, example), example)

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        """Does what a split model may refuse. What the action notes is compared unless it is refused."""
        before = set(self.notes)
        is_refused = self.refuses(what, action)
        self.tried[what] = set(self.notes) - before
        for name in self.tried[what] if is_refused else ():
            del self.notes[name]

    # -- notes

    def note(self, name: str, value: Tensor | None) -> None:
        """Keeps a copy of a tensor; None counts as absent."""
        assert name not in self.notes, f"{name} is noted twice"
        if value is not None:
            self.notes[name] = whole(value).clone()

    def note_all(self, name: str, tree: Any) -> None:
        """Keeps copies of the tensors in a tree of outputs."""
        for number, tensor in enumerate(tensors_of(tree)):
            self.note(f"{name} {number}", tensor)

    def note_gradients(self, step: int | str, model: Any, name: str = "") -> None:
        """Keeps the gradients and buffers of a model, after a backward."""
        for own, parameter in own_parameters(model):
            self.note(f"step {step} gradient {name}{own}", self.gathered(model, own, parameter.grad))
        for own, buffer in model.named_buffers():
            if not buffer.is_meta:
                self.note(f"step {step} buffer {name}{own}", buffer)

    def note_weights(self, step: int | str, model: Any, name: str = "") -> None:
        """Keeps the weights of a model, after an update."""
        for own, parameter in own_parameters(model):
            self.note(f"step {step} weight {name}{own}", self.gathered(model, own, parameter))

    def gathered(self, model: Any, name: str, value: Tensor | None) -> Tensor | None:
        """Returns the whole of a weight or a gradient of which ranks may have parts."""
        return value


def own_parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    """The parameters that this process has, by their names; a rank may list stand-ins without elements."""
    named = ((name, p) for name, p in model.named_parameters() if not p.is_meta)
    return [(name, p) for name, p in named if hasattr(p, "full_tensor") or p.untyped_storage().nbytes()]


def whole(value: Any) -> Tensor:
    """The whole of a tensor of which each rank has a shard; any other tensor is whole."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@final
@dataclass
class PlainBench(Bench):
    """The reference: the plain model, called per microbatch; `replicas` have equally many of these each.

    `deferred`: running statistics change once for a call.
    """

    replicas: int = 1
    deferred: bool = False

    def wrap(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        cutting = Cutting(MICROBATCHES, samples_in((args, kwargs)), self.replicas)
        return Microbatched(net, cutting, SEED, deferred=self.deferred)

    def refuses(self, what: str, action: Callable[[], None]) -> bool:
        action()
        return False

    def compiled(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return step


@final
@dataclass
class SplitBench(Bench):
    """`outsize.split`, in this process or as one of several ranks.

    With `outputs="last"` a rank without outputs notes what is of the model: gradients, weights, buffers, and
    what is computed of them. `axes` are those beside stages, and `wishes` further options. Of the first dim
    of weights that ranks divide, this one has the part of `place`: its number and their count. `plan` is that
    of the last model.
    """

    stages: int = 2
    outputs: Literal["all", "last"] = "all"
    has_outputs: bool = True
    axes: Mapping[str, int] = field(default_factory=dict)
    wishes: Mapping[str, Any] = field(default_factory=dict)
    place: tuple[int, int] = (0, 1)
    plan: Plan | None = None

    def wrap(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        replicas = prod(size for name, size in self.axes.items() if name in REPLICAS)
        wishes: dict[str, Any] = {"stages": self.stages, "microbatches": MICROBATCHES // replicas}
        wishes |= {"axes": dict(self.axes)} if self.axes else {}
        if isinstance(self.wishes.get("plan"), Plan):
            wishes.clear()
        wishes |= {"outputs": self.outputs, "devices": outsize.Ranks(seed=SEED)}
        model = outsize.split(net, args, kwargs, **wishes, **self.wishes)
        self.has_outputs, self.plan = model.has_outputs, model.plan
        return model

    def note(self, name: str, value: Tensor | None) -> None:
        """Keeps a copy of a tensor, unless it is made of outputs that this rank has not got."""
        if self.has_outputs or OF_THE_MODEL.search(name):
            super().note(name, value)

    def own_part(self, whole: Tensor, found: Tensor) -> Tensor:
        """Returns this rank's part of what the reference has noted."""
        part, parts = self.place
        is_part = parts > 1 and whole.ndim and whole.shape != found.shape
        return whole.chunk(parts)[part] if is_part else whole

    def refuses(self, what: str, action: Callable[[], None]) -> bool:
        """Raises AssertionError for a refusal that does not say what to do."""
        try:
            action()
        except OutsizeError as error:
            if not error.next_step:
                raise AssertionError(f"{what} is refused without a next step") from error
            self.refused[what] = str(error)
            return True
        return False

    def gathered(self, model: Any, name: str, value: Tensor | None) -> Tensor | None:
        weights = getattr(getattr(model, "engine", None), "weights", None)
        return value if weights is None or value is None else weights.whole(name, value)

    def compiled(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.compile(step, backend="eager")


# -- comparing ---------------------------------------------------------------------------------------


def noted(loop: Callable[[Bench], None], bench: Bench) -> Bench:
    """Runs a loop on a bench. The user's generator is seeded, so that loops may draw."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        loop(bench)
    return bench


def differences(reference: Bench, others: Sequence[Bench], within: float = 0.0) -> list[str]:
    """Says what differs, in the order of the loop. The ranks of a run have all notes together.

    Bits are compared, or values `within` a part of a tensor's largest element.
    """
    refused = {what for other in others for what in other.refused}
    left_out = {name for what in refused for name in reference.tried[what]}
    found = [
        f"rank {rank} {line}"
        for rank, other in enumerate(others)
        for line in _of_rank(reference.notes, other, within)
    ]
    expected = (name for name in reference.notes if name not in left_out)
    missing = [f"{name}: missing" for name in expected if not any(name in other.notes for other in others)]
    return [*found, *missing]


def _of_rank(expected: Mapping[str, Tensor], other: Bench, within: float) -> list[str]:
    found = other.notes
    pairs = [(name, value, found[name]) for name, value in expected.items() if name in found]
    if isinstance(other, SplitBench):
        pairs = [(name, other.own_part(value, own), own) for name, value, own in pairs]
    differing = [f"{name}: {gap(a, b)}" for name, a, b in pairs if not equal(a, b, within)]
    return [*differing, *(f"{name}: not in the reference" for name in found if name not in expected)]


def equal(one: Tensor, other: Tensor, within: float = 0.0) -> bool:
    """Whether bits are equal, or numbers `within` a part of the largest; a NaN equals a NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if within and one.is_floating_point() and one.numel():
        apart = (one.nan_to_num(7.5) - other.nan_to_num(7.5)).abs().max()
        return bool(apart <= within * max(1.0, float(one.nan_to_num(7.5).abs().max())))
    return torch.equal(one, other) or torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))


def gap(one: Tensor, other: Tensor) -> str:
    """How far two tensors are apart, for people."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} is {other.dtype} {list(other.shape)}"
    return f"off by {float((one.double() - other.double()).abs().max()):.1e} of {float(one.abs().max()):.1e}"
