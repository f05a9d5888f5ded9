"""Which units may be which stages, by hand and against a count of all orders."""

from __future__ import annotations

import pytest

from outsize.errors import BadPlan
from outsize.ir.graph import ModelGraph, Parameter, Unit, Value
from outsize.ir.stage_graph import check_quotient, in_stages, summed

EDGES = {0: (1, 2, 4), 1: (3,), 2: (3,), 3: (4,)}


def value(maker: int, users: tuple[int, ...], gradient: bool) -> Value:
    return Value(
        id=maker,
        shape=(1,),
        dtype="float32",
        size_bytes=4,
        requires_grad=gradient,
        producer=maker,
        consumers=users,
        saved_by=maker,
        also_saved_by=users[1:],
    )


def graph(gradient: bool = True, trainable: bool = True) -> ModelGraph:
    """Unit 0 feeds 1, 2 and 4; units 1 and 4 share a weight."""
    units = (
        Unit(
            index=i,
            name=f"u{i}",
            kind="Linear",
            parameters=("w",) if i in (1, 4) else (),
            buffer_bytes=0,
            flops=1,
            moved_bytes=1,
            saved_bytes=1,
        )
        for i in range(5)
    )
    weight = Parameter(names=("w",), shape=(1,), dtype="float32", size_bytes=4, trainable=trainable)
    values = tuple(value(a, users, gradient) for a, users in EDGES.items())
    return ModelGraph(
        model="M", fingerprint="f", batch_size=1, units=tuple(units), values=values, parameters=(weight,)
    )


@pytest.mark.parametrize("owners", [(0, 0, 0, 0, 0), (0, 0, 1, 1, 2), (0, 1, 1, 2, 2), (0, 1, 2, 3, 4)])
def test_numbers_that_ascend_along_everything(owners: tuple[int, ...]) -> None:
    check_quotient(graph(), owners)


def test_a_stage_before_the_one_it_takes_from() -> None:
    with pytest.raises(BadPlan, match="stage 1 takes a value from stage 2, which comes after it") as caught:
        check_quotient(graph(), (0, 2, 1, 1, 3))
    assert caught.value.numbers == "'u1' of stage 2 makes it, 'u3' of stage 1 uses it"


def test_branches_the_other_way_round() -> None:
    """Unit 1 behind unit 2: fine for values, not for the sum of unit 0's gradient; without one it is."""
    with pytest.raises(BadPlan, match="the gradient of 'u0' cannot be added up"):
        check_quotient(graph(), (0, 2, 1, 2, 3))
    check_quotient(graph(gradient=False), (0, 2, 1, 2, 3))


def test_a_shared_weight_is_added_up_in_order_too() -> None:
    owners = (0, 2, 2, 2, 2)
    check_quotient(graph(gradient=False), owners)
    lone = graph(gradient=False).model_copy(update={"values": ()})
    with pytest.raises(BadPlan, match="the gradient of 'w' cannot"):
        check_quotient(lone, (0, 2, 0, 0, 1))
    check_quotient(graph(False, trainable=False).model_copy(update={"values": ()}), (0, 2, 0, 0, 1))
    assert [what for what, _ in summed(graph(gradient=False))] == ["w"]


def test_a_graph_in_another_order_is_the_same_model() -> None:
    given = graph()
    assert given.owner_of == {"w": 1}
    moved = given.in_order(in_stages((0, 1, 0, 1, 1)))
    assert [u.name for u in moved.units] == ["u0", "u2", "u1", "u3", "u4"]
    assert [u.index for u in moved.units] == list(range(5))
    assert moved.owner_of == {"w": 2}
    edges = {moved.units[v.producer].name: [moved.units[c].name for c in v.consumers] for v in moved.values}
    assert edges == {"u0": ["u2", "u1", "u4"], "u1": ["u3"], "u2": ["u3"], "u3": ["u4"]}
    assert [moved.units[v.saved_by].name for v in moved.values] == ["u0", "u1", "u2", "u3"]
    assert given.in_order(range(5)) is given
