"""The table of instructions under each Python that is installed here, in a process without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.capture.guards.trace import opcodes
from outsize.errors import UnknownPython

WALK = Path(__file__).with_name("opcode_depths.py")
# They end a frame or pause it, or no way leads to them (FOR_ITER jumps behind END_FOR).
EMPTY_THE_STACK = {
    *("RAISE_VARARGS", "RERAISE", "RETURN_GENERATOR", "YIELD_VALUE", "END_FOR"),
    *("PUSH_EXC_INFO", "WITH_EXCEPT_START", "POP_EXCEPT"),
}


@pytest.mark.interpreters
@pytest.mark.parametrize("version", opcodes.KNOWN, ids=lambda v: f"python{v[0]}.{v[1]}")
def test_every_instruction_has_an_entry_and_the_stack_comes_out(version: tuple[int, int]) -> None:
    """Under the Python that runs the tests always, under the others where they are found."""
    name = f"python{version[0]}.{version[1]}"
    python = sys.executable if sys.version_info[:2] == version else name
    environment = {**os.environ, "PYENV_VERSION": name.removeprefix("python")}  # where pyenv answers
    command = [python, "-I", str(WALK), opcodes.__file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        pytest.skip(f"there is no {name}")
    if done.returncode == 127:
        pytest.skip(f"there is no {name}: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert tuple(found["version"]) == version
    assert found["wrong"] == []
    assert set(found["without"]) <= EMPTY_THE_STACK


def test_a_python_that_is_not_known_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the model has run; a warning alone would let values change unseen."""
    calls: list[str] = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("forward")
            return x.sum()

    monkeypatch.setattr(opcodes, "VERSION", (3, 99))
    with pytest.raises(
        UnknownPython, match=r"Python 3\.99 .* known are 3\.11, 3\.12.* Next: python3\.\d+ -m"
    ):
        outsize.parallelize(Counted(), (torch.ones(2),), stages=1)
    assert calls == []
