"""Graphs of a stack of layers at sizes at which only a few layers were recorded, against whole recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_models import Wrapped
from torch import Tensor, nn

import outsize
from outsize.api.problem import Profiler, styled
from outsize.capture.graph import shortened
from outsize.capture.graph.build import Captured
from outsize.capture.graph.shortened import LEAST, LayerStack, OtherLayer, Stacks
from outsize.capture.recording import fallbacks
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes
from outsize.planner.costs.kernel_stacks import kernel_stack
from outsize.train.measure.training_case import TrainingCase, as_batch

WIDTH, LENGTH, COUNT = 8, 6, 18


class Layer(nn.Module):
    """An attention block with a residual stream."""

    def __init__(self, window: bool = True) -> None:
        super().__init__()
        self.window = window
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, gains: Sequence[Tensor]) -> Tensor:
        y = self.norm(x)
        shape = (*y.shape[:2], 2, WIDTH // 2)
        q, k, v = (one(y).view(shape).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(attended.transpose(1, 2).reshape(y.shape))
        return x + self.down(torch.relu(self.gate(x))) * gains[self.window]


class Stacked(nn.Module):
    """Layers that read one mask and one gain, every one of `turns` another gain; `wide` ones are another
    module; `more`: beyond COUNT.
    """

    def __init__(self, wide: Sequence[int] = (), more: int = 0, classes: int = 5, turns: int = 0) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, classes)
        self.layers = nn.ModuleList(Layer(not turns or (n + 1) % turns > 0) for n in range(COUNT + more))
        for place in wide:
            self.layers[place].gate = nn.Linear(WIDTH, 8 * WIDTH)
            self.layers[place].down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.mean(-1) > 0)[:, None, None, :]
        gains = x.mean(-1, keepdim=True), x.amax(-1, keepdim=True)
        y = self.first(x)
        for layer in self.layers:
            y = layer(y, mask, gains)
        return self.head(y)


def case(model: nn.Module) -> TrainingCase:
    example = as_batch((torch.randn(2, LENGTH, 3),), {}, torch.zeros(2, LENGTH, dtype=torch.long))
    return TrainingCase.of(model, example, loss, None)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def without_numbers(graph: ModelGraph) -> dict[str, Any]:
    """Returns the graph without the numbers of slots and storages, which only have to be different."""
    fields = graph.model_dump()
    storages: dict[int, int] = {}
    for value in fields["values"]:
        value["storage"] = storages.setdefault(value["storage"], len(storages))
        del value["id"]
    return fields


def counted_captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns a list to which each capture from now on adds its samples and its units."""
    recorded: list[tuple[int, int]] = []
    one = TrainingCase.captured

    def counted(self: TrainingCase, samples: int) -> Any:
        captured = one(self, samples)
        recorded.append((samples, len(captured.graph.units)))
        return captured

    monkeypatch.setattr(TrainingCase, "captured", counted)
    return recorded


@pytest.mark.parametrize(
    ("precision", "first"), [("fp32", 0), pytest.param("bf16-mixed", 0, marks=pytest.mark.full), ("fp32", 2)]
)
@pytest.mark.sample("fp32-2")
def test_figures_of_a_few_layers_are_those_of_all(
    precision: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first layers have another form, as in models whose first layers have no experts."""
    asked = case(Stacked(wide=tuple(range(first)), more=first)).under(precision)
    recorded = counted_captures(monkeypatch)
    graph_at = Profiler().graphs(asked, kernel_stack("eager"), always=True)
    sizes = (4, 2, 1, 16)
    derived = {samples: graph_at(samples) for samples in sizes}
    whole = max(units for _, units in recorded)
    assert {samples for samples, units in recorded if units == whole} == {4}
    monkeypatch.undo()
    for samples in sizes:
        fresh = case(asked.module).under(precision)
        expected = styled(fresh, fresh.captured(samples), Axes(), True)
        assert without_numbers(derived[samples]) == without_numbers(expected)


@pytest.mark.parametrize("axes", [Axes(), Axes(tp=2)], ids=["any", "tp"])
def test_what_is_divided_of_a_long_stack_is_that_of_a_few_layers(
    axes: Axes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortened, "LONG", LEAST)
    asked = case(Stacked(wide=(0,), more=1))
    walked: list[int] = []

    def graph_of(captured: Captured) -> ModelGraph:
        walked.append(len(captured.graph.units))
        return styled(asked, captured, axes, True)

    graph = asked.sized_graphs(graph_of, adds=True).at(4)
    whole = asked.captured(4)
    assert len(whole.graph.units) not in walked
    assert graph.tensor is not None
    assert {m.style for m in graph.tensor.modules} > {"row", "column"}
    assert graph == styled(asked, whole, axes, True)


_TURNS = {
    "window": lambda: Stacked(turns=3),
    "window, first layers apart": lambda: Stacked(wide=(0, 1), more=2, turns=3),
    "form": lambda: Stacked(wide=range(1, COUNT, 2)),
    "form, other end": lambda: Stacked(wide=range(0, COUNT + 3, 4), more=3),
}


@pytest.mark.parametrize("kind", _TURNS)
def test_layers_that_take_turns_are_known_by_one_period(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortened, "LONG", LEAST)
    asked = case(_TURNS[kind]())
    (stack,) = Stacks.in_model(asked.module).of.values()
    assert stack.period > 1
    recorded = counted_captures(monkeypatch)
    walked: list[int] = []

    def graph_of(captured: Captured) -> ModelGraph:
        walked.append(len(captured.graph.units))
        return styled(asked, captured, Axes(), True)

    graphs = asked.sized_graphs(graph_of, adds=True)
    derived = {samples: graphs.at(samples) for samples in (4, 2, 8)}
    whole = max(units for _, units in recorded)
    assert {samples for samples, units in recorded if units == whole} == {4}
    assert whole not in walked
    monkeypatch.undo()
    for samples, graph in derived.items():
        expected = styled(asked, case(asked.module).captured(samples), Axes(), True)
        assert without_numbers(graph) == without_numbers(expected)


@pytest.mark.parametrize(
    ("layers", "period"), [(62, 6), (42, 2), (48, 1), (17, 5), (24, 8)], ids=lambda value: str(value)
)
def test_each_layer_of_a_period_stands_for_its_like(layers: int, period: int) -> None:
    """And the last layer is that of the shortened stack, at the same place of a period."""
    stack = LayerStack(1, layers + 1, period)
    assert stack.short % period == layers % period
    assert sorted(layer for each in stack.standing.values() for layer in each) == [*range(1, layers + 1)]
    for layer in range(1, layers + 1):
        like = stack.like(layer)
        assert (layer - like) % period == 0
        assert layer == like or layer > stack.alone
    assert stack.like(layers) == stack.short


def test_what_is_divided_is_walked_for_where_layers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer in the middle is of another form; or what is said of one layer names another one."""
    monkeypatch.setattr(shortened, "LONG", LEAST)
    other = case(Stacked(wide=(COUNT // 2,)))
    graph = Profiler().graphs(other, kernel_stack("eager"), always=True)(4)
    assert graph == styled(other, other.captured(4), Axes(), True)
    stacks = Stacks({"layers": LayerStack(1, COUNT)})
    why = "added up by layers.3.o, layers.0.o"
    assert stacks.moved(why, "layers.3.q", "layers.9.q") == "added up by layers.9.o, layers.0.o"
    assert stacks.moved("layers.4.o", "head", "head") == f"layers.{COUNT - 1}.o"
    with pytest.raises(OtherLayer):
        stacks.moved(why, "layers.2.q", "layers.2.q")
    with pytest.raises(OtherLayer):
        stacks.moved(why, "head", "head")


def test_a_loss_in_pieces_is_made_of_the_tapes_that_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its graphs are those of the whole model in pieces at that size."""
    recorded = list[int]()
    record = TrainingCase._recorded

    def counted(self: TrainingCase, samples: int) -> Any:
        recorded.append(samples)
        return record(self, samples)

    monkeypatch.setattr(TrainingCase, "_recorded", counted)
    whole = case(model := Stacked(classes=64)).under("bf16")
    graphs = Profiler().graphs(whole, kernel_stack("eager"))
    for samples in (8, 4, 2):
        graphs(samples)
    before = len(recorded)
    ending = whole.with_loss_of(4)
    pieces = Profiler().graphs(whole.in_pieces(3), kernel_stack("eager"))(4)
    assert len(recorded) == before
    assert ending.graph.batch_size == 4
    alone = case(model).under("bf16").in_pieces(3).captured(4).graph
    assert without_numbers(pieces) == without_numbers(alone)
    assert any("loss_in_pieces" in unit.name for unit in pieces.units)


def test_what_retries_find_out_of_a_few_layers_is_known_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry makes leaves of what adapters of experts do in each layer; it runs a few layers alone."""
    model, recorded = Stacked(), list[int]()
    for layer in model.layers:
        gate: Any = layer.gate
        layer.add_module("gate", Wrapped(gate))
    expected = [case(model).captured(samples).graph for samples in (4, 2)]
    monkeypatch.setattr(shortened, "LONG", LEAST)
    run = fallbacks._run
    monkeypatch.setattr(
        fallbacks, "_run", lambda call, *more: recorded.append(len(call.model.layers)) or run(call, *more)
    )
    graph_at = Profiler().graphs(case(model), kernel_stack("eager"))
    for graph in expected:
        found = graph_at(graph.batch_size)
        assert sorted(found.notes) == sorted(graph.notes)
        assert without_numbers(found) | {"notes": ()} == without_numbers(graph) | {"notes": ()}
    assert len(expected[0].notes) == COUNT
    assert recorded.count(COUNT) == 1
    assert len(recorded) == 1 + 3 + 1


def test_a_stack_with_another_layer_is_recorded_whole() -> None:
    asked = case(Stacked(wide=(COUNT // 2,)))
    graph_at = Profiler().graphs(asked, kernel_stack("eager"))
    for samples in (4, 2):
        expected = case(asked.module).captured(samples).graph
        assert without_numbers(graph_at(samples)) == without_numbers(expected)
    assert {samples for *_, samples in asked.known} == {4, 2}


def test_names_are_those_of_the_layers_that_stand_for_them() -> None:
    model = Stacked()
    stacks = Stacks.in_model(model)
    assert stacks.of == {"layers": LayerStack(0, COUNT)}
    names = [f"layers.{n}.q.weight" for n in (0, 1, 2, 9, COUNT - 2, COUNT - 1)]
    assert [stacks.like(name).split(".")[1] for name in names] == ["0", "1", "2", "2", "2", "3"]
    assert stacks.like("head.weight") == "head.weight"
    behind = Stacks.in_model(Stacked(wide=(0, 1), more=2))
    assert behind.of == {"layers": LayerStack(2, COUNT + 2)}
    names = [f"layers.{n}.q.weight" for n in (0, 1, 2, 3, 4, 9, COUNT + 1)]
    assert [behind.like(name).split(".")[1] for name in names] == ["0", "1", "2", "3", "4", "4", "5"]
    with stacks.shortened(model):
        assert len(model.layers) == stacks.of["layers"].short == 4
    assert len(model.layers) == COUNT


def test_places_of_a_list_without_a_layer_are_no_layers() -> None:
    """`nn.ModuleList([norm, None])` is how optional layers are left out; such a list is planned and run."""
    model = Stacked()
    nothing: Any = None
    model.layers.insert(0, nothing)
    assert Stacks.in_model(model).of == {"layers": LayerStack(1, COUNT + 1)}
    model.options = nn.ModuleList([nothing] * LEAST)
    assert Stacks.in_model(model).of == {"layers": LayerStack(1, COUNT + 1)}


class Optional(nn.Module):
    """Layers with an optional norm before each."""

    def __init__(self) -> None:
        super().__init__()
        norms: list[Any] = [nn.LayerNorm(3), None, None, nn.LayerNorm(3)]
        self.norms, self.layers = nn.ModuleList(norms), nn.ModuleList(nn.Linear(3, 3) for _ in norms)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.tanh(layer(x if norm is None else norm(x)))
        return x


def test_a_model_with_places_without_a_layer_is_planned() -> None:
    x, target = torch.randn(4, LENGTH, 3), torch.zeros(4, LENGTH, dtype=torch.long)
    plan = outsize.plan(Optional(), (x,), target=target, loss_fn=loss, cluster="2xcpu", stages=2)
    assert sum(len(stage.units) for stage in plan.stages) > 0
    assert plan.axes.pp == 2
