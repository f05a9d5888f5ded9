"""The second question about a model makes no recording, and has the answer of the first, byte for byte.

Whatever a recording depends on makes it another question; what cannot be compared is not kept.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from types import MethodType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.train.measure import training_case

pytestmark = pytest.mark.usefixtures("no_files_of_other_tests")
EXAMPLE: Final = torch.zeros(8, 16)
HOUR_NS: Final = 3600 * 10**9


class Block(nn.Module):
    """A block with a setting that its forward reads."""

    def __init__(self, negative: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.negative = negative

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.gelu(self.first(x)))
        return x - y if self.negative else x + y


class Inherited(Block):
    """The same code by another name."""


class Chosen(nn.Module):
    """A model whose forward looks at the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(16, 16), Block()

    def forward(self, ids: Tensor) -> Tensor:
        found = self.block(self.table(ids))
        return found if bool((ids < 8).all()) else self.block(found)


def tied() -> nn.Module:
    model = blocks()
    model[1].first.weight = model[0].first.weight
    return model


def blocks(kind: type[nn.Module] = Block, **settings: Any) -> Any:
    with torch.device("meta"):
        return nn.Sequential(*(kind(**settings) for _ in range(3)))


def planned(
    folder: Path | None, model: Any = None, example: Tensor = EXAMPLE, loss: Any = Tensor.mean, **asked: Any
) -> str:
    request = outsize.Request(recordings=folder, cluster="4xh100-80gb", **asked)
    return outsize.plan(
        blocks() if model is None else model, (example,), loss_fn=loss, request=request
    ).to_json()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Holds an entry for each recording."""
    found, record = list[str](), training_case.record

    def recording(*args: Any, **kwargs: Any) -> Any:
        found.append("recorded")
        return record(*args, **kwargs)

    monkeypatch.setattr(training_case, "record", recording)
    return found


def is_kept(folder: Path, recorded: list[str], **asked: Any) -> bool:
    """Whether a question is answered without a recording, and as without the folder."""
    recorded.clear()
    answer = planned(folder, **asked)
    made = len(recorded)
    assert answer == planned(None, **asked)
    return not made


def test_the_second_question_makes_no_recording(tmp_path: Path, recorded: list[str]) -> None:
    first = planned(tmp_path)
    assert recorded
    assert is_kept(tmp_path, recorded)
    assert planned(tmp_path) == first
    assert (tmp_path.stat().st_mode & 0o077) == 0 or os.name == "nt"


def test_a_fit_and_a_loss_in_pieces_are_kept(tmp_path: Path, recorded: list[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1 << 18))
    asked: dict[str, Any] = {
        "loss_fn": functional.cross_entropy,
        "target": torch.zeros(1 << 14, dtype=torch.long),
    }

    def fitted() -> outsize.ir.answers.fit.Fit:
        request = outsize.Request(recordings=tmp_path, cluster="2x24GB")
        return outsize.fit(model, (torch.zeros(1 << 14, 64),), request=request, **asked)

    first = fitted()
    assert recorded
    recorded.clear()
    assert fitted().to_json() == first.to_json()
    assert not recorded


CHANGES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "attribute": lambda: {"model": blocks(negative=True)},
    "one module's attribute": lambda: {"model": with_attribute(blocks())},
    "class": lambda: {"model": blocks(Inherited)},
    "dtype": lambda: {"model": blocks().bfloat16(), "example": EXAMPLE.bfloat16()},
    "frozen": lambda: {"model": blocks().requires_grad_(False).append(nn.Linear(16, 16, device="meta"))},
    "tied": lambda: {"model": tied()},
    "precision": lambda: {"precision": "bf16-mixed"},
    "shape": lambda: {"example": torch.zeros(8, 4, 16)},
    "loss": lambda: {"loss": Tensor.sum},
    "instance's forward": lambda: {"model": with_forward(blocks())},
    "hook": lambda: {"model": with_hook(blocks())},
    "inference": lambda: {"inference": True, "loss": None},
}


def with_attribute(model: Any) -> Any:
    model[1].negative = True
    return model


def other_forward(module: Any, x: Tensor) -> Tensor:
    return module.second(functional.relu(module.first(x)))


def with_forward(model: Any) -> Any:
    model[1].forward = MethodType(other_forward, model[1])
    return model


def doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


def with_hook(model: Any) -> Any:
    model[1].register_forward_hook(doubled)
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_question(change: str, tmp_path: Path, recorded: list[str]) -> None:
    planned(tmp_path)
    assert not is_kept(tmp_path, recorded, **CHANGES[change]())
    assert is_kept(tmp_path, recorded)


def test_values_that_a_forward_looks_at_are_another_question(tmp_path: Path, recorded: list[str]) -> None:
    low, high = torch.zeros(8, 4, dtype=torch.long), torch.full((8, 4), 9)
    model = Chosen()
    planned(tmp_path, model, low)
    assert not is_kept(tmp_path, recorded, model=model, example=high)
    assert is_kept(tmp_path, recorded, model=model, example=low)


def test_a_patched_forward_is_another_question(
    tmp_path: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(tmp_path)
    monkeypatch.setattr(Block, "forward", other_forward)
    assert not is_kept(tmp_path, recorded)


@pytest.mark.parametrize("owner", [functional, nn.Linear])
def test_a_patched_torch_is_another_question(
    owner: Any, tmp_path: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gelu" if owner is functional else "forward"
    planned(tmp_path)
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs) * 2)
    assert not is_kept(tmp_path, recorded)


SOURCE: Final = """
from torch import nn
import helper_of_kept

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16, device="meta")

    def forward(self, x):
        return helper_of_kept.changed(self.layer(x))
"""


def imported(folder: Path, helper: str) -> Any:
    """Imports a model whose helper is another file, as a new process would; its files are old."""
    (folder / "model_of_kept.py").write_text(SOURCE)
    (folder / "helper_of_kept.py").write_text(f"def changed(x):\n    return {helper}\n")
    for path in folder.glob("*.py"):
        os.utime(path, ns=(HOUR_NS, HOUR_NS))  # Of the same size and time: its contents tell.
    importlib.invalidate_caches()
    sys.modules.pop("helper_of_kept", None)
    sys.modules.pop("model_of_kept", None)
    return importlib.import_module("model_of_kept").Model()


def test_an_edited_file_is_another_question(
    tmp_path: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    kept = tmp_path / "kept"
    planned(kept, imported(tmp_path, "x + 1"))
    assert is_kept(kept, recorded, model=imported(tmp_path, "x + 1"))
    assert not is_kept(kept, recorded, model=imported(tmp_path, "x * x"))
    monkeypatch.delitem(sys.modules, "helper_of_kept")
    monkeypatch.delitem(sys.modules, "model_of_kept")


def test_what_cannot_be_compared_is_not_kept(tmp_path: Path, recorded: list[str]) -> None:
    model = blocks()
    model[0].lock = Lock()
    planned(tmp_path, model)
    assert not is_kept(tmp_path, recorded, model=model)
    assert not list(tmp_path.iterdir())


def test_an_answer_with_a_warning_is_not_kept(tmp_path: Path) -> None:
    model = blocks()
    model[0].forward = MethodType(warning_forward, model[0])
    for _ in range(2):
        with pytest.warns(UserWarning, match="a block warns"):
            planned(tmp_path, model)


def warning_forward(module: Any, x: Tensor) -> Tensor:
    warnings.warn("a block warns", stacklevel=1)
    return other_forward(module, x)


def test_no_folder_keeps_nothing(recorded: list[str]) -> None:
    planned(None)
    recorded.clear()
    planned(None)
    assert recorded
