"""A stack of kernels is a record: what is left of works and of the host, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize import api
from outsize.api.problem import case_of, styled
from outsize.errors import BadOption
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph, Parameter, Unit, Value, Work
from outsize.ir.plan import Axes
from outsize.planner.costs.kernel_stacks import kernel_stack, stack_of_run, stacks_of_runs
from outsize.planner.costs.roofline import roofline, seconds

CHAIN = Work(family="elementwise", dtype="bfloat16", flops=0, moved_bytes=9000, launches=8, instructions=900)
PRODUCT = Work(family="matmul", dtype="bfloat16", flops=10**9, moved_bytes=5000)
COPY = Work(family="layout_copy", dtype="bfloat16", flops=0, moved_bytes=700, launches=2)
PIXELS = Work(family="direct_convolution", dtype="bfloat16", flops=10**9, moved_bytes=5000)


CASTS = Work(
    family="cast",
    dtype="float32",
    flops=0,
    moved_bytes=3500,
    launches=26,
    fused_bytes=500,
    fused_launches=6,
    library_bytes=300,
    library_launches=1,
)


def graph_of(*passes: tuple[Work, ...], crossing: int = 1000) -> ModelGraph:
    """A unit that takes a value of `crossing` bytes and gives one of as many, between two others."""

    def unit(index: int, **works: Any) -> Unit:
        common = {"kind": "op", "parameters": (), "buffer_bytes": 0, "flops": 0, "moved_bytes": 0}
        return Unit(index=index, name=f"u{index}", saved_bytes=0, **common, **works)

    def value(id: int) -> Value:
        common = {"shape": (), "dtype": "bfloat16", "requires_grad": True}
        return Value(id=id, size_bytes=crossing, producer=id, consumers=(id + 1,), **common)

    names = ("forward", "backward_input", "backward_weight")
    works = dict(zip(names, passes, strict=False))
    units = unit(0), unit(1, **works), unit(2)
    return ModelGraph(
        model="m", fingerprint="f", batch_size=1, units=units, values=(value(0), value(1)), parameters=()
    )


def test_ops_are_as_recorded_where_each_is_a_kernel() -> None:
    graph = graph_of((CHAIN, PRODUCT))
    assert kernel_stack("eager").of_graph(graph) is graph
    assert kernel_stack("graphs").of_graph(graph) is graph


@pytest.mark.parametrize("name", ["compiled", "fused", "fused-graphs"])
def test_a_chain_is_one_kernel_that_moves_what_crosses_its_border(name: Any) -> None:
    unit = kernel_stack(name).of_graph(graph_of((CHAIN, PRODUCT), (CHAIN,), (CHAIN,))).units[1]
    assert unit.forward[1] == PRODUCT
    assert (unit.forward[0].launches, unit.forward[0].moved_bytes) == (1, 2000)
    assert unit.forward[0].instructions == 200
    # Both gradients are of one chain: gradients of what it takes and gives, and what it takes once more.
    gradients = (*unit.backward_input, *unit.backward_weight)
    assert sum(work.launches for work in gradients) == 1
    assert sum(work.moved_bytes for work in gradients) == 3000


def test_an_op_that_is_alone_leaves_its_share() -> None:
    unit = kernel_stack("fused").of_graph(graph_of((CHAIN,), crossing=10**6)).units[1]
    assert unit.forward[0].moved_bytes == 4500


def test_images_with_their_channels_last_are_not_copied() -> None:
    unit = kernel_stack("fused").of_graph(graph_of((COPY, PIXELS))).units[1]
    assert [work.family for work in unit.forward] == ["convolution"]


def test_hosts_launch_less_and_cpus_stay() -> None:
    device = parse_cluster("1xh100-80gb").devices[0]
    shares = [
        kernel_stack(name).on(parse_cluster("1xh100-80gb")).devices[0].host_s
        for name in ("eager", "compiled", "graphs")
    ]
    assert shares[0] == device.host_s
    assert shares[1] == pytest.approx(0.27 * 37e-6)
    assert shares[2] == 0
    assert kernel_stack("graphs").on(parse_cluster("2xcpu")) == parse_cluster("2xcpu")


def test_options_of_a_run_name_its_stack() -> None:
    assert stack_of_run(compiled=True, device_graphs=False) == "compiled"
    assert stack_of_run(compiled=False, device_graphs=True) == "graphs"
    assert stack_of_run(compiled=True, device_graphs=True) == "compiled-graphs"
    assert stack_of_run(compiled=False, device_graphs=False) == "eager"
    assert set(stacks_of_runs()) == {"eager", "graphs", "compiled", "compiled-graphs"}


def small(**how: Any) -> outsize.Plan:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to("meta")
    x = torch.empty(8, 64, device="meta")
    request = outsize.Request(cluster="1xh100-80gb", **how)
    return outsize.plan(model, (x,), target=x, loss_fn=nn.functional.mse_loss, request=request)


def step_s(plan: outsize.Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def test_a_plan_has_the_seconds_of_the_stack_that_is_asked_for(tmp_path: Any) -> None:
    eager, graphs = small(), small(kernels="graphs")
    assert (eager.kernels, graphs.kernels) == ("eager", "graphs")
    assert step_s(graphs) < 0.5 * step_s(eager)
    graphs.save(tmp_path / "plan.json")
    read = outsize.Plan.load(tmp_path / "plan.json")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to("meta")
    x = torch.empty(8, 64, device="meta")
    again = api.outlook(model, (x,), target=x, loss_fn=nn.functional.mse_loss, plan=read)
    assert step_s(again.plan) == pytest.approx(step_s(graphs))


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(BadOption):
        small(kernels="magic")


def test_where_the_host_is_the_limit_the_switch_is_advised() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to("meta")
    x = torch.empty(8, 64, device="meta")

    def codes(**how: Any) -> list[str]:
        request = outsize.Request(cluster="1xh100-80gb", **how)
        seen = api.outlook(model, (x,), target=x, loss_fn=nn.functional.mse_loss, request=request)
        return [advice.code for advice in seen.advice]

    assert "other-kernels" in codes()
    assert "other-kernels" not in codes(kernels="compiled-graphs")


def test_a_roofline_knows_no_stack() -> None:
    """The record changes graph and cluster, and the same functions price them."""
    graph, cluster = graph_of((CHAIN, PRODUCT)), parse_cluster("1xh100-80gb")
    stack = kernel_stack("fused-graphs")
    eager = roofline(graph, cluster.devices[0]).units[1].forward_s
    fused = roofline(stack.of_graph(graph), stack.on(cluster).devices[0]).units[1].forward_s
    assert fused < eager


def test_a_chain_saves_what_crosses_its_border_and_no_copies() -> None:
    def held(works: tuple[Work, ...], kept: int = -1) -> list[int]:
        graph = graph_of(works)
        unit = graph.units[1].model_copy(update={"saved_bytes": 8000, "workspace_bytes": 9000})
        values = (graph.values[0].model_copy(update={"saved_by": kept}), graph.values[1])
        graph = graph.model_copy(update={"units": (graph.units[0], unit, graph.units[2]), "values": values})
        found = kernel_stack("fused").of_graph(graph).units[1]
        return [found.saved_bytes, found.workspace_bytes]

    assert held((CHAIN,)) == [1000, 1000]
    assert held((PRODUCT, CHAIN)) == [2000, 2000]
    assert held((PRODUCT,)) == [8000, 9000]


def test_products_of_a_transformer_engine_sum_the_gradients_of_their_biases() -> None:
    sums = CHAIN.model_copy(update={"family": "reduction", "launches": 1})

    def families(name: Any) -> list[str]:
        unit = kernel_stack(name).of_graph(graph_of((PRODUCT,), (PRODUCT,), (PRODUCT, sums))).units[1]
        return [work.family for work in unit.backward_weight]

    assert families("fused") == ["matmul"]
    assert families("compiled") == ["matmul", "reduction"]


def test_casts_are_the_kernels_that_the_record_of_their_precision_names() -> None:
    unit = kernel_stack("compiled").of_graph(graph_of((CASTS, PRODUCT), (CASTS,))).units[1]
    for cast in (unit.forward[0], unit.backward_input[0]):
        assert (cast.moved_bytes, cast.launches) == (500, 6)
    assert kernel_stack("graphs").of_graph(graph_of((CASTS,))).units[1].forward == (CASTS,)


def adapted(*sides: tuple[int, int], trains: bool = False) -> ModelGraph:
    """Layers in eight bits that read one value, each with a weight of such sides."""
    graph = graph_of((CASTS, PRODUCT), (CASTS, PRODUCT))
    first, layer, last = graph.units
    layers = tuple(
        layer.model_copy(update={"index": i, "parameters": (f"w{i}",), "row_maxima": 2})
        for i, _ in enumerate(sides, start=1)
    )
    readers = tuple(unit.index for unit in layers)
    value = graph.values[0].model_copy(update={"shape": (4, sides[0][1]), "consumers": readers})
    weights = tuple(
        Parameter(
            names=(f"w{i}",),
            shape=shape,
            dtype="bfloat16",
            size_bytes=2 * shape[0] * shape[1],
            trainable=trains,
        )
        for i, shape in enumerate(sides, start=1)
    )
    units = first, *layers, last.model_copy(update={"index": len(layers) + 1})
    return graph.model_copy(update={"units": units, "values": (value,), "parameters": weights})


def test_a_transformer_engine_casts_what_several_products_read_once() -> None:
    graph = kernel_stack("fused").of_graph(adapted((512, 256), (128, 256)))
    first, second = graph.units[1:3]
    assert [work.moved_bytes for work in first.forward if work.family == "cast"] == [300]
    assert [work.family for work in second.forward] == ["matmul"]
    # Each gradient is one of its own, and no rank asks for the largest element of this step.
    assert [unit.backward_input[0].moved_bytes for unit in (first, second)] == [300, 300]
    assert first.row_maxima == second.row_maxima == 0


def test_adapters_are_multiplied_as_they_are() -> None:
    graph = kernel_stack("fused").of_graph(adapted((16, 256)))
    assert [work.family for work in graph.units[1].forward] == ["matmul"]


def test_fused_layers_reach_what_a_device_sustains() -> None:
    """Of the best burst an H100 holds 0.915 at its limit of power; of its peak products in eight bits reach
    0.883 of what those in sixteen do.
    """
    wide = Work(family="matmul", dtype="bfloat16", flops=10**14, moved_bytes=10**6)
    narrow = wide.model_copy(update={"dtype": "float8_e4m3fn", "flops": 2 * 10**14})
    eager = parse_cluster("1xh100-80gb")
    device, fused = (kernel_stack(name).on(eager).devices[0] for name in ("eager", "fused"))
    assert seconds([wide], device) / seconds([wide], fused) == pytest.approx(0.915, rel=0.001)
    assert seconds([wide], device) / seconds([narrow], device) == pytest.approx(0.883, rel=0.002)
    same = parse_cluster("1xa100-80gb")
    assert seconds([wide], kernel_stack("fused").on(same).devices[0]) == seconds([wide], same.devices[0])


def test_fused_layers_sum_gradients_in_large_buckets() -> None:
    assert kernel_stack("compiled").of_graph(graph_of((CHAIN,))).bucket_bytes == (0, 0)
    assert kernel_stack("fused").of_graph(graph_of((CHAIN,))).bucket_bytes == (80 * 10**6, 2 * 10**6)


def test_a_plan_in_eight_bits_says_which_kernels_repair_its_casts() -> None:
    """Eager casts are more than half of the step, and compiled ones make eight bits faster than sixteen."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    x = torch.zeros(8192, 4096)
    how: Any = {"cluster": "1xh100-80gb", "loss_fn": nn.functional.mse_loss, "target": x, "microbatches": 1}

    def step_s(**request: Any) -> float:
        expected = outsize.plan(model, (x,), request=outsize.Request(**request), **how).expected
        assert expected is not None
        return expected.step_s

    half, eager = step_s(precision="bf16"), step_s(precision="fp8")
    compiled = step_s(precision="fp8", kernels="compiled")
    assert compiled < half < eager
    seen = api.outlook(model, (x,), request=outsize.Request(precision="fp8"), **how)
    (advice,) = [each for each in seen.advice if each.code == "other-kernels"]
    assert advice.other_step_s < half
    assert "compiled" in advice.kernels


def test_fused_layers_have_the_attention_of_a_library() -> None:
    """On a Hopper torch's reaches 0.35 of the peak; on an A100 both are the same."""
    work = Work(family="attention", dtype="bfloat16", flops=10**13, moved_bytes=10**6, instructions=10**12)
    graph = graph_of((work,))
    (left,) = kernel_stack("fused").of_graph(graph).units[1].forward
    assert left == work.model_copy(update={"instructions": 0})
    work = left
    for kind, ratio in (("h100-80gb", 0.6 / 0.35), ("a100-80gb", 1.0)):
        eager = parse_cluster(f"1x{kind}")
        eager_s, fused_s = (
            seconds([work], kernel_stack(name).on(eager).devices[0]) for name in ("eager", "fused")
        )
        assert eager_s / fused_s == pytest.approx(ratio, rel=0.01)


class GatedLayer(nn.Module):
    """A norm, a gated MLP and what follows, as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.LayerNorm(64),
            nn.Linear(64, 256, bias=False),
            nn.Linear(64, 256, bias=False),
            nn.Linear(256, 64, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def saved_by_unit(kernels: Any, precision: Any) -> dict[str, int]:
    """What each unit saves for 32 tokens, in bytes for each of them."""
    with torch.device("meta"):
        model, x = nn.Sequential(GatedLayer(), nn.Linear(64, 64)), torch.empty(32, 64)
    case = case_of(model, (x,), {}, {"target": x, "loss_fn": nn.functional.mse_loss}).under(precision)
    captured = case.on(parse_cluster("1xh100-80gb")).captured(32)
    graph = kernel_stack(kernels).of_graph(styled(case, captured, Axes(), False))
    return {unit.name: unit.saved_bytes // 32 for unit in graph.units}


def test_a_gated_activation_saves_what_it_takes() -> None:
    eager, fused = saved_by_unit("eager", "bf16"), saved_by_unit("fused", "bf16")
    assert saved_by_unit("compiled", "bf16") == eager
    # What silu takes, its result and what that is multiplied with are 512 bytes each; the result is gone.
    changed = {name: eager[name] - fused[name] for name in eager if eager[name] != fused[name]}
    assert changed == {"0.up": 512}
    assert eager["0.gate"] + eager["0.up"] == 2 * 64 + 3 * 512


def test_operands_that_are_cast_to_a_byte_are_saved_as_such() -> None:
    plain, fused = saved_by_unit("fused", "bf16"), saved_by_unit("fused", "fp8")
    # The input of both products, a copy for them both; and of the last two.
    changed = {name: plain[name] - fused[name] for name in plain if plain[name] != fused[name]}
    assert changed == {"0.gate": 64, "0.down": 256, "1": 64}
    eager = saved_by_unit("eager", "fp8")
    assert eager["0.gate"] == plain["0.gate"]


def test_frozen_weights_that_are_read_in_a_byte_are_kept_so() -> None:
    def weights_bytes(kind: str, kernels: Any) -> int:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).to("meta")
        model[1].requires_grad_(False)
        x = torch.empty(32, 64, device="meta")
        case = case_of(model, (x,), {}, {"target": x, "loss_fn": nn.functional.mse_loss}).under("fp8")
        captured = case.on(parse_cluster(f"1x{kind}")).captured(32)
        graph = kernel_stack(kernels, kind).of_graph(styled(case, captured, Axes(), False))
        assert graph.parameter_of[graph.parameters[1].name] == graph.parameters[1]
        return sum(parameter.size_bytes for parameter in graph.parameters)

    # Two trained weights in two bytes an element; a frozen one in both orders on Hopper, in one on Blackwell.
    assert weights_bytes("b200-180gb", "eager") == 3 * 2 * 64 * 64
    assert weights_bytes("h100-80gb", "fused") == 3 * 2 * 64 * 64
    assert weights_bytes("b200-180gb", "fused") == (2 * 2 + 1) * 64 * 64
