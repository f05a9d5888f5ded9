"""`python ...` as a fork of the test process, which has imported torch already.

A new interpreter spends two to three seconds of CPU on importing torch and outsize, and a launch starts one
more per rank. Within `forked_interpreters()` the standard library's `subprocess` starts this Python as a fork
that is made to look like a new interpreter: session, streams, environment, `sys.path`, `__main__`, signal
handlers, warnings, seeds and exit handlers are its own. Process ids, signals, pipes and exit codes are real.
The patch is inherited: the ranks that a forked launcher starts are forks as well.

A test about interpreters themselves (what they import, how they end) is marked `interpreters` and gets real
ones; the fixture `forked_python` of tests/conftest.py decides.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType, TracebackType
from typing import Any, NoReturn
from unittest.mock import patch

import outsize

TESTS = str(Path(__file__).parents[1])
OWN = str(Path(outsize.__file__).parent)
# What outsize imports late: once here instead of once in each child.
PRELOADED = (
    "numpy.random",
    "rich.table",
    "torch._dynamo",
    "torch._inductor.sizevars",  # This and export are what the first symbol of a length imports: a second.
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.export._trace",
)
MOST_OPEN_FILES = 4096
FORK = os.fork  # conftest.py counts calls of the one in `os`; the Popen is counted already
FORK_EXEC: Any = getattr(subprocess, "_fork_exec")  # noqa: B009 - private; what Popen calls to start a program


@contextlib.contextmanager
def forked_interpreters() -> Iterator[None]:
    """Within the block `subprocess`, and whatever uses it, starts this Python as forks of this process."""
    with patch.object(subprocess, "_fork_exec", _fork):
        yield


def _fork(command: Sequence[Any], programs: Sequence[bytes], *rest: Any) -> int:
    """Stands in for CPython's `_fork_exec`; returns the child's process id."""
    if os.fsdecode(programs[0]) != sys.executable:
        return FORK_EXEC(command, programs, *rest)
    _, inherited, folder, variables, stdin, _, _, stdout, _, stderr, _, errors, _, new_session, *_ = rest
    preload()
    paths = _import_paths()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = FORK()
    if pid:
        return pid
    code = 70
    try:
        gc.freeze()  # what the parent has is not looked through, and not copied, again and again
        if new_session:
            os.setsid()
        _take_streams((stdin, stdout, stderr), [number for number in inherited if number != errors])
        if folder is not None:
            os.chdir(folder)
        if variables is not None:
            pairs = (variable.partition(b"=") for variable in variables)
            _take_environment({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})
        _forget_the_test(paths)
        code = _run([os.fsdecode(part) for part in command[1:]], paths)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


@cache
def preload() -> None:
    """Imports what forks need, and finds their paths: before a fork that starts forks itself, or each such
    fork does it again.
    """
    _import_paths()
    modules = (module.name for module in walk_packages(outsize.__path__, "outsize."))
    for name in (*PRELOADED, *(name for name in modules if not (_is_program(name) or _is_adapter(name)))):
        import_module(name)


def _is_program(module: str) -> bool:
    """Whether `python -m` runs it, which warns about a module that has been imported before."""
    return module.startswith("outsize.") and module.endswith(("worker", "__main__"))


def _is_adapter(module: str) -> bool:
    """Whether it imports a training framework, which takes seconds and most tests do not need."""
    return module.startswith("outsize.integrations.")


@cache
def _import_paths() -> tuple[str, ...]:
    """`sys.path` of a new interpreter without a script and without PYTHONPATH."""
    code = "import sys; print('\\n'.join(sys.path))"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with patch.object(subprocess, "_fork_exec", FORK_EXEC):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=variables, capture_output=True, text=True, check=True
        )
    return tuple(done.stdout.splitlines())


def _take_streams(streams: Sequence[int], inherited: Sequence[int]) -> None:
    """The pipes become standard input, output and error; of other files `inherited` stay open."""
    faulthandler.disable()
    for number, stream in enumerate(streams):
        if stream not in (-1, number):
            os.dup2(stream, number)
    for first, end in pairwise((2, *sorted(number for number in inherited if number > 2), MOST_OPEN_FILES)):
        os.closerange(first + 1, end)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if number == 2 else "strict"
        text = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=number == 2)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _take_environment(variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    os.environ.update(variables)


def _is_of_a_test(module: ModuleType, paths: Sequence[str]) -> bool:
    """Whether a module's file is in this folder of tests, or in none from which programs import."""
    file = getattr(module, "__file__", None) or ""
    is_installed = not os.path.isabs(file) or any(path and file.startswith(path) for path in (*paths, OWN))
    return file.startswith(TESTS) or not is_installed


def _forget_the_test(paths: Sequence[str]) -> None:
    """What pytest, its plugins and the tests before have set in this process; also modules that they have
    imported from folders of their own, whose names another test's program may use.
    """
    import numpy as np
    import torch

    atexit._clear()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a new interpreter inherits what is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.settrace(None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
    for name, module in list(sys.modules.items()):
        if _is_program(name) or _is_of_a_test(module, paths):
            del sys.modules[name]
    tempfile.tempdir = None  # It is found anew, by this program's TMPDIR.
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.formatwarning = warnings._formatwarning_orig  # type: ignore[attr-defined]  # outsize's verbs set it
    warnings._showwarnmsg_impl = _show_warning  # type: ignore[attr-defined]  # pytest's collects in a list
    reset_malloc()
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)  # libgomp's pool does not survive a fork


def reset_malloc() -> None:
    """glibc's defaults (mallopt(3)), which `keep_freed_memory` has changed where the test process has run an
    engine; what is free goes back to the kernel, so that resident memory is what this process uses.
    """
    glibc = ctypes.CDLL(None)
    mmap_max, mmap_threshold, trim_threshold = -4, -3, -1
    for parameter, value in ((mmap_max, 65536), (mmap_threshold, 128 << 10), (trim_threshold, 128 << 10)):
        glibc.mallopt(parameter, value)
    glibc.malloc_trim(0)


def _show_warning(message: Any) -> None:
    sys.stderr.write(warnings._formatwarnmsg(message))  # type: ignore[attr-defined]


def _run(arguments: list[str], paths: Sequence[str]) -> int:
    """Runs a script, `-c CODE` or `-m MODULE` as `__main__`; returns the exit code."""
    safe_path = False
    while arguments[0] in ("-P", "-u", "-W"):
        safe_path |= arguments[0] == "-P"
        if arguments[0] == "-W":
            warnings.simplefilter("ignore")
            assert arguments.pop(1) == "ignore"
        arguments = arguments[1:]
    kind, *names = arguments
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*extra, *paths]
    try:
        if kind == "-c":
            sys.argv = ["-c", *names[1:]]
            _add_path("", safe_path)
            main = ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(names[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.argv = names
            _add_path(os.getcwd(), safe_path)
            sys.modules.pop(names[0], None)
            runpy.run_module(names[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            _add_path(str(Path(kind).resolve().parent), safe_path)
            _run_script(kind)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error = error.with_traceback(_of_the_program(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy, as a new interpreter prints it."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _add_path(path: str, safe_path: bool) -> None:
    if not safe_path:
        sys.path.insert(0, path)


def _run_script(path: str) -> None:
    """`__main__` stays in `sys.modules`, where pickle and inspect look for a script's classes."""
    path = os.path.abspath(path)
    main = ModuleType("__main__")
    main.__dict__["__file__"] = path
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), main.__dict__)


def _end(code: int) -> NoReturn:
    """What Python does after `__main__`, but for tearing down the interpreter."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
