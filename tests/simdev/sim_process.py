"""Runs tests that are marked `sim` in a process of their own, one for each file, and reports them here.

The autograd engine counts the devices of a process at the first backward, so the simulated device has to be
there before; and a process that has it cannot fork into others that use autograd. Other tests of the same
pytest process do both. The hook of tests/conftest.py calls `run` for each such test; the first test of a file
starts a child, which loads the device, runs all chosen tests of the file, and writes its reports to a file.
A test has its time limit in the child; here the first test of a file takes the time of all.

Children are forks of a server, because a new interpreter spends four seconds of CPU on its imports. The
server has imported what they need and has neither the device nor a backward behind it. It is
`python sim_process.py`, reads a command on each line, and answers with the end of what that has printed.
"""

from __future__ import annotations

import _posixsubprocess
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, final

import pytest

_REPORTS: Final = "SIMDEV_REPORTS"  # In a child: the file of its reports.
_FOUND: Final = pytest.StashKey[dict[str, list[Any]]]()
_OPTIONS: Final = ("--all",)
_LAST_CHARACTERS: Final = 6000
_TESTS: Final = Path(__file__).parents[1]
_PRELOADED: Final = ("hypothesis", "transformers.models.gpt2.modeling_gpt2")
"""What tests and models of the children import, after torchvision and transformers."""


def is_child() -> bool:
    """Returns whether this process was started for tests of the simulated device."""
    return _REPORTS in os.environ


@final
class _Writer:
    """Writes the reports of a child to the file that its parent reads."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with Path(os.environ[_REPORTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


def prepare_child(config: pytest.Config) -> None:
    """Loads the device, before anything uses autograd, and reports to the parent.

    What its tests start are programs again, because a process with the device cannot be forked.
    """
    import simdev

    setattr(subprocess, "_fork_exec", _posixsubprocess.fork_exec)  # noqa: B010 - forked_python.py's is inherited
    simdev.load()
    config.pluginmanager.register(_Writer(config))


def run(item: pytest.Item) -> bool:
    """Reports a test that a child has run; the first test of a file starts the child."""
    found = item.session.stash.setdefault(_FOUND, {})
    if item.nodeid not in found:
        mates = [i for i in item.session.items if i.path == item.path and i.get_closest_marker("sim")]
        found.update(_reports_of(item.config, mates))
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in found[item.nodeid]:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports_of(config: pytest.Config, items: list[pytest.Item]) -> dict[str, list[Any]]:
    from simdev import build

    if build.compiler() is None:
        why = "the simulated device needs a C++ compiler: g++ or clang++"
        return {item.nodeid: [_made(item, "skipped", (str(item.path), 0, why))] for item in items}
    reports: dict[str, list[Any]] = {item.nodeid: [] for item in items}
    output = _child(config, [item.nodeid for item in items], reports)
    for item in items:
        if not reports[item.nodeid] or reports[item.nodeid][-1].when != "teardown":
            reports[item.nodeid].append(
                _made(item, "failed", f"the process of the test ended early:\n{output}")
            )
    return reports


def _child(config: pytest.Config, nodes: list[str], reports: dict[str, list[Any]]) -> str:
    """Runs the tests in a new process, adds its reports, and returns the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports"
        path.touch()
        options = [option for option in _OPTIONS if config.getoption(option, default=False)]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *options,
            *nodes,
        ]
        hidden = {"PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"}
        given = {key: value for key, value in os.environ.items() if key not in hidden}
        variables = {**given, _REPORTS: str(path), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        printed = _server().run(command, str(config.rootpath), variables)
        for line in path.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            reports.setdefault(report.nodeid, []).append(report)
    return printed


def _made(item: pytest.Item, outcome: Any, why: Any) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, why, "call" if outcome == "failed" else "setup"
    )


@final
class _Server:
    """Starts children as its forks, one after the other."""

    def __init__(self) -> None:
        paths = [str(_TESTS.parent / "src"), str(_TESTS / "unit"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        )

    def run(self, command: list[str], folder: str, variables: dict[str, str]) -> str:
        """Returns the end of what the command has printed, when it is over."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"args": command, "cwd": folder, "env": variables}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            return "the server of simulated devices has ended"


@cache
def _server() -> _Server:
    """The server of this process, started at its first use; it ends when its standard input does."""
    return _Server()


def _serve(answers: IO[str]) -> None:
    import unpickled
    from forked_python import forked_interpreters, preload

    from outsize.capture.models.imports import import_transformers

    preload()
    import_transformers()
    for name in _PRELOADED:
        import_module(name)
    unpickled.guard()  # once for all children
    with forked_interpreters():
        for line in sys.stdin:
            done = subprocess.run(
                **json.loads(line),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            answers.write(json.dumps(done.stdout[-_LAST_CHARACTERS:]) + "\n")
            answers.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the server itself prints is no answer
    _serve(answers)
