"""Applies a function to parameters by their names, on the rank where each lives.

    engine.weights.apply_named(average, "teacher.*", "student.*")

    teacher.fc.weight   on rank 0     average(teacher.fc.weight, student.fc.weight) runs here
    student.fc.weight   on rank 1     and is sent to rank 0 for the call

A `*` stands for any text, and what the stars of the first pattern stand for replaces those of the others. All
ranks walk the same list in the model's order, so sends and receives meet. The function runs once for each
tensor, however many names it has; a weight that several ranks keep unchanged is sent to them afterwards.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.axes.axis import Axis
from outsize.errors import BadOption, OutsizeError, RankFailed, error_of
from outsize.program.source_line import raising_line
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.weights.ownership import places
from outsize.run.weights.placement import Placement
from outsize.train.crew.crew import Crew

Function = Callable[..., Any]


@final
@dataclass(frozen=True, slots=True)
class NamedCall:
    """A function with the patterns of its arguments; `buffers` match too, `gradients` come with values."""

    function: Function
    patterns: tuple[str, ...]
    buffers: bool = False
    gradients: bool = False

    def rows(self, model: nn.Module) -> list[list[tuple[str, Tensor]]]:
        """Returns the arguments of each call, under the names that match. Raises BadOption."""
        named = self._named(model)
        first, *others = self.patterns or ("*",)
        matches = [(name, match) for name in named if (match := _regex(first).fullmatch(name))]
        if not matches:
            raise _nothing_matches(first, named)
        rows: dict[int, list[tuple[str, Tensor]]] = {}
        for name, match in matches:
            names = [name, *(_filled(pattern, match.groups(), first) for pattern in others)]
            row = [(each, _found(each, named, name)) for each in names]
            known = rows.setdefault(id(named[name]), row)
            if [id(t) for _, t in known] != [id(t) for _, t in row]:
                raise _two_partners(known, row)
        return list(rows.values())

    def _named(self, model: nn.Module) -> dict[str, Tensor]:
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        return named | (dict(model.named_buffers(remove_duplicate=False)) if self.buffers else {})


@final
class NamedCalls:
    """Runs calls by name over the ranks of one pipeline; `division` tells the axis that divides a weight."""

    def __init__(
        self, model: nn.Module, crew: Crew, placement: Placement, division: Callable[[str], Axis | None]
    ) -> None:
        self._model, self._crew, self._placement = model, crew, placement
        self._division = division
        self._first_names = {id(table[key]): name for table, key, name in places(model)}

    def run(self, call: NamedCall) -> None:
        """Calls the function for each tensor that the first pattern matches. Every rank calls this.

        Raises RankFailed on every rank where the function raised on one, and BadOption.
        """
        rows = call.rows(self._model)
        for row in rows:
            self._insist_on_whole(row)
        applied, stop = 0, None
        for number, row in enumerate(rows):
            (_, first), *others = row
            home = self._home(first)
            arguments = [self._argument(tensor, home, call.gradients) for _, tensor in others]
            # A rank on which the function has raised still sends what the others wait for.
            if home in self._crew.stages and stop is None:
                try:
                    _applied(call.function, row, [a.to(first.device) for a in arguments if a is not None])
                    applied += 1
                except Exception as error:
                    stop = _Stop(number, row[0][0], error)
            self._spread(first, home)
        self._insist_on_all(applied, stop, len(rows))

    def _insist_on_all(self, applied: int, stop: _Stop | None, tensors: int) -> None:
        """Raises on every rank what the function raised on one, with how many tensors are changed by then."""
        own = (applied, None if stop is None else (stop.number, stop.sent()))
        everyones: list[Any] = [own]
        if self._crew.mesh is not None:
            everyones = all_gather_json(own, self._crew.mesh.group.host, "calls of apply_named")
        stops = [(said[0], rank, said[1]) for rank, (_, said) in enumerate(everyones) if said is not None]
        if not stops:
            return
        _, rank, (name, error, trace) = min(stops, key=lambda found: found[:2])
        changed = sum(count for count, _ in everyones)
        is_here = stop is not None and rank == self._crew.global_rank
        cause = stop.error if stop is not None and is_here else RuntimeError(f"on rank {rank}:\n{trace}")
        is_shared = self._crew.mesh is not None
        if isinstance(error, dict):
            ours = stop.error if stop is not None and is_here else error_of(error)
            assert isinstance(ours, OutsizeError)
            raise ours.on_all_ranks(holds=is_shared) from (None if is_here else cause)
        failed = RankFailed(
            f"the function of apply_named raised {error} for {name} on rank {rank}",
            numbers=f"{changed} of {tensors * len(everyones) // self._crew.world_size} tensors were changed",
            next_step="let the function raise nothing, and load saved weights if half an update does harm",
        )
        raise failed.on_all_ranks(holds=is_shared) from cause

    def _home(self, tensor: Tensor) -> int:
        return self._placement.home[self._first_names[id(tensor)]]

    def _argument(self, tensor: Tensor, home: int, gradients: bool) -> Tensor | None:
        """Returns the values of a tensor on the rank of stage `home`; None on other ranks."""
        source = self._home(tensor)
        argument = self._crew.bring(tensor, source, home)
        if not gradients:
            return argument
        has_gradient = torch.tensor(float(tensor.grad is not None))
        has_gradient = self._crew.bring(has_gradient, source, home)
        if source in self._crew.stages and tensor.grad is None:
            return argument
        if has_gradient is not None and not has_gradient.item():
            return argument
        gradient = tensor.grad if tensor.grad is not None else tensor
        gradient = self._crew.bring(gradient.to_dense() if gradient.is_sparse else gradient, source, home)
        if argument is not None:
            argument.grad = gradient
        return argument

    def _spread(self, tensor: Tensor, home: int) -> None:
        """Sends a weight to the other ranks that keep it between steps."""
        name = self._first_names[id(tensor)]
        stages = range(1 + max(self._placement.home.values(), default=0))
        holders = self._placement.holders.get(name, frozenset(stages))
        is_kept = name in self._placement.unused or not isinstance(tensor, nn.Parameter)
        ranks = {self._crew.rank_of(stage): stage for stage in sorted(holders) if is_kept}
        for rank in sorted(ranks.keys() - {self._crew.rank_of(home)}):
            values = self._crew.bring(tensor, home, ranks[rank])
            if values is not None:
                tensor.detach().copy_(values)

    def _insist_on_whole(self, row: Sequence[tuple[str, Tensor]]) -> None:
        """Raises BadOption where the function would get a part of a weight, and not know it.

        Weights over dp_shard are DTensors, which compute as whole ones do, but are not sent.
        """
        homes = {self._home(tensor) for _, tensor in row}
        axes = [(name, self._division(self._first_names[id(tensor)])) for name, tensor in row]
        for name, axis in axes:
            if axis is not None and (axis.divides_weights is not None or len(homes) > 1):
                stages = ", ".join(map(str, sorted(homes)))
                raise BadOption(
                    f"ranks hold parts of {name}, and the function would get one",
                    numbers=f"axis {axis.name}; {', '.join(name for name, _ in row)} in stages {stages}",
                    next_step=f"a plan without {axis.name}, or engine.weights.whole(name, tensor) and a "
                    "loop of your own",
                )


@final
@dataclass(frozen=True, slots=True)
class _Stop:
    """The tensor for which the function raised on this rank, and its number in the walk."""

    number: int
    name: str
    error: Exception

    def sent(self) -> tuple[str, dict[str, str | bool] | str, str]:
        """Returns the name, our error's fields or another's words with its line, and the traceback."""
        trace = "".join(traceback.format_exception(self.error))
        if isinstance(self.error, OutsizeError):
            return self.name, self.error.fields(), trace
        words = f"{type(self.error).__name__}: {self.error} ({raising_line(self.error)})"
        return self.name, words, trace


def _applied(function: Function, row: Sequence[tuple[str, Tensor]], arguments: Sequence[Tensor]) -> None:
    """Calls the function; raises BadOption where it changes another tensor than the first, or returns one."""
    name, first = row[0]
    versions = [argument._version for argument in arguments]
    result = function(first, *arguments)
    for (other, _), argument, version in zip(row[1:], arguments, versions, strict=True):
        if argument._version != version:
            raise BadOption(
                f"the function changes {other}, and of {name} and {other} only the first may be changed",
                next_step="a second engine.weights.apply_named(...) with that pattern first",
            )
    known = [t for t in (first, first.grad) if t is not None]
    if isinstance(result, Tensor) and not any(_is_over(result, tensor) for tensor in known):
        raise BadOption(
            f"the function returns a new tensor for {name}, which nobody would store",
            next_step="change the first argument in place, as in teacher.copy_(...)",
        )


def _is_over(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have one memory."""
    if tensor is other:
        return True
    return not tensor.is_sparse and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def _filled(pattern: str, texts: Sequence[str | Any], first: str) -> str:
    """Returns a pattern with texts for its stars."""
    pieces = pattern.split("*")
    if len(pieces) != len(texts) + 1:
        raise BadOption(
            f"{pattern!r} has another number of stars than {first!r}",
            numbers=f"{len(pieces) - 1} and {len(texts)}",
            next_step='the same stars in all patterns, as in "teacher.*", "student.*"',
        )
    return "".join(text for pair in zip(pieces, (*texts, ""), strict=True) for text in pair)


def _found(name: str, named: dict[str, Tensor], first: str) -> Tensor:
    if name in named:
        return named[name]
    raise BadOption(
        f"{first} has no partner {name}",
        numbers=f"nearest: {', '.join(get_close_matches(name, named, n=2, cutoff=0.5)) or 'none'}",
        next_step="a narrower pattern, that matches only what has a partner",
    )


def _nothing_matches(pattern: str, named: dict[str, Tensor]) -> BadOption:
    near = get_close_matches(pattern, named, n=2, cutoff=0.3) or list(_shown(named))
    return BadOption(
        f"no parameter is named like {pattern!r}",
        numbers=f"{len(named)} names, among them {', '.join(near)}",
        next_step="a name of model.named_parameters(), with `*` for any text; buffers=True for buffers too",
    )


def _shown(named: dict[str, Tensor]) -> Iterator[str]:
    yield from list(named)[:2]


def _two_partners(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> BadOption:
    return BadOption(
        f"{one[0][0]} and {other[0][0]} are one tensor, and have different partners",
        numbers=f"{', '.join(n for n, _ in one[1:])} and {', '.join(n for n, _ in other[1:])}",
        next_step="a pattern that matches one of the names",
    )
