"""No name of a model becomes code in the text of a stage, nor a line of its own."""

from __future__ import annotations

import builtins
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import captured
from torch import Tensor, nn

from outsize.errors import visible
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.replaying.replay import bindings
from outsize.program.tape import Ref

RAN = "doors_ran"
CALL = f"{RAN}()"
HOSTILE = (
    f"x\n    {CALL}\n    #",
    f"x\r{CALL}",
    f"x\u2028{CALL}",
    f"x\x0c\x00{CALL}",
    f"'] + {CALL} + ['",
    f'"] + {CALL} + ["',
    f"[{CALL}]",
    f"a[{CALL}]",
    f"{{{CALL}}}",
    "\\",
    "\\'",
    '"""',
    "class",
    "a b",
    "é",
)


@pytest.fixture(autouse=True)
def _nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran() -> None:
        raise AssertionError("a name ran as code")

    monkeypatch.setattr(builtins, RAN, ran, raising=False)


class Odd:
    """A key whose text is code."""

    def __repr__(self) -> str:
        return CALL


@final
class Named(nn.Module):
    """Uses a name for a child, a parameter, a buffer, an item of an attribute and an output."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.children_of = nn.ModuleDict({name: nn.Linear(3, 3)})
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.rand(3))})
        self.register_buffer(name, torch.rand(3))
        self.held = {name: [torch.rand(3)]}
        self.both = Pair(name)

    def forward(self, x: Tensor) -> Any:
        h = self.children_of[self.name](x) * self.weights[self.name] + self.get_buffer(self.name)
        h = self.both(h + self.held[self.name][0])[self.name]
        return torch.relu(h), {self.name: h}


@final
class Pair(nn.Module):
    """A leaf with an option and an output of that name, and a number to expect."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.inner = name, nn.ReLU6()

    def forward(self, x: Tensor) -> Any:
        return {self.name: self.inner(x), "n": 3}


def insist_on_plain_names(name: str) -> None:
    model, x = Named(name), torch.rand(2, 3)
    tape = captured(model, x).tape
    spec = SliceSpec("stage_0", tape.instructions, tape.inputs, tape.output_slots(), constants=tape.constants)
    function = compile_slice(spec, model, tape.modes)
    found = function(x, lambda instruction: None)
    assert torch.equal(found[0], model(x)[0])
    calls = sum(line.lstrip().startswith(("v", "out")) for line in function.source.splitlines())
    assert calls >= 4
    assert visible(function.source, keep="\n") == function.source


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_only_names(name: str) -> None:
    insist_on_plain_names(name)


@settings(max_examples=15, deadline=None)
@given(st.text(min_size=1, max_size=12).filter(lambda name: "." not in name and not hasattr(Named, name)))
def test_any_name_is_only_a_name(name: str) -> None:
    insist_on_plain_names(f"{name}_")


def test_keys_and_options_of_leaves_are_only_names() -> None:
    odd, name = Odd(), HOSTILE[0]

    class Leaf(nn.ReLU):
        def forward(self, x: Tensor, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return OrderedDict([(odd, x + options[name][odd]), (name, 2)])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x: Tensor) -> Tensor:
            return self.leaf(x, **{name: {odd: x}})[odd] * 2

    model, x = Whole(), torch.rand(2)
    tape = captured(model, x).tape
    spec = SliceSpec("stage_0", tape.instructions, tape.inputs, tape.output_slots(), constants=tape.constants)
    (found,) = compile_slice(spec, model, tape.modes)(x, lambda instruction: None)
    assert torch.equal(found, x * 4)


@dataclass
class Fields:
    """An output with fields."""

    one: Any
    two: Any


def test_a_replay_walks_to_the_parts_of_a_result() -> None:
    odd = Odd()
    tree = Fields({odd: Ref(1), "a": [Ref(2)]}, (Ref(3),))
    out = Fields({odd: 10, "a": [20]}, (30,))
    assert bindings(tree, out) == {1: 10, 2: 20, 3: 30}
