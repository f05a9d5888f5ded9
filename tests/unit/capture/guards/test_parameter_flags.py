"""Changed dtypes and flags of parameters are noticed, with torch's compiled guards and without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.capture.guards import parameters as flags_file
from outsize.capture.guards.parameters import ParameterFlags


def made() -> list[nn.Parameter]:
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    return [nn.Parameter(torch.zeros(2, 3)), frozen, nn.Parameter(torch.zeros(()))]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_each_change_is_noticed_and_its_undoing_too(
    compiled: bool, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(flags_file, "_compiled_check", lambda _: None)
    for number in range(3):
        parameters = made()
        with torch.set_grad_enabled(grad):
            flags = ParameterFlags(parameters)
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                changed = parameters[number]
                assert flags.are_same()
                changed.requires_grad_(not changed.requires_grad)
                assert not flags.are_same()
                changed.requires_grad_(not changed.requires_grad)
                changed.data = changed.data.half()
                assert not flags.are_same()
                changed.data = changed.data.float()
                assert flags.are_same()


def test_other_sizes_and_modes_are_no_change() -> None:
    parameters = made()
    flags = ParameterFlags(parameters)
    parameters[0].data = torch.zeros(5)
    assert flags.are_same()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert flags.are_same()


def test_the_compiled_guards_are_there_and_answer() -> None:
    parameters = made()
    check = flags_file._compiled_check(parameters)
    assert check is not None
    assert check(*parameters)


def test_a_torch_without_them_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert flags_file._compiled_check(made()) is None
    assert ParameterFlags(made()).are_same()


def test_a_frozen_model_that_is_trained_again_is_noticed_without_gradients() -> None:
    frozen = [nn.Parameter(torch.zeros(2), requires_grad=False)]
    flags = ParameterFlags(frozen)
    frozen[0].requires_grad_(True)
    with torch.no_grad():
        assert not flags.are_same()
