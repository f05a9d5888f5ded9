"""Weights that a loop changes by name between steps; over two processes: tests/dist/weights_worker.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from named_updates import SITUATIONS, Averaged, Byol, Tied, engine_of, follow_all_but_biases
from torch import Tensor, nn

from outsize.errors import BadOption, RankFailed
from outsize.train.crew.apply_named import NamedCall


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_change_by_name_is_that_of_the_plain_loop(name: str) -> None:
    SITUATIONS[name]()


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (("techer.*",), r"no parameter is named like 'techer\.\*'; .*teacher.*Next: a name of model"),
        (
            ("teacher.*", "head.*"),
            r"teacher\.0\.weight has no partner head\.0\.weight; .*Next: a narrower",
        ),
        (("teacher.*", "student.0.weight"), r"another number of stars.*0 and 1.*Next: the same stars"),
    ],
)
def test_names_that_do_not_match_are_refused(patterns: tuple[str, ...], text: str) -> None:
    engine = engine_of(Byol(), "student")
    with pytest.raises(BadOption, match=text):
        engine.weights.apply_named(lambda *tensors: None, *patterns)


def test_what_would_be_lost_on_another_rank_is_refused_here_as_well() -> None:
    engine = engine_of(Byol(), "student")
    before = {n: t.clone() for n, t in engine.model.state_dict().items()}

    def second(teacher: Tensor, student: Tensor) -> None:
        student.mul_(2.0)

    def new(teacher: Tensor, student: Tensor) -> Tensor:
        return 0.9 * teacher + 0.1 * student

    with pytest.raises(BadOption, match=r"the function returns a new tensor for teacher.0.weight.*in place"):
        engine.weights.apply_named(new, "teacher.*", "student.*")
    assert all(torch.equal(t, before[n]) for n, t in engine.model.state_dict().items())
    with pytest.raises(BadOption, match=r"the function changes student.0.weight, and .* only the first"):
        engine.weights.apply_named(second, "teacher.*", "student.*")


def test_a_tied_weight_is_changed_once_and_has_one_partner() -> None:
    engine = engine_of(Tied(), "middle")
    calls: list[Any] = []
    engine.weights.apply_named(calls.append, "*.weight")
    assert len(calls) == 2
    pairs = nn.ModuleDict({"t": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})})
    pairs["s"] = copy.deepcopy(pairs["t"])
    pairs.get_submodule("t.b").weight = pairs.get_parameter("t.a.weight")
    with pytest.raises(
        BadOption, match=r"t\.a\.weight and t\.b\.weight are one tensor, .*s\.a\.weight and s"
    ):
        NamedCall(print, ("t.*", "s.*")).rows(pairs)


def test_an_average_that_no_forward_reads_is_averaged() -> None:
    engine = engine_of(Averaged(), "net.3")
    engine.weights.apply_named(lambda average, weight: average.copy_(weight), "average.*", "net.*")
    state = engine.weights.full_state_dict()
    assert all(torch.equal(t, state[n.replace("net", "average")]) for n, t in state.items() if "weight" in n)


def test_what_the_function_raises_names_the_weight_and_how_many_were_changed() -> None:
    engine = engine_of(Byol(), "student")
    words = (
        r"RankFailed \[E401\]: the function of apply_named raised ValueError: no bias "
        r"\(.*named_updates\.py:\d+\) for teacher\.0\.bias on rank 0; 1 of 6 tensors were changed"
    )
    with pytest.raises(RankFailed, match=words) as found:
        engine.weights.apply_named(follow_all_but_biases, "teacher.*", "student.*")
    assert isinstance(found.value.__cause__, ValueError)
    assert not found.value.shared
