"""What every verb shares: errors on one line, JSON alone on stdout, exit codes, a quick --help."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from typer.main import get_group

import outsize as library
from outsize import api
from outsize.cli.app import make_app
from outsize.errors import InvalidSchedule

Outsize = Callable[..., Any]


def test_version(outsize: Outsize) -> None:
    assert outsize("--version") == (answer := outsize("--version"))
    assert (answer.code, answer.out, answer.err) == (0, f"outsize {library.__version__}\n", "")


def test_help_without_arguments(outsize: Outsize) -> None:
    answer = outsize()
    assert answer.code == 0
    assert "plan" in answer.out
    assert "check" in answer.out


def test_an_error_is_one_line_on_stderr(outsize: Outsize) -> None:
    answer = outsize("plan", "toy:build", "--cluster", "2xgpx")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("UnknownDevice [E105]: ")


def test_an_error_is_an_object_under_json(outsize: Outsize) -> None:
    answer = outsize("plan", "toy:build", "--cluster", "2xgpx", "--json")
    error = json.loads(answer.out)["error"]
    assert (error["name"], error["code"], error["exit_code"]) == ("UnknownDevice", "E105", answer.code)
    assert answer.err.startswith("UnknownDevice [E105]: ")


def test_a_mistyped_option_is_told_the_same_way(outsize: Outsize) -> None:
    answer = outsize("plan", "--bacth", "8", "toy:build")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("BadOption [E106]: No such option: --bacth")
    assert answer.err.endswith("Next: --batch\n")


@pytest.mark.parametrize(
    ("option", "next_step"),
    [("--foo", "outsize --help"), ("--install-completions", "--install-completion")],
)
def test_an_option_that_no_verb_has_is_one_line(outsize: Outsize, option: str, next_step: str) -> None:
    answer = outsize(option)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"BadOption [E106]: No such option: {option}")
    assert answer.err.endswith(f"Next: {next_step}\n")


def test_the_picture_follows_the_line(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    def deadlock(*_: Any, **__: Any) -> None:
        raise InvalidSchedule("a cycle", next_step="gpipe", picture="rank 0 | F0\nrank 1 | B0")

    monkeypatch.setattr(api, "outlook", deadlock)
    answer = outsize("plan", "toy:build")
    assert (answer.code, answer.err.splitlines()[1:]) == (3, ["rank 0 | F0", "rank 1 | B0"])


def test_a_bug_keeps_its_traceback(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(api, "outlook", bug)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        outsize("plan", "toy:build")


def test_ctrl_c(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "outlook", interrupted)
    assert outsize("plan", "toy:build").code == 130


def test_what_the_model_prints_does_not_spoil_the_json(outsize: Outsize) -> None:
    answer = outsize("plan", "toy:Scalar", "--json")
    assert json.loads(answer.out)["model"] == "Scalar"
    assert "the model speaks" in answer.err


def test_help_fits_a_screen_of_80_by_40_in_three_groups(
    outsize: Outsize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = outsize("--help").out.splitlines()
    assert len(lines) <= 39  # and the prompt
    assert max(map(len, lines)) <= 80
    heads = [line.split()[1] for line in lines if line.startswith("╭")]
    assert heads == ["Options", "Decide", "Run", "Look"]
    verbs = [line.split()[1] for line in lines if line.startswith("│ ") and line[2].islower()]
    assert len(verbs) == len(set(verbs)) == 17  # each has one line of its own


def test_help_loads_neither_torch_nor_the_planner_and_answers_at_once() -> None:
    code = "import sys; from outsize.cli.app import run; run(['plan', '--help']); "
    code += "print(len(sys.modules)); "
    code += "print([m for m in ('torch', 'outsize.api', 'outsize.planner', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, modules, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert "--cluster" in done.stdout
    assert int(modules) < 700  # 537 are loaded in 0.4 s


@pytest.mark.parametrize("verb", sorted(get_group(make_app()).commands))
def test_a_paragraph_of_help_flows_over_the_width_of_the_terminal(
    outsize: Outsize, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = [line.strip() for line in outsize(verb, "--help").out.partition("╭")[0].splitlines()]
    for line, following in pairwise(said):
        if line and following:
            # No line ends where the first word of the next one had room: docstrings have other lines.
            assert len(line) + 1 + len(following.split()[0]) > 78, line
