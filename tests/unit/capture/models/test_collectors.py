"""Tensors that leave a module by the way: hooks that collect for their forward, lists, settled state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import batch, linear, two
from splits import captured, check_every_cut
from torch import Tensor, nn

from outsize.capture.models.imports import import_transformers
from outsize.errors import NotCapturable


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    """A mixture of experts of transformers with the loss of its routers, which hooks collect."""
    hf = import_transformers()
    config = hf.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    ids = torch.randint(0, 32, (2, 6))
    return hf.Qwen3MoeForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("ran_before", [False, True])
def test_hooks_that_collect_for_the_forward_that_runs_make_no_leaf(ran_before: bool) -> None:
    model, kwargs = mixture()
    if ran_before:
        model(**kwargs)
    inputs: Any = kwargs
    names = {unit.name for unit in captured(model, **inputs).graph.units}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts"} <= names


def settled(m: Any, x: Tensor) -> Tensor:
    m.mode = "dense"
    return m.b(m.a(x))


def test_rule_9_state_that_is_settled_after_one_forward_makes_no_leaf() -> None:
    found = check_every_cut(nn.Sequential(two(settled, mode="sparse"), linear()), batch(), steps=2)
    assert {"0.a", "0.b"} <= {unit.name for unit in found.graph.units}
    assert found.graph.notes == ("0.mode: set by the forward, not kept (the numbers do not depend on it)",)


def test_what_a_probe_leaves_in_a_list_of_others_is_no_constant() -> None:
    found: list[Tensor] = []

    def decides(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        found.append(y)
        return m.b(y) if y.sum() > 0 else y

    def outer(m: Any, x: Tensor) -> Tensor:
        found.clear()
        return m.b(m.inner(m.a(x))) + found[-1]

    with pytest.raises(NotCapturable, match="a tensor of unknown origin"):
        captured(two(outer, inner=two(decides)), batch())


def view_of_weight(m: Any, x: Tensor) -> Tensor:
    picked = (m.a(x) > 0).any(-1).nonzero()
    return m.child(x, m.weight.view(4, 4)) + len(picked)


def test_a_probed_leaf_may_pass_views_of_its_weights_to_a_child() -> None:
    child = two(lambda m, x, weight: m.a(x @ weight.T))
    inner = two(view_of_weight, child=child, weight=nn.Parameter(torch.randn(4, 4)))
    found = captured(nn.Sequential(linear(), inner, linear()), batch())
    assert [unit.name for unit in found.graph.units][:3] == ["0", "1", "2"]
