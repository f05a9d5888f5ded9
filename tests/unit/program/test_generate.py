"""The text of a generated function, and that it does what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import batch, linear, two
from splits import captured
from torch import Tensor, nn

from outsize.errors import ReplayMismatch
from outsize.program.generate import SliceSpec, compile_slice, expect, swapped
from outsize.program.tape import Ref, Tape


def whole(tape: Tape, model: nn.Module, **options: Any) -> Any:
    """All of a tape as one function of its inputs."""
    exits = tape.output_slots()
    spec = SliceSpec("whole", tape.instructions, tape.inputs, exits, constants=tape.constants, **options)
    return compile_slice(spec, model, tape.modes)


def no_seed(instruction: int) -> None:
    raise AssertionError(f"instruction {instruction} draws nothing")


def replayed(model: nn.Module, *args: Tensor) -> tuple[Any, str]:
    function = whole(captured(model, *args).tape, model)
    return function(*args, no_seed), function.source


def test_arguments_of_all_kinds_find_their_way_into_the_text() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)[:, None, ..., 1:3].to(torch.float64).sum(dim=(1,), keepdim=True)
        z = torch.clamp(y, max=float("inf")) + torch.full((2,), float("nan"), device="cpu").nan_to_num()
        return m.b(torch.cat([z.float(), x[:, None, 2:]], dim=1).flatten(1))

    model = two(run)
    (found,), source = replayed(model, batch())
    assert torch.equal(found, model(batch()))
    assert "slice(1, 3, None)" in source
    assert "torch.float64" in source


def test_every_local_is_deleted_at_its_last_use() -> None:
    model = two(lambda m, x: m.b(torch.relu(m.a(x))) + 1)
    _, source = replayed(model, batch())
    lines = [line.strip() for line in source.splitlines()]
    assert lines[1:6:2] == ["v1 = m0(v0)  # a", "v2 = f1(v1)  # relu", "v3 = m2(v2)  # b"]
    assert all(f"del v{slot}" in source for slot in range(3))


def test_weights_are_fetched_at_each_call() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)) * m.scale, scale=nn.Parameter(torch.ones(4)))
    function = whole(captured(model, batch()).tape, model)
    before = function(batch(), no_seed)[0]
    model.scale = nn.Parameter(torch.full((4,), 2.0))
    assert torch.equal(function(batch(), no_seed)[0], before * 2)


def test_random_instructions_are_seeded_by_their_number_and_no_others() -> None:
    model = two(lambda m, x: m.b(nn.functional.dropout(m.a(x), 0.5)))
    tape = captured(model, batch()).tape
    asked: list[int] = []
    whole(tape, model)(batch(), asked.append)
    assert asked == [1]
    assert [i.index for i in tape.instructions if i.random] == [1]


def test_a_foreign_weight_stands_in_its_module_only_around_the_call() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)))
    own, lent = model.a.weight, nn.Parameter(torch.zeros(4, 4))
    function = whole(captured(model, batch()).tape, model, foreign=("a.weight",))
    out = function(batch(), lent, no_seed)[0]
    assert model.a.weight is own
    assert torch.equal(out, model.b(model.a.bias.expand(4, 4)))
    out.sum().backward()
    assert own.grad is None
    assert lent.grad is not None


def test_a_swap_ends_also_when_the_call_raises() -> None:
    layer = linear()
    weight = layer.weight
    with pytest.raises(KeyError), swapped((layer._parameters, "weight", nn.Parameter(torch.zeros(4, 4)))):
        raise KeyError
    assert layer.weight is weight


def test_modes_become_with_blocks_only_where_they_change() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.a(x) * 2
        return m.b(y)

    (found,), source = replayed(two(run), batch())
    assert source.count("with torch.set_grad_enabled(False):") == 1
    assert found.requires_grad


def test_python_values_of_leaves_are_expected() -> None:
    expect(float("nan"), float("nan"), "leaf", "here")
    with pytest.raises(
        ReplayMismatch, match=r"leaf returns another Python value.*captured 3, got 4, used at here"
    ):
        expect(4, 3, "leaf", "here")


def test_a_result_in_a_structure_is_taken_apart_by_path() -> None:
    model = two(lambda m, x: m.b(m.lstm(m.a(x))[1][1]), lstm=nn.LSTM(4, 4))
    tape = captured(model, batch()).tape
    lstm = next(i for i in tape.instructions if i.name == "lstm")
    assert lstm.out == (Ref(2), (Ref(3), Ref(4)))
    source = whole(tape, model).source
    assert "expect(len(out[1]), 2, 'lstm'" in source
    assert "v4 = out[1][1]" in source
    assert "v2 = out[0]" not in source  # nobody reads it
