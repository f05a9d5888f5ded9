from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record
from outsize.run.stage.cut import cut, in_runs
from outsize.run.stage.rng import borrowed_generators, mix, seeder


def test_every_place_has_its_own_seed() -> None:
    places = list(product(range(3), range(4), range(5), range(40)))
    assert len({mix(*place) for place in places}) == len(places)
    assert all(0 <= mix(*place) < 1 << 63 for place in places)


def test_a_seed_is_the_same_for_ever() -> None:
    """Pinned: a change would give resumed runs other dropout masks."""
    assert [mix(0, 0, 0, 0), mix(1, 2, 3, 4)] == [2558736989570252433, 8223237870565399804]


def test_a_seeder_draws_the_same_whatever_was_drawn_before() -> None:
    seed = seeder(7, step=1, microbatch=2)
    seed(10)
    first = torch.rand(4)
    torch.rand(100)
    seed(11)
    assert not torch.equal(torch.rand(4), first)
    seed(10)
    assert torch.equal(torch.rand(4), first)


def state() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def test_the_users_generators_are_given_back_also_after_an_error() -> None:
    before = state()
    with borrowed_generators():
        seeder(0, 0, 0)(0)
        torch.rand(3)
        assert state() != before
    assert state() == before
    with pytest.raises(ValueError, match="invalid literal"), borrowed_generators():
        torch.manual_seed(int(str(torch.rand(1))))
    assert state() == before


def test_the_seed_is_set_before_each_random_instruction_and_by_its_number() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    tape = record(model, (torch.ones(2, 4),), {}, lambda out: out.sum())
    captured = build_graph(tape, model)
    found = cut(tape, model, in_runs((0, captured.starts[2], len(tape.instructions))), outputs=False)
    asked: list[int] = []
    middle = found.programs[0].function(torch.ones(2, 4), asked.append)
    found.programs[1].function(*middle, asked.append)
    assert asked == [i.index for i in tape.instructions if i.random]
    assert len(asked) == 2
