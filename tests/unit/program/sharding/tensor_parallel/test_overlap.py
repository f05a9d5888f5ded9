"""By hand: which products are joined with the collective of their backward, and which are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from test_styles import Net, X
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.recording.fallbacks import record
from outsize.program.sharding.axis_group import CountedGroup
from outsize.program.sharding.share import RankPosition
from outsize.program.sharding.tensor_parallel.local_tape import local_tape
from outsize.program.sharding.tensor_parallel.overlap import overlapped
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import derive
from outsize.program.tape import Instruction, Ref, Tape, Weight


def local_of(model: nn.Module, *, sequence: bool = False) -> Tape:
    tape = record(model, (X,), {})
    derived = derive(tape, model)
    derived = in_sequence(tape, derived, model) if sequence else derived
    return local_tape(tape, derived, dict(model.named_modules()), CountedGroup(RankPosition(0, 2)))


def joined(model: nn.Module, *, sequence: bool = False, exits: tuple[int, ...] = ()) -> list[Instruction]:
    local = local_of(model, sequence=sequence)
    return overlapped(local.instructions, exits or local.output_slots(), local, model)


def line_of(instruction: Instruction) -> str:
    """For example `columns q.weight k.weight`; other instructions by their names."""
    if instruction.name.rpartition(":")[2] != "columns":
        return instruction.name
    x, share, products = instruction.args
    assert isinstance(x, Ref)
    names = [w.name for weight in products for w in weight if isinstance(w, Weight)]
    return " ".join(["columns", *(["shard"] if share is not None else []), *names])


def lines(run: Callable[..., Tensor], *, sequence: bool = False, **layers: nn.Module) -> list[str]:
    return [line_of(i) for i in joined(Net(run, **layers), sequence=sequence)]


def pair(bias: bool = False) -> dict[str, nn.Module]:
    return {"up": nn.Linear(12, 24, bias), "down": nn.Linear(24, 12, bias)}


def test_products_of_one_value_are_one_call_that_defines_their_results() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        return m.down(functional.silu(m.gate(x)) * m.up(x))

    model = Net(run, **pair(), gate=nn.Linear(12, 24, bias=False), norm=nn.LayerNorm(12))
    local, found = local_of(model), joined(model)
    assert [line_of(i) for i in found] == ["norm", "columns gate.weight up.weight", "silu", "mul", "row"]
    by_name = {i.name: i for i in local.instructions}
    slots = [slot for name in ("enter", "gate", "up") for slot in by_name[name].defines()]
    assert [*found[1].defines()] == slots
    assert found[1].origin == by_name["gate"].origin


def test_a_bias_and_a_product_of_a_function_are_taken_in() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        return m.down(functional.linear(x, m.up.weight, m.up.bias).relu())

    assert "columns up.weight up.bias" in lines(run, **pair(bias=True), norm=nn.LayerNorm(12))


def test_in_sequence_parallelism_the_gathering_is_taken_in() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x + m.down(m.up(x).relu()))
        return y + m.down2(m.up2(y).relu())

    more = {"norm": nn.LayerNorm(12), "up2": nn.Linear(12, 24, False), "down2": nn.Linear(24, 12, False)}
    assert "columns shard up2.weight" in lines(run, sequence=True, **pair(), **more)


def test_a_product_behind_another_collective_stays_where_it_is() -> None:
    """An attention and an MLP of one norm: the MLP's gradient is there before that of the attention."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        y = m.down(m.up(x).relu())
        return y + m.down2(m.up2(x).relu())

    more = {"up2": nn.Linear(12, 24), "down2": nn.Linear(24, 12)}
    found = lines(run, norm=nn.LayerNorm(12), **pair(), **more)
    assert "columns up.weight" in found
    assert found.index("up2") > found.index("row")


def test_a_product_with_hooks_is_whole_and_one_in_other_modes_stays_where_it_is() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        gate = m.gate(x)
        with torch.autocast("cpu", torch.bfloat16):
            up = m.up(x)
        return m.down((gate * up).float())

    gate = nn.Linear(12, 24, bias=False)
    layers = {**pair(), "gate": gate, "norm": nn.LayerNorm(12)}
    assert [line for line in lines(run, **layers) if "columns" in line] == ["columns gate.weight"]
    gate.register_forward_hook(lambda *_: None)
    found = lines(run, **layers)
    assert found == ["norm", "gate", "up", "mul", "float", "down"]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(12), nn.MultiheadAttention(12, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attend(x, x, x, need_weights=False)[0]


def test_an_attention_module_of_one_value_enters_it_itself() -> None:
    found = joined(Attends())
    assert [i.name.rpartition(":")[2] for i in found] == ["norm", "attend"]
    _, inputs, _, _ = found[1].args
    assert inputs == (Ref(next(found[0].defines())),)
    assert found[1].kwargs == {"share": None}


def test_an_attention_whose_value_leaves_the_slice_does_not() -> None:
    local = local_of(Attends())
    entered = next(next(i.defines()) for i in local.instructions if i.name == "enter")
    found = joined(Attends(), exits=(entered,))
    assert [i.name.rpartition(":")[2] for i in found] == ["norm", "enter", "attend"]
