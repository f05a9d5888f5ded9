"""Guards on what Python read: what is noted, what is not, and how values are compared."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import batch, two
from torch import Tensor, nn

from outsize.capture.guards.check import ReadGuards
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.trace.instructions import Instructions
from outsize.capture.guards.trace.read_trace import ReadTrace
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.program.tape import Tape


def recorded(model: nn.Module, loss_fn: Any = None) -> Tape:
    target = () if loss_fn is None else (batch(),)
    return record(model, (batch(),), {}, loss_fn, target, TapeOptions(live=()))


def labels(tape: Tape) -> set[str]:
    return {read.label for read in tape.reads}


class Block(nn.Module):
    """Reads a value of a list of its own; blocks of this class are copied from the third on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rates = nn.Linear(4, 4), [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rates[0]


def test_a_read_is_noted_with_its_expression_its_line_and_its_module() -> None:
    model = two(lambda m, x: m.b(m.inner(m.a(x))), inner=two(lambda m, x: m.a(x) * m.cfg.scale))
    model.inner.cfg = SimpleNamespace(scale=2.0)
    (read,) = [r for r in recorded(model).reads if r.label == "m.cfg.scale"]
    assert (read.value, read.frames, read.key) == (2.0, {"inner"}, "scale")
    assert read.where.startswith(f"{__file__}:")


def test_what_is_not_read_is_no_guard() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)) * m.scale, scale=1.0, other=1.0)
    guards = ReadGuards(recorded(model).reads)
    model.other = 2.0
    assert guards.hold()
    model.scale = 2.0
    assert not guards.hold()
    assert [(c.read.label, c.value) for c in guards.changed()] == [("m.scale", 2.0)]


def test_what_changed_in_place_is_shown_as_it_was() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)) * sum(sum(row) for row in m.rates), rates=[[0.5], [1.0]])
    guards = ReadGuards(recorded(model).reads)
    model.rates[0].append(2.0)
    assert not guards.hold()
    (change,) = guards.changed()
    assert (change.read.value, change.value) == ([[0.5], [1.0]], [[0.5, 2.0], [1.0]])


def test_equal_new_objects_are_adopted() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)) * m.rates[0] * sum(m.shape), rates=[0.5, 1.0], shape=[1, 2])
    guards = ReadGuards(recorded(model).reads)
    model.rates, model.shape = [0.5, 9.0], [1, 2]
    assert not guards._is_identical()
    assert guards.hold()
    assert guards._is_identical()
    model.shape.append(3)
    assert not guards.hold()


@pytest.mark.parametrize(("before", "after"), [(1, 1.0), (True, 1), ("a", b"a")])
def test_plain_values_are_compared_by_type_too(before: Any, after: Any) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) if m.value else x

    model: Any = two(run, value=before)
    guards = ReadGuards(recorded(model).reads)
    model.value = after
    assert not guards.hold()


def test_not_a_number_equals_itself() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)) * (m.value == m.value), value=float("nan"))
    guards = ReadGuards(recorded(model).reads)
    model.value = float("nan")
    assert guards.hold()


def test_an_append_that_nobody_reads_gives_no_guard_and_is_taken_back() -> None:
    seen: list[Any] = []

    def run(m: Any, x: Tensor) -> Tensor:
        m.log.entries.append(x)
        m.log.count += 1
        seen.append(1)
        return m.b(m.a(x))

    model: Any = two(run, log=SimpleNamespace(entries=[], count=0))
    guards = ReadGuards(recorded(model).reads)
    assert (model.log.entries, model.log.count, seen) == ([], 0, [])
    model.log.entries.append(1)
    model.log.count = 7
    assert guards.hold()


def test_values_born_in_the_forward_are_no_guards() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        made = SimpleNamespace(scale=2.0, parts=[1.0])
        return m.b(m.a(x)) * made.scale * made.parts[0]

    assert not {label for label in labels(recorded(two(run))) if label.startswith("made")}


def test_leaves_are_traced_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    guards = ReadGuards(recorded(model).reads)
    model[1].eval()
    assert not guards.hold()
    model[1].train()
    assert guards.hold()
    model[1].p = 0.25
    assert not guards.hold()


def test_weights_are_followed_and_not_guarded() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)) * m.gain, gain=nn.Parameter(torch.ones(4)))
    guards = ReadGuards(recorded(model).reads)
    model.gain = nn.Parameter(torch.zeros(4))
    model.a.weight.data.zero_()
    assert guards.hold()


def test_copied_blocks_have_guards_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(6)))
    guards = ReadGuards(recorded(model).reads)
    for number in range(1, 7):
        model[number].rates[0] = 2.0
        assert not guards.hold(), number
        model[number].rates[0] = 1.0
    assert guards.hold()


def test_a_loss_is_traced_and_named() -> None:
    loss: Any = nn.MSELoss()
    tape = recorded(two(lambda m, x: m.b(m.a(x))), loss)
    guards = ReadGuards(tape.reads)
    loss.reduction = "sum"
    (changed,) = guards.changed()
    assert (changed.read.label, changed.read.frames) == ("self.reduction", {"loss_fn"})


def test_a_trace_function_that_was_set_is_put_back() -> None:
    def mine(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        recorded(two(lambda m, x: m.b(m.a(x))))
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is mine


def test_a_tape_refers_to_no_object_of_the_model_unless_asked() -> None:
    model = two(lambda m, x: m.b(m.a(x)) * m.scale, scale=1.0)
    assert record(model, (batch(),), {}).reads == ()
    assert copy.deepcopy(model) is not model


def test_a_trace_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("no such instruction")

    monkeypatch.setattr(Instructions, "run", broken)
    with pytest.warns(UserWarning, match="is not guarded, because its trace ended with IndexError"):
        tape = recorded(two(lambda m, x: m.b(m.a(x))))
    assert {read.key for read in tape.reads} == {"__code__"}  # Noted before the first instruction.


def test_blocks_that_are_copied_and_the_recorder_itself_are_not_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    follows = ReadTrace.follows

    def counted(trace: ReadTrace, frame: Any) -> bool:
        called.append(frame.f_code.co_name)
        return follows(trace, frame)

    monkeypatch.setattr(ReadTrace, "follows", counted)
    counts: list[int] = []
    for blocks in (10, 40):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks)))
        called.clear()
        recorded(model)
        counts.append(len(called))
    assert counts[1] - counts[0] <= 10 * 30
    assert "instructions" not in called


def test_reads_that_nobody_checks_are_not_repeated_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "_take", None)
    model = nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(6)))
    assert record(model, (batch(),), {}).reads == ()


def test_a_function_under_decorators_is_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        @torch.no_grad()
        @torch.enable_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * scale

    monkeypatch.setattr(ReadTrace, "_by_referrers", None)
    assert "scale" in labels(recorded(Decorated()))


def test_the_order_of_an_ordered_dict_counts() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        for scale in m.scales.values():
            x = m.a(x) * scale
        return m.b(x)

    model: Any = two(run, scales=OrderedDict(first=0.5, last=2.0))
    guards = ReadGuards(recorded(model).reads)
    model.scales.move_to_end("first")
    assert not guards.hold()
    model.scales.move_to_end("last")
    assert guards.hold()
