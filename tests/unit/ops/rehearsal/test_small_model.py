"""A small model of the same kinds: fewer layers, narrower ones, and what axes divide they divide alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.ir.plan import Axes, Plan
from outsize.ops.rehearsal.settings import ConfigSettings, QuerySettings, named
from outsize.ops.rehearsal.small_model import ModelShrinker, Shrunken, SmallModel
from outsize.ops.rehearsal.small_plan import kinds_of, small_layout, small_plan
from outsize.ops.rehearsal.worlds import small_worlds

HERE = f"{__name__}:"
LLAMA = (
    "transformers:LlamaConfig?num_hidden_layers=16&hidden_size=512&intermediate_size=1024&vocab_size=4096"
    "&num_attention_heads=16&num_key_value_heads=8&max_position_embeddings=512"
)
MOE = (
    "transformers:Qwen3MoeConfig?num_hidden_layers=8&hidden_size=256&moe_intermediate_size=128&num_experts=32"
    "&num_experts_per_tok=4&num_attention_heads=8&num_key_value_heads=4&vocab_size=2048"
)


class Block(nn.Module):
    def __init__(self, width: int, act: str) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, width), act

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return x + (y.relu() if self.act == "relu" else y.tanh())


def blocks(layers: int = 12, width: int = 256) -> nn.Module:
    """Two kinds of layers, of which the later ones are of the second."""
    kinds = ("relu" if n < 2 else "tanh" for n in range(layers))
    return nn.Sequential(*(Block(width, kind) for kind in kinds), nn.Linear(width, 8))


def fixed() -> nn.Module:
    """A model that takes no number."""
    return blocks(10, 64)


def unshrinkable() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 20_000), nn.Linear(20_000, 20_000), nn.Linear(20_000, 3))


def example_batch(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    raise AssertionError("--input is given")


def planned(spec: str, axes: dict[str, int], cluster: str, shape: str, batch: int = 64) -> Plan:
    built = SmallModel(spec, shape, 0).made(batch, meta=True, as_it_is=True)
    stages = axes.get("pp", 1)
    group = {name: size for name, size in axes.items() if name != "pp"}
    return outsize.plan(
        built.model,
        built.args,
        built.kwargs,
        loss_fn=built.objective.loss_fn,
        target=built.objective.target,
        cluster=cluster,
        stages=stages,
        microbatches=batch // (2 * Axes(**axes).replicas),
        schedule="1f1b",
        axes={**group, "others": 1},
    )


def shrunken(spec: str, shape: str, plan: Plan, folder: Path) -> tuple[Shrunken, list[Plan]]:
    large = SmallModel(spec, shape, 0)
    built = large.made(plan.batch_size, meta=True, as_it_is=True)
    graph = built.case.captured(plan.microbatch_size).graph
    worlds = small_worlds(plan.axes)
    layouts = [small_layout(plan, world) for world in worlds]
    stages = max(layout.stages for layout in layouts)
    found = ModelShrinker(plan, worlds, graph, stages, folder).shrunken(large, built.model)
    plans = [small_plan(plan, graph, found.graph, layout, "cpu") for layout in layouts]
    assert kinds_of(found.graph) >= kinds_of(graph)
    return found, plans


def test_a_dense_model_on_sixteen_devices(tmp_path: Path) -> None:
    plan = planned(LLAMA, {"pp": 4, "tp": 4}, "2x8xh100-80gb", "256")
    found, plans = shrunken(LLAMA, "256", plan, tmp_path)
    numbers = {change.name: change.now for change in found.changes}
    assert found.parameters < 100_000
    assert numbers["num_hidden_layers"] == 4
    assert [each.axes.used for each in plans] == [{"pp": 4, "tp": 2}, {"pp": 2, "tp": 4}]
    assert all(each.schedule == plan.schedule for each in plans)
    config: Any = found.small.made(1, meta=True).model.config
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.num_key_value_heads % 4 == 0


def test_a_mixture_on_128_devices(tmp_path: Path) -> None:
    plan = planned(MOE, {"pp": 2, "dp_shard": 8, "ep": 8}, "16x8xh100-80gb", "64", 256)
    found, plans = shrunken(MOE, "64", plan, tmp_path)
    config: Any = found.small.made(1, meta=True).model.config
    assert config.num_experts % 4 == 0
    assert config.num_experts > config.num_experts_per_tok
    assert found.missing == ()
    assert plans[0].axes.used == {"pp": 2, "dp_shard": 2, "ep": 2}


def test_a_builders_own_numbers(tmp_path: Path) -> None:
    spec = f"{HERE}blocks?layers=24&width=512"
    plan = planned(spec, {"pp": 16}, "2x8xh100-80gb", "512")
    found, plans = shrunken(spec, "512", plan, tmp_path)
    assert {change.name for change in found.changes} >= {"layers", "width"}
    assert len(plans[0].stages) == 8
    acts = {module.act for module in found.small.made(1).model.modules() if isinstance(module, Block)}
    assert acts == {"relu", "tanh"}


def test_repeats_are_left_out_where_there_are_no_numbers(tmp_path: Path) -> None:
    spec = f"{HERE}fixed"
    plan = planned(spec, {"pp": 2, "dp_replicate": 8}, "2x8xh100-80gb", "64")
    found, _ = shrunken(spec, "64", plan, tmp_path)
    assert len(found.small.dropped) >= 2
    acts = {module.act for module in found.small.made(1).model.modules() if isinstance(module, Block)}
    assert acts == {"relu", "tanh"}


def test_what_cannot_become_small_says_so(tmp_path: Path) -> None:
    spec = f"{HERE}unshrinkable"
    plan = planned(spec, {"pp": 2, "dp_replicate": 8}, "2x8xh100-80gb", "16")
    with pytest.raises(BadOption, match="no small model could be made of") as caught:
        shrunken(spec, "16", plan, tmp_path)
    assert "parameters without repeated modules" in str(caught.value)


def test_lists_beside_a_number_keep_each_kind_of_entry(tmp_path: Path) -> None:
    text = '{"num_hidden_layers": 4, "layer_types": ["a", "a", "a", "b"], "pad_token_id": 900}'
    settings = ConfigSettings(text, "LlamaForCausalLM", tmp_path)
    assert settings.numbers == {("num_hidden_layers",): 4}
    spec = settings.spec({("num_hidden_layers",): 2})
    written = Path(spec.partition(":")[2]).read_text(encoding="utf-8")
    assert '"layer_types": ["a", "b"]' in written
    assert '"pad_token_id": 0' in written


def test_a_query_and_defaults_are_numbers() -> None:
    settings = QuerySettings(f"{HERE}blocks?width=32")
    assert settings.numbers == {("layers",): 12, ("width",): 32}
    assert settings.spec({("layers",): 3}) == f"{HERE}blocks?width=32&layers=3"
    assert named(("text_config", "depths", 2)) == "text_config.depths[2]"
