"""From a tape to units, values and parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from small_models import batch, linear, two
from splits import captured
from torch import Tensor, nn

from outsize.program.liveness import legal_cuts


def test_units_are_leaves_and_heavy_or_weighty_glue_in_order() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.gelu(m.a(x)) * m.scale
        return m.b(y @ y.t())

    found = captured(two(run, scale=nn.Parameter(torch.ones(4))), batch())
    assert [(u.name, u.kind) for u in found.graph.units] == [
        ("a", "Linear"),
        ("mul", "mul"),
        ("matmul", "matmul"),
        ("b", "Linear"),
        ("sum", "sum"),
    ]
    assert [u.flops for u in found.graph.units] == [128, 0, 128, 128, 0]


def test_every_boundary_between_units_is_a_legal_cut() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.ReLU(inplace=True), linear())
    found = captured(model, batch())
    legal = legal_cuts(found.tape)
    assert all(legal[start] for start in found.starts[1:-1])
    assert (found.starts[0], found.starts[-1]) == (0, len(found.tape.instructions))


def test_the_cut_between_two_units_is_where_the_fewest_bytes_cross() -> None:
    model = two(lambda m, x: m.b(m.a(x).repeat(1, 16)[:, ::16]))
    found = captured(model, batch())
    (value,) = [v for v in found.graph.values if v.producer == 0]
    assert value.size_bytes == 4 * 4 * 4


def test_calls_of_one_module_are_numbered() -> None:
    found = captured(two(lambda m, x: m.a(m.b(m.a(x)))), batch())
    assert [u.name for u in found.graph.units] == ["a#0", "b", "a#1", "sum"]


def test_values_name_their_users_and_dead_ones_are_not_listed() -> None:
    def run(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        m.b(y)  # nobody needs it
        return m.c(y) + y

    graph = captured(two(run, c=linear()), batch()).graph
    value = graph.values[0]
    assert (value.producer, value.consumers, value.shape, value.requires_grad) == (0, (1,), (4, 4), True)
    assert [u.name for u in graph.units] == ["a", "c", "sum"]


def test_parameters_are_listed_once_with_all_their_names_also_unused_ones() -> None:
    model: Any = two(lambda m, x: m.a(x), unused=nn.Parameter(torch.ones(3), requires_grad=False))
    model.b.weight = model.a.weight
    graph = captured(model, batch()).graph
    by_name = {p.name: p for p in graph.parameters}
    assert by_name["a.weight"].names == ("a.weight", "b.weight")
    assert not by_name["unused"].trainable
    assert graph.parameter_bytes == 4 * (16 + 4 + 4 + 3)


def test_buffers_are_counted_where_they_are_first_used() -> None:
    model = two(lambda m, x: m.norm(m.b(m.norm(m.a(x)))), norm=nn.BatchNorm1d(4))
    assert sum(u.buffer_bytes for u in captured(model, batch()).graph.units) == 4 * 4 + 4 * 4 + 8


def test_the_fingerprint_is_of_the_model_and_not_of_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    same = captured(model, torch.ones(2, 4)).graph.fingerprint
    assert captured(model, torch.ones(8, 4)).graph.fingerprint == same
    assert captured(nn.Sequential(linear(), nn.Tanh(), linear()), batch()).graph.fingerprint == same
    assert captured(nn.Sequential(linear(), linear()), batch()).graph.fingerprint != same


def test_a_graph_survives_json() -> None:
    graph = captured(nn.Sequential(linear(), linear()), batch()).graph
    assert type(graph).model_validate_json(graph.model_dump_json()) == graph
