"""A user's folder with small models, and the command line called in this process."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest

from outsize.cli.app import run

MODELS = """
import torch
from torch import nn

def build(width=8, layers=6):
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])

def pair():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        print("the model speaks")
        return {"loss": self.layer(x).square().mean()}

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        return self.second(y if y.sum() > 0 else -y)

class Mute(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).sum(1)
"""


@final
@dataclass(frozen=True)
class Answer:
    """What one command line gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a `toy.py`; `broken.py` and `torn.py` do not import."""
    monkeypatch.chdir(tmp_path)
    for name in ("toy", "broken", "torn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "toy.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "broken.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "torn.py").write_text("def build(:\n")
    return tmp_path


@pytest.fixture
def outsize(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`outsize("plan", "toy:build")` in the user's folder."""

    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call
