"""Small graphs for the planner's tests: made from plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from outsize.ir.graph import ModelGraph, Parameter, Unit, Value
from outsize.ir.profile import Profile, UnitCost


def unit(index: int, parameters: tuple[str, ...] = (), buffer_bytes: int = 0, saved_bytes: int = 0) -> Unit:
    return Unit(
        index=index,
        name=f"h.{index}",
        kind="Linear",
        parameters=parameters,
        buffer_bytes=buffer_bytes,
        flops=1,
        moved_bytes=1,
        saved_bytes=saved_bytes,
    )


def parameter(*names: str, size_bytes: int, trainable: bool = True) -> Parameter:
    shape = (size_bytes // 4,)
    return Parameter(names=names, shape=shape, dtype="float32", size_bytes=size_bytes, trainable=trainable)


def value(index: int, producer: int, consumers: tuple[int, ...], size_bytes: int, grad: bool = True) -> Value:
    return Value(
        id=index,
        shape=(size_bytes // 4,),
        dtype="float32",
        size_bytes=size_bytes,
        requires_grad=grad,
        producer=producer,
        consumers=consumers,
    )


def graph_of(
    units: Sequence[Unit],
    values: Sequence[Value] = (),
    parameters: Sequence[Parameter] = (),
    output_bytes: int = 0,
    batch_size: int = 1,
) -> ModelGraph:
    return ModelGraph(
        model="toy",
        fingerprint="f0",
        batch_size=batch_size,
        units=tuple(units),
        values=tuple(values),
        parameters=tuple(parameters),
        output_bytes=output_bytes,
    )


def cost(name: str, forward_s: float, saved_bytes: int = 0, workspace_bytes: int = 0) -> UnitCost:
    return UnitCost(
        name=name,
        forward_s=forward_s,
        backward_input_s=forward_s,
        backward_weight_s=forward_s,
        saved_bytes=saved_bytes,
        workspace_bytes=workspace_bytes,
        flops=1,
        source="roofline",
    )


def profile_of(
    graph: ModelGraph, seconds: Sequence[float], workspace: Sequence[int] | None = None
) -> Profile:
    scratch = workspace or [0] * len(seconds)
    return Profile(
        fingerprint=graph.fingerprint,
        device="cpu",
        microbatch_size=graph.batch_size,
        units=tuple(
            cost(u.name, s, u.saved_bytes, w) for u, s, w in zip(graph.units, seconds, scratch, strict=True)
        ),
    )


def chain(
    seconds: Sequence[float],
    value_bytes: int = 8,
    weight_bytes: int = 100,
    saved_bytes: int = 10,
    batch_size: int = 1,
) -> tuple[ModelGraph, Profile]:
    """A row of units, each with one parameter, each feeding the next."""
    n = len(seconds)
    graph = graph_of(
        [unit(i, (f"h.{i}.weight",), saved_bytes=saved_bytes) for i in range(n)],
        [value(i, i, (i + 1,), value_bytes) for i in range(n - 1)],
        [parameter(f"h.{i}.weight", size_bytes=weight_bytes) for i in range(n)],
        batch_size=batch_size,
    )
    return graph, profile_of(graph, seconds)


@st.composite
def graphs(draw: st.DrawFn, max_units: int = 8) -> tuple[ModelGraph, Profile]:
    """A random graph with skips, values without gradient, tied and frozen parameters."""
    n = draw(st.integers(3, max_units))
    size = st.integers(1, 50)
    values = [
        value(index, producer, tuple(sorted(users)), draw(size), draw(st.booleans()))
        for index in range(draw(st.integers(0, 6)))
        for producer in [draw(st.integers(0, n - 2))]
        for users in [draw(st.sets(st.integers(producer + 1, n - 1), min_size=1, max_size=4))]
    ]
    users_of = [
        draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=3)) for _ in range(draw(st.integers(0, 5)))
    ]
    parameters = [
        parameter(f"p{i}", f"q{i}", size_bytes=draw(size), trainable=draw(st.booleans()))
        for i in range(len(users_of))
    ]
    units = [
        unit(
            i,
            tuple(
                draw(st.sampled_from(p.names))
                for p, who in zip(parameters, users_of, strict=True)
                if i in who
            ),
            buffer_bytes=draw(size),
            saved_bytes=draw(size),
        )
        for i in range(n)
    ]
    graph = graph_of(units, values, parameters, output_bytes=draw(size))
    seconds = [draw(st.integers(1, 9)) / 8 for _ in range(n)]
    return graph, profile_of(graph, seconds, [draw(size) for _ in range(n)])


@st.composite
def cut_graphs(draw: st.DrawFn) -> tuple[ModelGraph, Profile, tuple[int, ...]]:
    """A random graph and where it is cut into two to four stages."""
    graph, profile = draw(graphs())
    n = len(graph.units)
    cuts = draw(st.sets(st.integers(1, n - 1), min_size=1, max_size=min(3, n - 1)))
    return graph, profile, (0, *sorted(cuts), n)
