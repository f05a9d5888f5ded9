"""What typer never sees: old spellings, and torchrun's flags; and flags that take several keys."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final, get_args

import pytest
from pydantic import Field

from outsize.api.old_spellings import OldSpelling
from outsize.axes.registry import GROUP
from outsize.cli.app import make_app
from outsize.cli.command_line import OLD, Known, Line, read_line
from outsize.cli.flags import Key, KeyFlag, setting
from outsize.cli.options import MeshFlags
from outsize.cli.run_flags import Ranks, Report, Saves, Train, Watch
from outsize.errors import BadOption

Outsize = Callable[..., Any]
VERBS = [(verb, flag) for verb, rows in OLD.items() for flag in rows]
# A value of each old flag of which a number is none.
VALUES = {"--on-hang": "wait", "--on-oom": "raise"}

KEY_FLAGS: list[KeyFlag] = [get_args(kind)[1] for kind in (Ranks, Watch, Saves, Train, Report)]


def known(verb: str) -> Known:
    """The flags of a verb, as its command of typer has them."""
    import typer

    command: Any = typer.main.get_command(make_app())
    one = command.commands[verb]
    return Known.of(one.context_class(one, info_name=verb))


def read(verb: str, *words: str) -> Line:
    return read_line(words, known(verb), lambda *_: False)


@pytest.mark.parametrize(("verb", "flag"), VERBS)
def test_an_old_flag_is_read_as_the_new_one_and_no_help_shows_it(
    verb: str, flag: str, outsize: Outsize
) -> None:
    row = OLD[verb][flag]
    typed = [flag] if row.is_yes else [flag, VALUES.get(flag, "2")]
    new = row.key if row.is_yes else f"{row.key}={typed[1]}"
    lines = [read(verb, *words, "toy:build") for words in (typed, [row.flag, new])]
    assert lines[0].arguments == lines[1].arguments == [row.flag, new, "toy:build"]
    assert (lines[0].old, lines[1].old) == ({flag: row}, {})
    assert flag not in known(verb).own
    assert f"{flag} " not in outsize(verb, "--help").out


@pytest.mark.parametrize(("verb", "flag"), VERBS)
def test_what_the_warning_says_can_be_typed(verb: str, flag: str) -> None:
    row = OLD[verb][flag]
    line = read(verb, *([flag] if row.is_yes else [flag, VALUES.get(flag, "2")]), "toy:build")
    with pytest.warns(OldSpelling) as caught:
        line.warn(verb)
    said, _, typed = str(caught[0].message).partition("Next: ")
    assert said == f"outsize {verb} {flag} is the old spelling, which the next release does not know. "
    new = read(verb, *shlex.split(typed), "toy:build")
    assert new.arguments == line.arguments
    if verb == "run":
        read_by = {one.flag: one for one in KEY_FLAGS}[row.flag]
        assert read_by.read(new.arguments[1]) != read_by.read(None)
    else:
        assert MeshFlags(new.arguments[1]).sizes == {row.key: 2}


def test_all_old_flags_of_a_line_are_in_one_warning() -> None:
    line = read("run", "--every", "10m", "toy:build", "--checkpoint", "a b", "--lr=0.1", "--seed", "3")
    assert line.arguments == ["--checkpoint", "every=10m,a b", "--train", "lr=0.1,seed=3", "toy:build"]
    with pytest.warns(OldSpelling) as caught:
        line.warn("run")
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "outsize run --every, --lr, --seed are old spellings, which the next release does not know. "
        "Next: --checkpoint 'every=10m,a b' --train lr=0.1,seed=3"
    )


def test_every_axis_has_an_old_flag() -> None:
    assert {old.key for old in OLD["plan"].values()} == {axis.name for axis in GROUP}


def test_an_old_flag_of_a_model_before_a_script_is_named_as_it_is_typed(
    outsize: Outsize, folder: Path
) -> None:
    (folder / "train.py").touch()
    answer = outsize("run", "--lr", "0.1", "train.py")
    assert answer.code == 2
    assert "--lr is an option of a MODEL run. Next: put the script's options after it" in answer.err


def test_what_follows_two_dashes_is_left_alone() -> None:
    assert read("run", "--", "--lr", "3").arguments == ["--", "--lr", "3"]


def test_a_shell_that_completes_a_line_hears_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from outsize.cli.app import run

    words = {"COMP_WORDS": "outsize run --every 10m --tr", "COMP_CWORD": "4"}
    for name, value in {"_OUTSIZE_COMPLETE": "complete_bash", **words}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    assert capsys.readouterr().out.split() == ["--train"]


def test_help_of_a_run_fits_a_screen_of_80_by_40(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = outsize("run", "--help").out.splitlines()
    assert len(lines) <= 39  # and the prompt
    assert max(map(len, lines)) <= 80
    flags = [line.split()[1] for line in lines if line.startswith("│ --")]
    assert len(flags) <= 20
    assert len(flags) == len(set(flags))
    assert not any("…" in line for line in lines)


@final
@dataclass(frozen=True)
class Settings:
    """Keys of each kind."""

    name: Annotated[str | None, Key("a", "A word.")] = None
    count: Annotated[int, Field(ge=1), Key("2", "A number.")] = 1
    share: Annotated[float | None, Key("0.5", "A part.")] = None
    way: Annotated[Literal["end", "wait"] | None, Key("wait", "A choice.")] = None
    shown: Annotated[bool, Key("shown", "A flag.")] = False


NAMED = KeyFlag("--set", Settings, "Settings.")
PLAIN = KeyFlag("--set", Settings, "Settings.", plain="NAME")


def test_keys_are_read_by_their_types() -> None:
    assert NAMED.read(None) == NAMED.read("") == Settings()
    assert NAMED.read("count=3, share=0.25,way=wait,shown") == Settings(None, 3, 0.25, "wait", True)
    assert NAMED.read("shown=false,count=3,count=4") == Settings(count=4)
    assert PLAIN.read("some=folder,count=2") == Settings("some=folder", 2)
    assert NAMED.read(setting("name", "a,b")) == Settings("a,b")


@pytest.mark.parametrize(
    ("flag", "text", "said", "step"),
    [
        (NAMED, "cuont=3", "--set has no key 'cuont'; did you mean `count`?", "--set count=2, or --set help"),
        (NAMED, "a", "--set has no key 'a'", "--set name=a"),
        (PLAIN, "cuont=3", "did you mean `count`?", "--set count=2"),
        (PLAIN, "a,b", "--set has no key 'b'", "--set a, or --set help"),
        (NAMED, "count=0", "--set count=0 makes no sense; Input should be greater than", "--set count=2"),
        (NAMED, "count=many", "unable to parse string as an integer", "--set count=2"),
        (NAMED, "count", "--set count makes no sense; it has no value", "--set count=2"),
        (NAMED, "count=", "--set count= makes no sense; it has no value", "--set count=2"),
        (NAMED, "way=stop", "Input should be 'end' or 'wait'", "--set way=wait"),
        (NAMED, "shown=maybe", "valid boolean", "--set shown, or"),
    ],
)
def test_what_is_no_setting_is_refused_in_three_parts(flag: KeyFlag, text: str, said: str, step: str) -> None:
    with pytest.raises(BadOption) as caught:
        flag.read(text)
    assert said in str(caught.value)
    assert caught.value.next_step.startswith(step)


def test_each_key_is_explained(outsize: Outsize) -> None:
    for flag in ("--ranks", "--watch", "--checkpoint", "--train", "--report"):
        answer = outsize("run", flag, "help")
        assert answer.code == 0, "without a TARGET"
        assert answer.err == ""
    assert "hang_timeout=60\n    After so many seconds" in outsize("run", "--watch", "help").out
