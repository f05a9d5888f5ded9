"""What a rule does not know of a call is not followed; what is wrong in a rule is not hidden so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.program.sharding import propagate
from outsize.program.sharding.context_parallel import rules
from outsize.program.sharding.rank_step import NotPropagated, RankStep, RuleInput
from outsize.program.sharding.share import Share
from outsize.program.tape import Ref


class Glue(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


def last_call(act: Callable[[Tensor], Tensor]) -> RuleInput:
    """The last call of a model, with the first dim of its operand divided."""
    tape = record(Glue(act), (torch.zeros(4, 8),), {})
    call = RuleInput(tape.instructions[-1], tape.metas, {}, {})
    shares = {ref.slot: Share(0, (4,)) for ref in call.operands() if isinstance(ref, Ref)}
    return RuleInput(call.instruction, tape.metas, shares, {})


def test_a_form_that_a_rule_does_not_know_is_not_followed() -> None:
    assert propagate.follow(last_call(lambda x: torch.softmax(x, 1)), None).out == (Share(0, (4,)),)
    with pytest.raises(NotPropagated, match="no rule for such a cat"):
        propagate.follow(last_call(lambda x: torch.cat(tensors=[x, x], dim=1)), None)
    with pytest.raises(NotPropagated, match="more than its first argument"):
        propagate.follow(last_call(lambda x: torch.softmax(input=x, dim=1)), None)


def test_a_layer_that_is_called_by_name_is_not_followed() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=self.layer(x))

    model = Named()
    tape = record(model, (torch.zeros(4, 8),), {})
    call = next(i for i in tape.instructions if i.target == "norm")
    slot = next(iter(tape.instructions[0].defines()))
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    with pytest.raises(NotPropagated):
        propagate.follow(RuleInput(call, tape.metas, {slot: Share(0, (4,))}, weights), model.norm)


def test_a_layer_with_a_state_in_a_tuple_is_not_tried_by_rows() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.lstm(y, (y[:1], y[:1]))[0]

    model = Recurrent()
    tape = record(model, (torch.zeros(4, 2, 8),), {})
    call = next(i for i in tape.instructions if i.target == "lstm")
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    refs = [ref for ref in RuleInput(call, tape.metas, {}, weights).operands() if isinstance(ref, Ref)]
    shares = {ref.slot: Share(1, (2,)) for ref in refs}
    with pytest.raises(NotPropagated):
        rules.follow_rows(RuleInput(call, tape.metas, shares, weights), model.lstm, 2)


@pytest.mark.parametrize("bug", [KeyError("h"), AttributeError("h"), ZeroDivisionError("h")], ids=repr)
def test_a_bug_in_a_rule_is_seen(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: RuleInput) -> RankStep:
        raise bug

    call = last_call(torch.tanh)
    monkeypatch.setattr(propagate, "RULES", {"elementwise": broken})
    with pytest.raises(type(bug)):
        propagate.follow(call, None)
    with pytest.raises(type(bug)):
        rules.follow_rows(call, None, 2)
