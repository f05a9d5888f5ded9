"""The line that an error names is the user's, whatever the folders above it are called."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import outsize
import outsize.errors
import outsize.ir.cluster
from outsize.program.source_line import (
    calling_line,
    frames_outside_outsize,
    is_outsize_file,
    raising_line,
)

FOLDERS = ["outsize", "torch", "src/outsize", "work"]

MODEL = """
import torch, outsize

class Model(torch.nn.Module):
    def forward(self, x):
        raise ValueError("user")

outsize.check(Model(), (torch.ones(2, 3),))
"""


def raised(folder: str, text: str = "1 / 0") -> Exception:
    """The error of a line of a file `job.py` in `folder`."""
    try:
        exec(compile(text, f"/home/me/{folder}/job.py", "exec"), {})
    except Exception as error:
        return error
    raise AssertionError(text)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_users_folder_may_have_any_name(folder: str) -> None:
    assert raising_line(raised(folder)) == f"/home/me/{folder}/job.py:1"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_caller_may_be_in_any_folder(folder: str) -> None:
    names = {"calling_line": calling_line, "lines": []}
    exec(compile("\nlines.append(calling_line())", f"/home/me/{folder}/job.py", "exec"), names)
    assert names["lines"] == [f"/home/me/{folder}/job.py:2"]


def test_torch_is_named_only_where_no_user_frame_is_deeper() -> None:
    error = raised("outsize", "import torch\n\ntorch.nn.functional.relu('x')")
    assert raising_line(error) == "/home/me/outsize/job.py:3"


def test_code_without_a_file_is_the_users() -> None:
    with pytest.raises(TypeError) as caught:
        exec(compile("import torch\ntorch.nn.functional.relu('x')", "<stdin>", "exec"), {})
    assert raising_line(caught.value) == "<stdin>:2"


def test_a_context_manager_is_not_who_raised() -> None:
    text = (
        "import contextlib\n@contextlib.contextmanager\ndef within():\n    try:\n        yield\n"
        "    except KeyError as error:\n        raise ValueError from error\n\n"
        "with contextlib.ExitStack() as stack:\n    stack.enter_context(within())\n    {}['a']"
    )
    assert raising_line(raised("outsize", text)) == "/home/me/outsize/job.py:7"


def test_pythons_own_frames_are_left_out() -> None:
    error = raised("outsize", "import json\n\njson.loads('{')")
    assert raising_line(error) == "/home/me/outsize/job.py:3"


def test_the_packages_own_frames_are_left_out() -> None:
    assert is_outsize_file(outsize.errors.__file__)
    with pytest.raises(outsize.errors.UnknownDevice) as caught:
        outsize.ir.cluster.parse_cluster("no such cluster")
    own = [frame.filename for frame in frames_outside_outsize(caught.value)]
    assert own == [__file__]


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("folder", ["outsize", "torch"])
def test_an_error_names_the_line_of_a_script_in_such_a_folder(tmp_path: Path, folder: str) -> None:
    script = tmp_path / folder / "job.py"
    script.parent.mkdir()
    script.write_text(MODEL, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "outsize.errors" in done.stderr
    assert f"{script}:6" in done.stderr.splitlines()[-1]


def test_a_warning_names_the_line_that_called_outsize(tmp_path: Path) -> None:
    """However many functions of outsize lie between: a checkpoint is looked for five calls below."""
    model, x = torch.nn.Linear(4, 3), torch.ones(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outsize.parallelize(model, (x,), loss_fn=torch.Tensor.sum, stages=1, resume=tmp_path)
    (note,) = [one for one in caught if "no checkpoint in" in str(one.message)]
    assert note.filename == __file__
