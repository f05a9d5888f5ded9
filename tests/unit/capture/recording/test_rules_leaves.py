"""Rule 11 of docs/capture.md, second half: what a leaf returns may differ from call to call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import batch, linear, two
from splits import captured, check_every_cut
from torch import Tensor, nn

from outsize.errors import NotCapturable, ReplayMismatch


class Layerdrop(nn.Module):
    """Layers of which each is left out at times; returns the states after those that ran."""

    def __init__(self, draw: Callable[[], Any], dropped: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.draw, self.dropped = draw, dropped

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [x]
        for layer in self.layers:
            if self.draw() >= self.dropped:
                x = torch.tanh(layer(x))
                states.append(x)
        return {"last": x, "states": states}


def torch_draw() -> Tensor:
    return torch.rand([])


def reading(pick: Callable[[dict[str, Any]], Tensor]) -> Any:
    return lambda m, x: m.b(pick(m.drop(m.a(x))))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample("0", "3")
def test_rule_11_states_that_nobody_reads_may_be_more_or_fewer(seed: int) -> None:
    torch.manual_seed(seed)
    model = two(reading(lambda out: out["last"]), drop=Layerdrop(torch_draw))
    found = check_every_cut(model, batch(), microbatches=4, outputs=False)
    assert [u.name for u in found.graph.units] == ["a", "drop", "b", "sum"]


@pytest.mark.parametrize("dropped", [0.01, 0.3, 0.9])
@pytest.mark.sample("0.01", "0.9")
def test_rule_11_a_list_of_varying_length_is_read_by_no_one_else(dropped: float) -> None:
    """`states[-1]` would be another layer's state at replay, in silence: its reader joins the leaf."""
    inner = two(reading(lambda out: out["states"][-1]), drop=Layerdrop(torch_draw, dropped))
    found = check_every_cut(nn.Sequential(linear(), inner, linear()), batch(), microbatches=4, outputs=False)
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]
    assert "1: what 1.drop returns differs from call to call" in found.graph.notes[1]


def test_rule_11_in_the_models_own_forward_such_a_list_is_refused() -> None:
    model = two(reading(lambda out: out["states"][-1]), drop=Layerdrop(torch_draw))
    with pytest.raises(NotCapturable, match=r"what drop returns differs from call to call.*leaves\.py:\d+"):
        captured(model, batch())


class Keypoints(nn.Module):
    """Picks the rows that score above a threshold: their number depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.score = linear()

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.nonzero(self.score(x).sum(1) > 0)[:, 0]
        return x[chosen]


def test_rule_11_a_shape_that_depends_on_the_data_is_read_by_no_one_else() -> None:
    """SuperPoint: Python outside pads to the greatest number of keypoints found in the probe."""

    def padded(m: Any, x: Tensor) -> Tensor:
        found = m.points(x)
        room = torch.zeros_like(x)
        room[: found.shape[0]] = found
        return m.b(room + m.a(x))

    model = nn.Sequential(linear(), two(padded, points=Keypoints()), linear())
    found = check_every_cut(model, batch(), outputs=False)
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]


def test_rule_11_a_list_that_varies_by_pythons_chance_is_found_at_replay() -> None:
    model = two(reading(lambda out: out["states"][-1]), drop=Layerdrop(random.random, 0.5))
    with pytest.raises(ReplayMismatch, match=r"drop returns another Python value.*captured \d, got \d"):
        check_every_cut(model, batch(), microbatches=4, outputs=False)


class Jitter(nn.Module):
    """Scales by a number of a distribution, which it makes in each forward and keeps, as augmentations do."""

    def __init__(self) -> None:
        super().__init__()
        self.range = torch.tensor([0.5, 2.0])
        self.of_last_call: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.of_last_call = torch.distributions.Uniform(*self.range)
        factor = self.of_last_call.sample()
        return x * factor if factor > 1 else x


def test_rule_11_a_leaf_may_keep_objects_with_tensors_of_its_last_call() -> None:
    """kornia's ColorJitter: torch's copy of a fake tensor, which has no memory, ends the interpreter."""
    model = two(lambda m, x: m.b(m.jitter(m.a(x))), jitter=Jitter())
    found = check_every_cut(model, batch(), microbatches=4, outputs=False)
    assert [u.name for u in found.graph.units] == ["a", "jitter", "b", "sum"]
