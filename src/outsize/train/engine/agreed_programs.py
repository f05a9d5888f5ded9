"""Tells the other ranks what programs this rank is about to run, and numbers their channels as they do.

A rank numbers its programs in the order in which it records them. Ranks that record other programs (a value
of a module that one rank alone runs has changed there) would then wait on channels of other numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from hashlib import sha256
from types import FunctionType
from typing import Any, Final, final

from outsize.ir.plan import Plan
from outsize.program.python_reads import PythonRead
from outsize.program.replaying.modes import current_modes
from outsize.program.tape import Instruction, Modes, Ref, Weight
from outsize.program.tree import map_leaves
from outsize.train.batch.batch import Batch
from outsize.train.crew.crew import Crew
from outsize.train.ranks.program_agreement import WHOLE, ProgramAgreement, ProgramCard
from outsize.train.variants.variant import ProgramChange, Variant
from outsize.train.world.model_facts import text_of

_SHOWN = 80
_NUMBERED: Final = re.compile(r"value <\d+>")
# Larger numbers may be addresses, which differ between processes (world/model_facts.py).
_LEAST_ADDRESS: Final = 1 << 16


@final
class AgreedPrograms:
    """The channels of this rank's programs, by their numbers; in one process a program's own number."""

    def __init__(self, crew: Crew, plan: Plan) -> None:
        own_batches = crew.replicas.own_batches
        self._agreement = (
            None if crew.mesh is None else ProgramAgreement(crew.mesh, plan.ranks, own_batches=own_batches)
        )
        self._channels: dict[int, int] = {}
        self._used = 0

    def running(self) -> AbstractContextManager[None]:
        """Returns a context around a step, in which other ranks may ask what this one runs."""
        return nullcontext() if self._agreement is None else self._agreement.running()

    def agree(
        self, variants: Sequence[Variant], parts: Sequence[Batch], change: ProgramChange, *, waits: bool
    ) -> None:
        """Begins a step. Raises WorldMismatch on all ranks where they would run programs that differ.

        A step that `waits` for other ranks answers their questions meanwhile; what does not wait for them
        (`prepare`) says at once what this rank runs, since it is over when another rank asks.
        """
        if self._agreement is None:
            return
        modes = current_modes()  # those of this thread, not of the one that answers
        tells = change.happened or not waits
        own = self._change_card(variants, _texts(variants, parts, modes), change) if tells else None
        agreed = self._agreement.begin(
            lambda: self._card(variants, _texts(variants, parts, modes), change), own
        )
        self._channels.update({v.number: c for v, c in zip(variants, agreed, strict=False)})
        self._used = max(self._used, 1 + max(agreed, default=-1))

    def channels(self, variants: Iterable[Variant]) -> list[int]:
        """Returns the number of each microbatch's channels."""
        return [self._channels.get(variant.number, variant.number) for variant in variants]

    def drop(self, number: int) -> int | None:
        """Forgets a program; returns its channels' number where no other program uses it."""
        channel = self._channels.pop(number, number)
        return None if channel in self._channels.values() else channel

    def _change_card(
        self, variants: Sequence[Variant], texts: tuple[str, ...], change: ProgramChange
    ) -> ProgramCard:
        """Returns the card of a rank whose programs may change, with a proposal for channels of new programs.

        It has all values that the programs read, for ranks on which other ones change.
        """
        fresh = dict.fromkeys(v.number for v in variants if v.number not in self._channels)
        proposed = {number: self._used + place for place, number in enumerate(fresh)}
        return ProgramCard(
            texts,
            tuple(self._channels.get(v.number, proposed.get(v.number, 0)) for v in variants),
            _values_of(variants) | _by_place((changed.read, changed.value) for changed, _ in change.values),
            {_place(changed.read): tuple(sorted(stages)) for changed, stages in change.values},
            changes=True,
            readers={
                _place(changed.read): tuple(sorted(changed.read.frames)) for changed, _ in change.values
            },
            code=_code_of(variants, change.live),
        )

    def _card(
        self, variants: Sequence[Variant], texts: tuple[str, ...], change: ProgramChange
    ) -> ProgramCard:
        """Returns the card of all that the programs of this step have read."""
        return ProgramCard(
            texts,
            tuple(self.channels(variants)),
            _values_of(variants),
            {},
            changes=change.happened,
            code=_code_of(variants, change.live),
        )


def _texts(variants: Sequence[Variant], parts: Sequence[Batch], modes: Modes) -> tuple[str, ...]:
    """Returns a text of what each microbatch's program is for, the same on all devices."""
    how = f"{'grad' if modes.grad else 'no grad'} {modes.autocast or ''}".strip()
    return tuple(f"{_inputs(part)}, {how}{_path(v)}" for v, part in zip(variants, parts, strict=True))


def _inputs(part: Batch) -> str:
    return " ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in part.tensors())


def _path(variant: Variant) -> str:
    """Returns a digest of which way the program takes, and of what travels between its stages.

    Shapes are not in it: ranks that share the tokens of a sequence send parts of unequal lengths.
    """
    guards = [guard.value for guard in variant.tape.guards]
    sent = [
        (b.weight, b.producer, b.consumers, b.requires_grad, b.meta and b.meta.dtype)
        for b in variant.cut.boundaries
    ]
    return f", program {_digest(repr((guards, sent)))}"


def _values_of(variants: Sequence[Variant]) -> dict[str, str]:
    """Returns the texts of all values that the programs have read, by the places of their reads."""
    distinct = {id(variant.reads): variant for variant in variants}.values()
    return _by_place(pair for variant in distinct for pair in variant.reads.values())


def _code_of(variants: Sequence[Variant], live: frozenset[str]) -> dict[str, str]:
    """Returns digests of the calls that each module's own code makes, but for `live` ones, and of all."""
    by_module: dict[str, list[str]] = {}
    for variant in {variant.number: variant for variant in variants}.values():
        for call in variant.tape.instructions:
            apart, numbered = call.text(_written)
            for module in {call.frame, call.target if call.is_leaf else call.frame}:
                by_module.setdefault(str(module), []).append(apart)
            if not live:
                by_module.setdefault(WHOLE, []).append(numbered)
    return {name: _digest("\n".join(calls)) for name, calls in by_module.items() if name not in live}


def _written(call: Instruction) -> tuple[str, str]:
    """Returns the text of a call as its module makes it, and as the whole program does, where values have
    numbers.
    """
    name = call.target if isinstance(call.target, str) else _target_text(call.target)
    numbered = f"{name} {_argument_text((call.args, call.kwargs))}"
    return _NUMBERED.sub("value", numbered), f"{numbered} -> {call.out!r}"


def _target_text(target: Callable[..., Any]) -> str:
    is_of_torch = isinstance(target, FunctionType) and (target.__module__ or "").partition(".")[0] == "torch"
    return _known_text(target) if is_of_torch else text_of(target)


@lru_cache(maxsize=256)
def _known_text(target: Callable[..., Any]) -> str:
    """Returns the text of a function of torch's, whose code and closures nobody changes."""
    return text_of(target)


def _argument_text(value: Any) -> str:
    """Returns the text of an argument. Every call of a program is written when one rank runs another, so what
    most arguments are is written at once.
    """
    kind = type(value)
    if kind is Ref:
        return f"value <{value.slot}>"
    if kind is Weight:
        return str(value.name)
    if value is None or kind is bool or kind is float or (kind is int and abs(value) < _LEAST_ADDRESS):
        return repr(value)
    if kind is tuple or kind is list:
        texts = map(_argument_text, value)
        # Lists of names are often made of sets, whose order differs between processes.
        is_unordered = bool(value) and all(type(part) is str for part in value)
        return f"{kind.__name__}({', '.join(sorted(texts) if is_unordered else texts)})"
    if kind is dict:
        return f"dict({', '.join(sorted(f'{key!r}: {_argument_text(part)}' for key, part in value.items()))})"
    if kind is slice:
        return f"slice{_argument_text((value.start, value.stop, value.step))}"
    return text_of(map_leaves(_leaf_text, value))


def _leaf_text(leaf: Any) -> Any:
    return _argument_text(leaf) if isinstance(leaf, Ref | Weight) else leaf


def _by_place(reads: Iterable[tuple[PythonRead, Any]]) -> dict[str, str]:
    """Returns the texts of values by the places of their reads."""
    texts: dict[str, dict[str, None]] = {}
    for read, value in reads:
        texts.setdefault(_place(read), {})[_value(value)] = None
    return {place: " and ".join(some) for place, some in texts.items()}


def _place(read: PythonRead) -> str:
    frames = ", ".join(sorted(frame or "the model's forward" for frame in read.frames))
    return f"{read.label} ({read.where.rpartition(os.sep)[2]}, read by {frames})"


def _value(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {_digest(text)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]
