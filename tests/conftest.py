"""Golden files: `pytest tests/golden --update-golden` writes them anew, a plain run compares.
`--all` adds the tests marked `full`.

Look at `git diff tests/golden` before you commit an update: it is a change of behaviour.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from math import inf
from pathlib import Path
from typing import Any

import pytest
import sim_process
import unpickled
from forked_python import forked_interpreters
from hypothesis import HealthCheck, settings

# The same examples each time, and no limit on how long one takes: neither chance nor a busy machine decides.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=(HealthCheck.too_slow,)
)
settings.load_profile("suite")

GOLDEN = Path(__file__).parent / "golden"
SECONDS = Path(__file__).parent / "seconds.json"
FEWEST_EXAMPLES = 3
_SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis keeps what `@settings` has said
STARTED = {"programs": 0}
AT_START = pytest.StashKey[tuple[float, int]]()


def pytest_configure(config: pytest.Config) -> None:
    """Counts the programs and forks that this process starts. A child for the simulated device loads it.

    Garbage is collected after many more objects than by default, which takes a thirtieth of the suite's time.
    """
    gc.set_threshold(50_000, 20, 50)
    os.environ["OUTSIZE_RECORDINGS"] = "off"  # No test depends on what another one has left.
    unpickled.guard()
    if sim_process.is_child():
        sim_process.prepare_child(config)
    os.fork = _counted(os.fork)
    subprocess.Popen.__init__ = _counted(subprocess.Popen.__init__)


def _counted(start: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are counted as programs. An audit hook, which would count as well, is called
    for each `id()`, too: 2 % of the seconds of tests that record models.
    """

    @wraps(start)
    def started(*arguments: Any, **named: Any) -> Any:
        STARTED["programs"] += 1
        return start(*arguments, **named)

    return started


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/** instead of comparing"
    )
    parser.addoption(
        "--all", action="store_true", help="also what is marked `full`: all of the parity product"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, leaves out tests marked `full`, as are rows that `sample` does not name, and draws a
    quarter of the examples of properties. With --all those properties are marked `full`, too.

    Workers of pytest-xdist take the longest files first, and before them those whose seconds are not known: a
    long one at the end would keep one worker busy alone. Tests of the simulated device have their time limits
    in the process that runs them.
    """
    everything = config.getoption("--all")
    if not sim_process.is_child():  # which gets the rows that were chosen
        _mark_rows_left_out(items)
    for item in items if everything else ():
        if _examples(item) > FEWEST_EXAMPLES:
            item.add_marker("full")
    if not everything:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        for function in {getattr(item, "obj", None) for item in items if _examples(item) > FEWEST_EXAMPLES}:
            given: settings = getattr(function, _SETTINGS)
            fewer = max(FEWEST_EXAMPLES, given.max_examples // 4)
            setattr(function, _SETTINGS, settings(given, max_examples=fewer))
    for item in items:
        if item.get_closest_marker("sim") and not sim_process.is_child():
            item.add_marker(pytest.mark.timeout(0), append=False)
    if hasattr(config, "workerinput"):
        seconds = {config.rootpath / name: s for name, s in json.loads(SECONDS.read_text()).items()}
        items.sort(key=lambda item: -seconds.get(item.path, inf))


def _examples(item: pytest.Item) -> int:
    """How many examples a property draws at most; 0 for other tests."""
    given: settings | None = getattr(getattr(item, "obj", None), _SETTINGS, None)
    return 0 if given is None else given.max_examples


def _mark_rows_left_out(items: list[pytest.Item]) -> None:
    """Marks rows that `sample` leaves out as `full`."""
    rows = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not item.get_closest_marker("full"):
            rows[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in rows.values():
        taken = set(_sampled(of_one_test))
        for item in of_one_test:
            if item not in taken:
                item.add_marker("full")


def _sampled(rows: list[pytest.Item]) -> list[pytest.Item]:
    """Of the rows of one test those that its mark `sample` names by the beginning of their ids, or every
    `every`-th from the row `first`; all without the mark.
    """
    mark = rows[0].get_closest_marker("sample")
    if mark is None:
        return rows
    if not mark.args:
        return rows[mark.kwargs.get("first", 0) :: mark.kwargs["every"]]
    ids = [item.nodeid.partition("[")[2][:-1] for item in rows]
    unknown = [name for name in mark.args if not any(f"{each}-".startswith(f"{name}-") for each in ids)]
    if unknown and len(rows) > len(mark.args):  # else one row was asked for on the command line
        raise pytest.UsageError(f"{rows[0].nodeid}: `sample` names {unknown}, which are no rows")
    return [
        item
        for item, each in zip(rows, ids, strict=True)
        if any(f"{each}-".startswith(f"{name}-") for name in mark.args)
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Gives tests of the simulated device to a process of their own.

    What the test before has left set up for this one (its module and package) is torn down here.
    """
    if not item.get_closest_marker("sim") or sim_process.is_child():
        return None
    item.session._setupstate.teardown_exact(nextitem)
    return sim_process.run(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Notes the CPU seconds and the programs before the test."""
    item.stash[AT_START] = (_cpu_s(), STARTED["programs"])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Records what the test has taken; benchmarks/test-time/run.py reads it from a junit file."""
    try:
        return (yield)
    finally:
        cpu_s, programs = item.stash[AT_START]
        item.user_properties.append(("cpu_s", round(_cpu_s() - cpu_s, 3)))
        item.user_properties.append(("started", STARTED["programs"] - programs))


def _cpu_s() -> float:
    """CPU seconds of this process and of the processes that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("schedules/x.csv", text)` asserts that the file holds exactly this text."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}; write it with pytest --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def shared_recordings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines of equal models share what the first in a file has recorded; for tests that are not about
    recording.
    """
    from recorded_once import recorded_once  # with torch, which some folders do without

    with recorded_once(among=request.path):
        yield


@pytest.fixture
def forked_python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python programs that the test starts are forks of this process, unless it is marked `interpreters`."""
    if request.node.get_closest_marker("interpreters"):
        yield
        return
    with forked_interpreters():
        yield
