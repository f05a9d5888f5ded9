"""A forked Python does what a new interpreter does, as far as a program and its parent can see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from forked import in_forks
from forked_python import forked_interpreters

SCRIPT = """
import atexit, os, signal, sys, tempfile, warnings
print(__name__, os.path.basename(__file__), sys.argv[1:], sys.path[0] == os.path.dirname(__file__))
print(os.getcwd(), os.environ.get("GIVEN"), os.environ.get("HIDDEN"), "pytest" in sys.meta_path.__repr__())
interrupted = signal.getsignal(signal.SIGINT)
print(tempfile.gettempdir() == os.environ["TMPDIR"])
print(signal.getsignal(signal.SIGTERM), getattr(interrupted, "__name__", interrupted), sys.stdin.read())
print(os.getsid(0) == os.getpid(), sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3])
atexit.register(print, "handler")
warnings.warn("a warning")
if sys.argv[1] == "raise":
    raise ValueError("boom")
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit({"number": 3, "text": "no data", "none": None}[sys.argv[1]])
"""


def ended(folder: Path, *arguments: str) -> tuple[int, str, str]:
    env = {name: value for name, value in os.environ.items() if name != "HIDDEN"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env | {"GIVEN": "yes", "TMPDIR": str(folder)},
        input="typed",
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("ending", ["raise", "kill", "number", "text", "none"])
def test_a_script_sees_and_leaves_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("HIDDEN", "yes")
    monkeypatch.setattr("warnings.formatwarning", lambda *_: "as a test before has left it")
    expected = ended(tmp_path, "script.py", ending)
    with forked_interpreters():
        assert ended(tmp_path, "script.py", ending) == expected
    assert expected[1].splitlines()[2] == "True"  # The folder for temporary files is that of TMPDIR.
    assert expected[0] == {"raise": 1, "kill": -signal.SIGTERM, "number": 3, "text": 1, "none": 0}[ending]


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As where a shell runs the tests in the background."""
    (tmp_path / "script.py").write_text(SCRIPT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        expected = ended(tmp_path, "script.py", "none")
        with forked_interpreters():
            assert ended(tmp_path, "script.py", "none") == expected
    finally:
        signal.signal(signal.SIGINT, before)
    assert "\n0 1 typed\n" in expected[1]  # SIGTERM by default, SIGINT ignored


@pytest.mark.parametrize("how", [["-c", "import sys; print(sys.argv)"], ["-P", "-m", "program"]])
def test_code_and_modules_run_as_main(
    tmp_path: Path, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint(__name__, len(sys.argv))\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    expected = ended(tmp_path, *how, "one", "two")
    with forked_interpreters():
        assert ended(tmp_path, *how, "one", "two") == expected
    assert expected[0] == 0


def test_a_fork_starts_forks_and_other_programs_are_programs(tmp_path: Path) -> None:
    code = "import os, subprocess, sys; print(os.getpid()); sys.stdout.flush(); "
    code += "subprocess.run([sys.executable, '-c', 'import sys; print(\"numpy\" in sys.modules)']); "
    code += "subprocess.run(['echo', 'said'])"
    with forked_interpreters():
        status, out, err = ended(tmp_path, "-c", code)
    assert (status, out.splitlines()[1:], err) == (0, ["True", "said"], "")
    assert int(out.split()[0]) != os.getpid()


def test_a_module_of_another_folder_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before this one may have imported a `toy` from their own folder."""
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toy_of_two.py").write_text(f"whose = {folder!r}\n")
    monkeypatch.syspath_prepend(tmp_path / "theirs")
    assert import_module("toy_of_two").whose == "theirs"
    try:
        with forked_interpreters():
            found = ended(tmp_path / "ours", "-c", "import toy_of_two; print(toy_of_two.whose)")
    finally:
        del sys.modules["toy_of_two"]
    assert found == (0, "ours\n", "")


def test_what_a_rank_has_written_before_it_ends_itself_is_told(tmp_path: Path) -> None:
    """As the watchdog does, whose text would be lost with the fork's stderr otherwise."""

    def rank(number: int) -> None:
        os.write(2, f"written by rank {number}\n".encode())
        os._exit(4 * number)

    with pytest.raises(AssertionError, match=r"(?s)have ended with .*4\].*written by rank 1"):
        in_forks(tmp_path, 2, rank)
