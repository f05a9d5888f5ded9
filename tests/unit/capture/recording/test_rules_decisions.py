"""Rules 6 to 8 of docs/capture.md: decisions, modes, writes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._subclasses
from small_models import Forward, Written, batch, linear, two
from splits import captured, check_every_cut
from torch import Tensor, nn

from outsize.errors import NotCapturable
from outsize.program.tape import Weight

# -- 6: decisions ------------------------------------------------------------------------------------------


def test_rule_6_a_decision_on_inputs_is_a_guard() -> None:
    def run(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(y * 2 if keep.all() else y)

    keep = torch.tensor([True, True, True, False])
    found = check_every_cut(two(run), batch(), keep)  # two microbatches that decide differently
    assert [g.value for g in found.tape.guards] == [True]


@pytest.mark.parametrize(
    "use",
    [
        lambda y, n: y[:, : int(n.max()) + 1].sum(1, keepdim=True) + y,
        lambda y, n: y.index_add(0, n.nonzero().squeeze(1), y[n.nonzero().squeeze(1)]),
        lambda y, n: y[n.bool()],
        lambda y, n: y.masked_select(n.bool().unsqueeze(1)).view(-1, 4),
        lambda y, n: y * sum(n.tolist()),
    ],
    ids=["item", "nonzero", "mask", "masked_select", "tolist"],
)
def test_rule_6_shapes_that_follow_from_inputs(use: Forward) -> None:
    check_every_cut(two(lambda m, x, n: m.b(use(m.a(x), n))), batch(), torch.tensor([0, 1, 1, 1]))


def test_rule_6_what_draws_as_many_numbers_as_a_tensor_says_is_random() -> None:
    """The order is drawn once, by its own seed, whichever stages read it."""

    def run(m: Any, x: Tensor) -> Tensor:
        count = (torch.ones(4) > 0).sum()
        order = torch.multinomial(torch.ones(4), count)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return m.b(m.a(x)[:, order])[:, order]

    found = check_every_cut(two(run), batch(), outputs=False)  # an evaluation draws other ones than eager
    assert [i.random for i in found.tape.instructions if i.name == "multinomial"] == [True]


DECISIONS: dict[str, Forward] = {
    "bool": lambda y: y * 2 if y.mean() > 0 else y,
    "item": lambda y: y * y.mean().item(),
    "tolist": lambda y: y * sum(y.sum(1).tolist()),
    "nonzero": lambda y: y * y.nonzero().shape[0],
    "mask": lambda y: y + y[y > 0].sum(),
    "numpy": lambda y: y * float(y.detach().numpy().sum()),
}


@pytest.mark.parametrize("how", DECISIONS)
def test_rule_6_a_decision_on_activations_makes_one_leaf_and_says_where(how: str) -> None:
    inner = Written(lambda m, x: DECISIONS[how](m.a(x)), a=linear())
    found = check_every_cut(nn.Sequential(linear(), inner, linear()), batch())
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]
    (note,) = found.graph.notes
    assert note.startswith("1: a decision on activations (")
    assert f"{__file__}:" in note


@pytest.mark.parametrize("how", DECISIONS)
def test_rule_6_in_the_models_own_forward_it_is_refused_with_the_line(how: str) -> None:
    with pytest.raises(NotCapturable, match=rf"{__file__}:\d+"):
        captured(two(lambda m, x: m.b(DECISIONS[how](m.a(x)))), batch())


def test_rule_6_a_decision_on_a_buffer_that_the_forward_writes_is_no_guard() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y = y * 2 if m.count > 0 else y
        m.count.add_(1)
        return y

    inner = two(run)
    inner.register_buffer("count", torch.zeros((), dtype=torch.long))
    found = check_every_cut(nn.Sequential(linear(), inner, linear()), batch())
    assert found.tape.guards == ()
    assert "count, which the forward writes" in found.graph.notes[0]
    with pytest.raises(NotCapturable, match="count, which the forward writes"):
        captured(inner, batch())


# -- 7: grad mode and autocast ----------------------------------------------------------------------------


def mixed_modes(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.a(x)
    with torch.no_grad():
        frozen = m.b(y) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = m.b(y) @ y.t()
    with torch.autocast("cpu", enabled=False):
        return m.b(y.float() + frozen), low


def test_rule_7_modes_are_state_of_each_instruction() -> None:
    tape = check_every_cut(two(mixed_modes), batch()).tape
    seen = [(i.modes.grad, bool(i.modes.autocast)) for i in tape.instructions if i.name == "b"]
    assert seen == [(False, False), (True, True), (True, False)]


def test_rule_7_ambient_autocast_belongs_to_the_tape() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = check_every_cut(two(mixed_modes), batch())
    assert found.tape.modes.autocast == (("cpu", torch.bfloat16),)


def test_rule_7_inference_mode_inside_a_forward() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            still = m.a(x) * 2
        return m.b(x + still.clone())

    check_every_cut(two(run), batch())


def test_rule_8_writes_in_an_inference_region_are_seen() -> None:
    """Tensors made there count no versions."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            mask = torch.zeros(x.shape[0], x.shape[1])
            mask[:, 1:] = x[:, :1]
            mask[:, 2].mul_(3)
        return m.b(m.a(x) + mask.clone())

    check_every_cut(two(run), batch())


# -- 8: in place -------------------------------------------------------------------------------------------


def test_rule_8_nothing_is_cut_inside_an_in_place_life() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        view = y[:, :2]
        z = m.b(x)
        view.mul_(2)
        y[:, 3] = z[:, 0]
        return m.c(y)

    found = check_every_cut(two(run, c=linear()), batch())
    assert [u.name for u in found.graph.units] == ["a", "c", "sum"]


def test_rule_8_in_place_leaves_and_residual_sums() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.relu(m.norm(m.a(x)))
        z = m.b(y)
        z += y
        return m.relu(z) + x

    model = two(run, relu=nn.ReLU(inplace=True), norm=nn.BatchNorm1d(4))
    writes = [i.name for i in check_every_cut(model, batch(), steps=2).tape.instructions if i.writes]
    assert writes == ["norm", "relu", "add", "relu"]


def test_rule_8_all_callers_of_a_written_buffer_stay_together() -> None:
    model = two(lambda m, x: m.b(m.norm(m.b(m.norm(m.a(x))))), norm=nn.BatchNorm1d(4))
    assert [u.name for u in check_every_cut(model, batch()).graph.units] == ["a", "norm", "b", "sum"]


@pytest.mark.parametrize("write", [lambda m, x: x.mul_(2), lambda m, x: m.relu(x)], ids=["glue", "leaf"])
def test_rule_8_a_write_into_an_input_is_refused(write: Forward) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        write(m, x)
        return m.b(m.a(x))

    with pytest.raises(NotCapturable, match=rf"writes into an input in place.*{__file__}:\d+"):
        captured(two(run, relu=nn.ReLU(inplace=True)), batch())


def test_rule_8_buffers_written_by_glue() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.mean.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return m.b(y - m.mean)

    model = two(run)
    model.register_buffer("mean", torch.zeros(4))
    found = check_every_cut(model, batch(), steps=2)
    assert Weight("mean", "buffer") in {w for i in found.tape.instructions for w in i.written_weights}
