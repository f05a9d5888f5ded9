"""Reads a command line before typer does: old spellings become new ones, and torchrun's flags are put aside.

    outsize plan MODEL --tp 2 --dp-shard 4     typer sees --axes tp=2,dp_shard=4; one warning says so
    outsize run --rdzv-id 7 train.py --lr 1    typer sees train.py --lr 1; torchrun's parser reads --rdzv-id=7

An old flag works for one release. It is in a table here and nowhere else, so that no help shows it.
"""

from __future__ import annotations

import shlex
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from typer.core import TyperCommand

from outsize.axes.registry import GROUP
from outsize.cli.flags import setting
from outsize.cli.model_input import is_model
from outsize.errors import BadOption
from outsize.errors.words import nearest, spoken

TORCHRUN: Final = "outsize.torchrun"


@final
@dataclass(frozen=True)
class OldFlag:
    """An old flag, which is now a key of what `flag` takes; it has no value where `is_yes`."""

    flag: str
    key: str
    is_yes: bool = False


_MESH: Final = {axis.old_flag: OldFlag("--axes", axis.name) for axis in GROUP}
_RUN: Final = {
    "--hang-timeout": OldFlag("--watch", "hang_timeout"),
    "--on-hang": OldFlag("--watch", "on_hang"),
    "--dashboard": OldFlag("--watch", "dashboard", is_yes=True),
    "--dashboard-port": OldFlag("--watch", "dashboard_port"),
    "--memory-share": OldFlag("--ranks", "memory_share"),
    "--ranks-per-device": OldFlag("--ranks", "per_device"),
    "--on-oom": OldFlag("--ranks", "on_oom"),
    "--peer-copies": OldFlag("--ranks", "peer_copies"),
    "--secret-file": OldFlag("--ranks", "secret_file"),
    "--lr": OldFlag("--train", "lr"),
    "--seed": OldFlag("--train", "seed"),
    "--measure": OldFlag("--train", "measure", is_yes=True),
    "--every": OldFlag("--checkpoint", "every"),
    "--keep": OldFlag("--checkpoint", "keep"),
    "--trace": OldFlag("--report", "trace"),
}
OLD: Final[Mapping[str, Mapping[str, OldFlag]]] = {"plan": _MESH, "fit": _MESH, "run": _RUN}
"""Lists the old flags of each verb."""


@final
@dataclass(frozen=True)
class Known:
    """The flags of a verb: those that typer knows, each with whether a value follows, the old ones, and
    torchrun's, which are asked for where a flag is none of these; `of_models` are no advice for a script.
    """

    own: Mapping[str, bool]
    old: Mapping[str, OldFlag]
    torchruns: Callable[[], Mapping[str, tuple[str, bool]]] | None = None
    of_models: Collection[str] = ()

    @classmethod
    def of(cls, ctx: Any) -> Known:
        """Returns the flags of a command of typer."""
        own = {
            flag: not (parameter.is_flag or parameter.count)
            for parameter in ctx.command.get_params(ctx)
            if parameter.param_type_name == "option"
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        return cls(own, OLD.get(ctx.info_name, {}))

    @property
    def joined(self) -> set[str]:
        """Returns the flags that take settings, of which each may be given by itself."""
        return {old.flag for old in self.old.values()}

    def spelled(self, flag: str) -> str:
        """Returns the flag as it is listed: torchrun takes a dash for an underscore everywhere."""
        dashed = flag.replace("_", "-")
        return dashed if flag not in self.own and dashed in self.own else flag


@final
@dataclass
class Line:
    """A command line that has been read: for typer, for torchrun, and what was spelled in the old way."""

    plain: list[str] = field(default_factory=list[str])
    settings: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    torchruns: dict[str, Any] = field(default_factory=dict[str, Any])
    old: dict[str, OldFlag] = field(default_factory=dict[str, OldFlag])
    target: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Returns what typer is to read; the settings of a flag are one value."""
        return [*(word for flag in self.settings for word in (flag, self._value(flag))), *self.plain]

    def _value(self, flag: str) -> str:
        return ",".join(self.settings[flag])

    def warn(self, verb: str) -> None:
        """Says once how all that was spelled in the old way is spelled now."""
        if not self.old:
            return
        from outsize.api.old_spellings import OldSpelling

        flags = dict.fromkeys(old.flag for old in self.old.values())
        new = " ".join(f"{flag} {shlex.quote(self._value(flag))}" for flag in flags)
        are = "is the old spelling" if len(self.old) == 1 else "are old spellings"
        warnings.warn(
            f"outsize {verb} {', '.join(self.old)} {are}, which the next release does not know. Next: {new}",
            OldSpelling,
            stacklevel=2,
        )


def read_line(words: Collection[str], known: Known, ends: Callable[[str, Line], bool]) -> Line:
    """Reads the words up to TARGET, and those behind it unless the line `ends` there.

    A flag that nobody knows is left to typer, which refuses it, but in a line that may have torchrun's flags.
    Raises BadOption.
    """
    rest, line = deque(words), Line()
    while rest:
        word = rest.popleft()
        if word == "--" or not word.startswith("-") or word == "-":
            line.plain.append(word)
            line.target = line.target or word
            if word == "--" or (line.target is word and ends(word, line)):
                line.plain.extend(rest)
                break
        else:
            _read_flag(word, rest, known, line)
    return line


def _read_flag(word: str, rest: deque[str], known: Known, line: Line) -> None:
    """Reads a flag and its value, which may be the next word."""
    name, equals, value = word.partition("=")
    name = known.spelled(name)

    def its_value() -> list[str]:
        return [value] if equals else [rest.popleft()] if rest else []

    if (old := known.old.get(name)) is not None:
        given = [None] if old.is_yes else its_value()
        line.old[name] = old
        line.settings.setdefault(old.flag, []).extend(setting(old.key, one) for one in given)
    elif name in known.joined:
        line.settings.setdefault(name, []).extend(its_value())
    elif name in known.own:
        line.plain.append(f"{name}{equals}{value}")
        line.plain.extend(its_value() if known.own[name] and not equals else ())
    elif known.torchruns is None or known.own.get(word[:2]) is not None:
        line.plain.append(word)
    else:
        _read_torchruns(word, rest, known, line)


def _read_torchruns(word: str, rest: deque[str], known: Known, line: Line) -> None:
    """Puts a flag of torchrun aside: `--tee 3`, `--tee=3`, `-t 3`, `-t3`. Raises BadOption for none of it."""
    assert known.torchruns is not None
    flags = known.torchruns()
    name, equals, value = word.partition("=")
    if not word.startswith("--") and word[2:] and not equals:
        name, equals, value = word[:2], "=", word[2:]
    if name not in flags:
        every = (*known.own, *(flag for flag in flags if "_" not in flag))
        trains = any(is_model(one) for one in (line.target, *rest))
        meant = [flag for flag in every if trains or flag not in known.of_models]
        instead = instead_of(name, meant, known.old) or nearest(name, every) or "outsize run --help"
        raise BadOption(f"No such option: {name}", next_step=instead)
    dest, takes_value = flags[name]
    if not takes_value:
        line.torchruns[dest] = True
    elif equals or rest:
        line.torchruns[dest] = value if equals else rest.popleft()
    else:
        raise BadOption(f"{name} has no value", next_step=f"{name} VALUE, as torchrun --help says")


def instead_of(name: str, flags: Collection[str], old: Mapping[str, OldFlag]) -> str:
    """Returns what to type for a flag as other tools call it, or for one that is nearly an old or a new
    one; "" for none of these.
    """
    if (row := spoken(name)) is not None:
        return row.in_shell(flags)
    near = nearest(name, (*flags, *old)) or ""
    return (
        f"{old[near].flag} {old[near].key}={'...' if not old[near].is_yes else 'true'}"
        if near in old
        else near
    )


@final
class VerbCommand(TyperCommand):
    """A command of which old flags work for this release."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads old spellings, then the line as it is spelled now."""
        if not ctx.resilient_parsing:  # else a shell asks how the line may go on
            line = read_line(args, Known.of(ctx), lambda *_: False)
            line.warn(ctx.info_name)
            args = line.arguments
        return super().parse_args(ctx, args)
