"""The graph of one tensor parallel rank against what a rank of a real model holds and saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tiny_transformers import SMALL, transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.planner.costs.roofline import roofline
from outsize.planner.layout.tensor_parallel import of_rank
from outsize.train.tensor_parallel import tensor_parallel

DEVICE = parse_cluster("1xh100-80gb").devices[0]
WAYS = 2


def llama(vocabulary: int = 64) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 2, "vocab_size": vocabulary})
    tokens = torch.zeros(2, 9, dtype=torch.long)
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def styled(model: nn.Module, given: dict[str, Tensor]) -> Captured:
    captured = build_graph(record(model, (), given), model)
    return Captured(captured.tape, with_styles(captured, model), captured.starts)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two, whose collectives send nothing: enough to count."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WAYS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("sequence", "vocabulary"), [(False, 64), (True, 64), (False, 4096)], ids=["plain", "sequence", "logits"]
)
def test_weights_and_saved_bytes_are_those_of_a_rank(sequence: bool, vocabulary: int) -> None:
    model, given = llama(vocabulary)
    whole = styled(model, given).graph
    rank, _ = of_rank((whole, roofline(whole, DEVICE)), WAYS, sequence)
    mesh = init_device_mesh("cpu", (WAYS,))
    tensor_parallel(model, (), given, mesh, gather_output=False, sequence_parallel=sequence)
    assert rank.parameter_bytes == sum(p.to_local().nbytes for p in model.parameters())  # pyright: ignore
    saved = saved_bytes(model, given)
    assert sum(u.saved_bytes for u in rank.units) == pytest.approx(saved, rel=0.1)
    assert sum(u.saved_bytes for u in whole.units) > (1.6 if sequence else 1.3) * saved


def saved_bytes(model: nn.Module, given: dict[str, Tensor]) -> int:
    """Of activations, each memory once."""
    weights = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}  # pyright: ignore
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            found[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(**given)
    assert out.loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def test_values_between_layers_stay_whole() -> None:
    whole = styled(*llama()).graph
    rank, _ = of_rank((whole, roofline(whole, DEVICE)), WAYS)
    sizes = {v.producer: (v.size_bytes, r.size_bytes) for v, r in zip(whole.values, rank.values, strict=True)}
    by_name = {u.name: sizes[u.index] for u in whole.units if u.index in sizes}
    hidden = 2 * 9 * SMALL["hidden_size"] * 4
    assert by_name["model.layers.0.self_attn.o_proj"] == (hidden, hidden)
    assert by_name["model.layers.0.mlp.down_proj"] == (hidden, hidden)
    gate, part = by_name["model.layers.0.mlp.gate_proj"]
    assert part == gate // WAYS


BETWEEN = ("self_attn.o_proj", "post_attention_layernorm", "mlp.down_proj")


def test_under_sequence_parallelism_they_are_divided_too() -> None:
    whole = styled(*llama()).graph
    part, _ = of_rank((whole, roofline(whole, DEVICE)), WAYS, True)
    for name in BETWEEN:
        assert made_bytes(part, name) == made_bytes(whole, name) // WAYS


def made_bytes(graph: ModelGraph, name: str) -> int:
    """Of what a unit of the first layer makes."""
    (unit,) = (unit.index for unit in graph.units if unit.name == f"model.layers.0.{name}")
    return max(v.size_bytes for v in graph.values if v.producer == unit)


def test_where_nobody_asked_or_one_rank_is_alone_nothing_changes() -> None:
    model, given = llama()
    plain = build_graph(record(model, (), given), model).graph
    known = styled(model, given).graph
    for graph, ways in ((plain, 2), (known, 1)):
        asked = graph, roofline(graph, DEVICE)
        assert of_rank(asked, ways) is asked
    assert known.fingerprint == plain.fingerprint
