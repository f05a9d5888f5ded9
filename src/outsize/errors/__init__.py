"""Every error outsize raises on purpose: a code, what happened, the numbers, the next step to type.

    OutsizeError
    ├── InputError            what the user handed over
    │   ├── UnknownModel        E101   no such model spec
    │   ├── ModelNotImportable  E102   the builder's module fails to import
    │   ├── ExampleRejected     E103   the model itself rejects the example batch
    │   ├── TooFewSamples       E104   more microbatches than samples
    │   ├── UnknownDevice       E105   a device or cluster name nobody knows
    │   ├── BadOption           E106   an option's value makes no sense
    │   ├── BadWeights          E107   weights on disk that are missing or do not fit the model
    │   └── BadCheckpoint       E108   a checkpoint on disk that is missing, damaged, or does not fit the run
    ├── CaptureError          turning a forward into a tape
    │   ├── NotCapturable       E111   the forward decides on activations, or hides a tensor
    │   ├── ReplayMismatch      E112   the tape, replayed, is not what the model does
    │   └── UnknownPython       E113   a Python whose instructions are not known
    ├── PlanError             deciding
    │   ├── NoFeasiblePlan      E201   no split fits the devices
    │   ├── TooManyStages       E202   more stages than units
    │   ├── ModelMismatch       E203   the plan was made for another model
    │   ├── WorldMismatch       E204   the plan needs another number of processes, or they differ
    │   ├── BadPlan             E205   the plan file cannot be read or contradicts itself
    │   └── UnsupportedPlan     E206   this version does not run what the plan asks for
    ├── ScheduleError
    │   └── InvalidSchedule     E301   a schedule deadlocks, misorders or forgets an action
    └── RunError              doing
        ├── RankFailed          E401   a process of the run failed
        ├── BoundaryMismatch    E402   a tensor on the wire is not what the tape promised
        ├── NotSaved            E403   a checkpoint could not be written; the older ones are whole
        ├── RunHung             E404   ranks wait for one that will not come
        ├── Preempted           E405   a signal asked the run to end, and it has saved itself
        └── SilentCorruption    E406   a device computes other bits than others for the same work

Only leaves are raised; the inner classes are for `except`. The message is one line:
`NoFeasiblePlan [E201]: what; numbers. Next: what to type.`
A picture (the grid of a schedule) follows on lines of its own.

Names in it, of a model, a file or another process, may hold an escape sequence that moves a terminal's
cursor, a mark that turns the order of what follows, or a line end that forges a line. `visible` writes such
characters as JSON does: `\\u001b`, `\\n`.
"""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self, final
from unicodedata import category


class OutsizeError(Exception, ABC):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns.

    `shared`: every rank of the run raises it alike, so rank 0 alone says it.
    """

    code: ClassVar[str] = "E000"
    exit_code: ClassVar[int] = 2
    shared: bool = False

    def __init__(self, what: str, *, numbers: str = "", next_step: str = "", picture: str = "") -> None:
        self.what, self.numbers, self.next_step, self.picture = what, numbers, next_step, picture
        super().__init__(what)

    def on_all_ranks(self, *, holds: bool = True) -> Self:
        """Says that every rank of the run raises this error alike; returns it, to be raised."""
        self.shared = holds
        return self

    def fields(self) -> dict[str, str | bool]:
        """Returns what another process needs to raise the same error, as JSON can hold it."""
        texts = {name: getattr(self, name) for name in ("code", "what", "numbers", "next_step", "picture")}
        return {**texts, "shared": self.shared}

    def __str__(self) -> str:
        head = f"{type(self).__name__} [{self.code}]: {self.what}"
        head = f"{head}; {self.numbers}" if self.numbers else head
        line = f"{head}. Next: {self.next_step}" if self.next_step else f"{head}."
        return visible_lines(f"{line}\n{self.picture}" if self.picture else line)


class InputError(OutsizeError, ABC):
    """The user's input cannot be used."""


@final
class UnknownModel(InputError):
    """No model under this spec."""

    code = "E101"


@final
class ModelNotImportable(InputError):
    """The module or builder of MODEL cannot be imported or called."""

    code = "E102"


@final
class ExampleRejected(InputError):
    """The model raised on the example batch; the model's own error is in the text."""

    code = "E103"


@final
class TooFewSamples(InputError):
    """More microbatches were asked for than the batch has samples."""

    code = "E104"


@final
class UnknownDevice(InputError):
    """A device or cluster name that nobody knows."""

    code = "E105"


@final
class BadOption(InputError):
    """An option's value makes no sense."""

    code = "E106"


@final
class BadWeights(InputError):
    """Weights on disk that are not there, cannot be read, or do not fit the model."""

    code = "E107"


@final
class BadCheckpoint(InputError):
    """A checkpoint on disk that is not there, is damaged, or does not fit the run; the text names the
    file.
    """

    code = "E108"


class CaptureError(OutsizeError, ABC):
    """The forward cannot be written down as a tape."""


@final
class NotCapturable(CaptureError):
    """The forward does something that a tape cannot hold; the text names file:line."""

    code = "E111"


@final
class ReplayMismatch(CaptureError):
    """Replaying the tape does not give what the model gives; the text names the instruction."""

    code = "E112"


@final
class UnknownPython(CaptureError):
    """The instructions of this Python are not known, so that what a forward reads cannot be seen."""

    code = "E113"


class PlanError(OutsizeError, ABC):
    """No plan, or a plan that does not belong here."""

    exit_code = 3


@final
class NoFeasiblePlan(PlanError):
    """No split of the model fits the devices."""

    code = "E201"


@final
class TooManyStages(PlanError):
    """More stages were asked for than the model has units."""

    code = "E202"


@final
class ModelMismatch(PlanError):
    """The plan's fingerprint is of another model."""

    code = "E203"


@final
class WorldMismatch(PlanError):
    """The plan wants another number of processes than there are, or they were not started alike."""

    code = "E204"
    shared = True


@final
class BadPlan(PlanError):
    """A plan that cannot be read, or whose stages do not cover the model in order."""

    code = "E205"


@final
class UnsupportedPlan(PlanError):
    """A plan with axes, or places of its weights, that this version does not run."""

    code = "E206"


class ScheduleError(OutsizeError, ABC):
    """A schedule that cannot be run."""

    exit_code = 3


@final
class InvalidSchedule(ScheduleError):
    """Deadlock, wrong order or a missing action; the text shows the grid with the cell."""

    code = "E301"


class RunError(OutsizeError, ABC):
    """The run itself failed."""

    exit_code = 4


@final
class RankFailed(RunError):
    """One process of the run failed; the text names the first."""

    code = "E401"


@final
class BoundaryMismatch(RunError):
    """A tensor at a stage boundary differs from what the tape promised."""

    code = "E402"


@final
class NotSaved(RunError):
    """A checkpoint could not be written, as on a full disk; the older ones are whole."""

    code = "E403"


@final
class RunHung(RunError):
    """Ranks wait for one that is stopped, gone or deadlocked; the text names it and shows its stack."""

    code = "E404"


@final
class Preempted(RunError):
    """The run was asked to end (SIGTERM, SIGUSR1) and has saved itself; the same command goes on.

    Its exit code is EX_TEMPFAIL of sysexits.h, "try again later".
    """

    code = "E405"
    exit_code = 75


@final
class SilentCorruption(RunError):
    """A device has computed other bits than others for the same work; the text names it. No weight has
    changed in this step.
    """

    code = "E406"


def error_of(fields: Mapping[str, str | bool]) -> OutsizeError:
    """Returns the error whose `fields` another process has sent; one of an unknown code is a RankFailed."""
    kinds = {kind.code: kind for kind in _leaves(OutsizeError)}
    texts = {name: str(fields.get(name, "")) for name in ("numbers", "next_step", "picture")}
    error = kinds.get(str(fields.get("code")), RankFailed)(str(fields.get("what", "")), **texts)
    return error.on_all_ranks(holds=bool(fields.get("shared")))


def _leaves(kind: type[OutsizeError]) -> Iterator[type[OutsizeError]]:
    below = kind.__subclasses__()
    yield from (leaf for one in below for leaf in _leaves(one))
    if not below:
        yield kind


def visible(text: object, keep: str = "") -> str:
    """Returns a text with its control, format and separator characters escaped, but those to `keep`."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(one if _is_shown(one) or one in keep else json.dumps(one)[1:-1] for one in shown)


def visible_lines(text: object) -> str:
    """Returns a text of several lines with all but its line ends and tabs escaped."""
    return visible(text, keep="\n\t")


def _is_shown(one: str) -> bool:
    return one.isprintable() or category(one) == "Zs"
