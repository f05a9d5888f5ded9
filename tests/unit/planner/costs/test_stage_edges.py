from __future__ import annotations

from planner_graphs import graph_of, parameter, unit, value

from outsize.ir.cluster import Link
from outsize.ir.graph import ModelGraph
from outsize.ir.schedule import Kind
from outsize.planner.costs.stage_edges import Edges, Flow, crossing_bytes, edges_between, flows


def skip_graph(grad: bool = True) -> ModelGraph:
    """Unit 0 makes a value that units 1 and 3 use."""
    return graph_of([unit(i) for i in range(4)], [value(0, 0, (1, 3), 12, grad)])


def test_forward_goes_to_each_user_and_gradients_are_threaded_back() -> None:
    edges = edges_between(skip_graph(), (0, 1, 2, 3, 4))
    assert edges.forward == {(0, 1): 12, (0, 3): 12}
    assert edges.backward == {(1, 0): 12, (3, 1): 12}
    assert edges.step == {}


def test_users_in_one_stage_get_one_message() -> None:
    edges = edges_between(skip_graph(), (0, 1, 4))
    assert edges.forward == {(0, 1): 12}
    assert edges.backward == {(1, 0): 12}


def test_a_value_without_gradient_has_no_way_back() -> None:
    edges = edges_between(skip_graph(grad=False), (0, 1, 2, 3, 4))
    assert edges.forward == {(0, 1): 12, (0, 3): 12}
    assert edges.backward == {}


def test_values_between_the_same_stages_share_a_message() -> None:
    graph = graph_of([unit(i) for i in range(3)], [value(0, 0, (2,), 4), value(1, 1, (2,), 8)])
    assert edges_between(graph, (0, 2, 3)).forward == {(0, 1): 12}


def tied_graph(trainable: bool) -> ModelGraph:
    """Units 0 and 3 use one parameter under two names."""
    units = [unit(0, ("wte.weight",)), unit(1), unit(2), unit(3, ("lm_head.weight",))]
    shared = parameter("wte.weight", "lm_head.weight", size_bytes=40, trainable=trainable)
    return graph_of(units, [value(i, i, (i + 1,), 4) for i in range(3)], [shared])


def test_a_tied_parameter_is_a_step_edge_whose_gradient_travels_each_microbatch() -> None:
    edges = edges_between(tied_graph(trainable=True), (0, 2, 3, 4))
    assert edges.step == {(0, 2): 40}
    assert edges.forward == {(0, 1): 4, (1, 2): 4}
    assert edges.backward == {(1, 0): 4, (2, 0): 40, (2, 1): 4}


def test_a_frozen_tied_parameter_is_kept_by_every_user_and_never_travels() -> None:
    edges = edges_between(tied_graph(trainable=False), (0, 2, 3, 4))
    assert edges.step == {}
    assert (2, 0) not in edges.backward


def test_a_parameter_of_a_module_that_is_called_twice_flows_too() -> None:
    graph = graph_of([unit(0, ("w",)), unit(1), unit(2, ("w",))], [], [parameter("w", size_bytes=8)])
    assert flows(graph) == (Flow(8, 0, (2,), gradient=True, step=True),)


def test_one_stage_has_no_edges() -> None:
    edges = edges_between(tied_graph(trainable=True), (0, 4))
    assert not edges.forward
    assert not edges.backward
    assert not edges.step


def test_what_crosses_each_boundary() -> None:
    values = [value(0, 0, (1, 3), 12), value(1, 1, (2,), 8), value(2, 2, (), 4)]
    graph = graph_of([unit(i) for i in range(4)], values)
    assert crossing_bytes(graph).tolist() == [0, 12, 20, 12, 0]
    for cut, size in enumerate(crossing_bytes(graph)[1:-1], 1):
        crossing = (v for v in values[:2] if v.producer < cut <= v.consumers[-1])
        assert size == sum(v.size_bytes for v in crossing)


def test_a_weight_that_travels_with_values_is_spread_over_the_messages() -> None:
    edges = Edges({(0, 1): 10}, {(1, 0): 11}, {(0, 1): 8, (0, 2): 6})
    assert edges.message_bytes(4) == {Kind.F: {(0, 1): 12, (0, 2): 6}, Kind.B: {(1, 0): 11}}
    assert edges.along == ({(0, 1)}, {(1, 0)}, {(0, 1), (0, 2)})


def test_seconds_of_a_message_are_those_of_its_link_and_of_a_ranks_part() -> None:
    def link(source: int, destination: int) -> Link:
        return Link(name="wire", latency_s=1.0, bytes_per_s=10.0 if source < destination else 1.0)

    edges = Edges({(0, 1): 10}, {(1, 0): 11}, {})
    assert edges.message_s(4, link) == {(Kind.F, 0, 1): 2.0, (Kind.B, 1, 0): 12.0}
    assert edges.message_s(4, link, parts=2) == {(Kind.F, 0, 1): 1.5, (Kind.B, 1, 0): 7.0}
