"""Styles by hand: which products pair up by the values, what is divided on the way, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_transformers import batch_of, built
from torch import Tensor, nn
from torch.nn import functional

from outsize.errors import BadOption
from outsize.ir.units.tensor_styles import DivisibleSize, TensorStyles
from outsize.program.sharding.tensor_parallel import styles
from outsize.train.tensor_parallel import tensor_styles


class Net(nn.Module):
    """Layers by name and a forward by function."""

    def __init__(self, run: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


X = torch.randn(2, 5, 12)


def styles_of(run: Callable[..., Tensor], **layers: nn.Module) -> tuple[dict[str, str], TensorStyles]:
    found = tensor_styles(Net(run, **layers), (X,))
    return {m.module: m.style for m in found.modules}, found


def why(found: TensorStyles, module: str) -> str:
    return next(m.why for m in found.modules if m.module == module)


def test_a_pair_is_found_by_its_values_whatever_the_names() -> None:
    styles, found = styles_of(
        lambda m, x: x + m.zebra(functional.gelu(m.apple(x))),
        zebra=nn.Linear(24, 12),
        apple=nn.Linear(12, 24),
    )
    assert styles == {"zebra": "row", "apple": "column"}
    assert why(found, "zebra") == "adds up apple"
    assert [(d.size, found.degrees) for d in found.divided] == [(24, (2, 3, 4, 6, 8, 12, 24))]


def test_of_two_products_that_are_added_the_smaller_one_is_made_to_fit() -> None:
    """An adapter beside a layer: its first factor stays whole beside columns, its second one beside rows."""
    styles, found = styles_of(
        lambda m, x: m.down(y := (m.up(x) + m.b(m.a(x)) * 2).relu()) + m.d(m.c(y)) * 2,
        up=nn.Linear(12, 24),
        a=nn.Linear(12, 2),
        b=nn.Linear(2, 24),
        down=nn.Linear(24, 12),
        c=nn.Linear(24, 2),
        d=nn.Linear(2, 12),
    )
    assert styles == {"up": "column", "a": "whole", "b": "column", "down": "row", "c": "row", "d": "whole"}
    assert why(found, "a").startswith("what it makes is added to a larger divided product, add at")
    assert found.degrees == (2, 3, 4, 6, 8, 12, 24)


def test_what_a_norm_over_features_takes_is_whole_and_the_place_is_named() -> None:
    styles, found = styles_of(
        lambda m, x: m.b(m.norm(m.a(x))), a=nn.Linear(12, 24), norm=nn.LayerNorm(24), b=nn.Linear(24, 12)
    )
    assert set(styles.values()) == {"whole"}
    assert "there is no rule for LayerNorm, norm at " in why(found, "a")
    assert "test_styles.py:" in why(found, "a")


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def own_forward(module: nn.Module) -> None:
    module.forward = lambda x: nn.Linear.forward(module, x)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("marked", [hook, own_forward])
def test_a_module_that_runs_code_of_the_user_is_whole_and_the_reason_says_so(
    marked: Callable[[nn.Module], None], name: str
) -> None:
    layers = {"a": nn.Linear(12, 24), "b": nn.Linear(24, 12)}
    marked(layers[name])
    styles, found = styles_of(lambda m, x: m.b(m.a(x).relu()), **layers)
    assert set(styles.values()) == {"whole"}
    assert f"Linear has hooks or a forward of its own, {name} at " in why(found, "a")


def test_convolutions_are_left_alone() -> None:
    styles, _ = styles_of(lambda m, x: m.conv(x.transpose(1, 2)), conv=nn.Conv1d(12, 24, 1))
    assert styles == {"conv": "whole"}


def heads_by(split: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = split(m.qkv(x))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + m.out(mixed.transpose(1, 2).flatten(2))

    return run


def by_chunk(y: Tensor) -> tuple[Tensor, ...]:
    return tuple(z.view(2, 5, 3, 4).transpose(1, 2) for z in y.chunk(3, -1))


def by_slices(y: Tensor) -> tuple[Tensor, ...]:
    return tuple(z.view(2, 5, 3, 4).transpose(1, 2) for z in (y[..., :12], y[..., 12:24], y[..., 24:]))


def by_view(y: Tensor) -> tuple[Tensor, ...]:
    return tuple(y.view(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4))


def by_heads(y: Tensor) -> tuple[Tensor, ...]:
    return tuple(z.transpose(1, 2) for z in y.view(2, 5, 3, 12).chunk(3, -1))


@pytest.mark.parametrize(("split", "parts"), [(by_chunk, 3), (by_slices, 3), (by_view, 3), (by_heads, 1)])
def test_a_fused_projection_is_divided_in_its_parts(split: Callable[..., Any], parts: int) -> None:
    styles, found = styles_of(heads_by(split), qkv=nn.Linear(12, 36), out=nn.Linear(12, 12))
    assert styles == {"qkv": "column", "out": "row"}
    assert why(found, "qkv").startswith("3 parts of 12") is (parts == 3)
    assert [d.size for d in found.divided] == [3]  # heads
    assert found.degrees == (3,)


def test_more_layers_take_no_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has a projection in three parts, which the pass that meets it settles."""
    passes = list[int]()
    run = styles._StylePass.run
    monkeypatch.setattr(styles._StylePass, "run", lambda self: (passes.append(1), run(self))[1])
    taken = list[int]()
    for layers in (2, 7):
        passes.clear()
        modules = {
            f"{name}{i}": nn.Linear(12, 12 * n) for i in range(layers) for name, n in (("qkv", 3), ("out", 1))
        }

        def stack(m: Any, x: Tensor, layers: int = layers) -> Tensor:
            for i in range(layers):
                q, k, v = by_chunk(getattr(m, f"qkv{i}")(x))
                mixed = functional.scaled_dot_product_attention(q, k, v)
                x = x + getattr(m, f"out{i}")(mixed.transpose(1, 2).flatten(2))
            return x

        found, _ = styles_of(stack, **modules)
        assert set(found.values()) == {"column", "row"}
        taken.append(len(passes))
    assert taken == [2, 2]


def test_softmax_over_heads_cannot_be_divided() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return x + m.out(m.a(x).view(2, 5, 3, 4).softmax(2).flatten(2))

    styles, found = styles_of(run, a=nn.Linear(12, 12), out=nn.Linear(12, 12))
    assert styles == {"a": "whole", "out": "whole"}
    assert "softmax goes over what is divided" in why(found, "a")


def test_a_weight_used_by_columns_and_by_rows_is_whole() -> None:
    styles, _ = styles_of(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(12, 12))
    assert styles == {"a": "whole"}


def test_a_weight_that_somebody_wants_whole_is_whole() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return x + m.b(m.a(x).relu()) + m.a.weight.sum()

    styles, found = styles_of(run, a=nn.Linear(12, 24), b=nn.Linear(24, 12))
    assert styles == {"a": "whole", "b": "whole"}
    assert why(found, "a").startswith("all of a.weight is wanted, sum at ")


def test_a_norm_of_heads_and_of_whole_values_is_not_both() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.norm(m.a(x).view(2, 5, 3, 4)).flatten(2)
        return x + m.b(y) + m.norm(x.view(2, 5, 3, 4)).flatten(2)

    layers = {"a": nn.Linear(12, 12), "b": nn.Linear(12, 12)}
    styles, found = styles_of(run, norm=nn.LayerNorm(4), **layers)
    assert set(styles.values()) == {"whole"}
    assert why(found, "a").startswith("all of norm.bias is wanted, norm at ")


def test_a_bias_that_somebody_wants_whole_keeps_its_product_whole() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return x + m.b(m.a(x).relu()) + m.a.bias[:12]

    styles, _ = styles_of(run, a=nn.Linear(12, 24), b=nn.Linear(24, 12))
    assert styles == {"a": "whole", "b": "whole"}


def test_a_single_head_is_no_reason_to_refuse_the_rest() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(2, 5, 3, 1, 12).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + m.out(mixed.transpose(1, 2).flatten(2)) + m.d(m.c(x).relu())

    layers = {
        "qkv": nn.Linear(12, 36),
        "out": nn.Linear(12, 12),
        "c": nn.Linear(12, 8),
        "d": nn.Linear(8, 12),
    }
    styles, found = styles_of(run, **layers)
    assert styles == {"qkv": "whole", "out": "whole", "c": "column", "d": "row"}
    assert why(found, "qkv").startswith("there is a single one to divide, view at ")
    assert found.degrees == (2, 4, 8)


def test_grouped_heads_decide_the_degree_by_their_own_name() -> None:
    found = tensor_styles(built("llama"), (), batch_of("llama"))
    assert [(d.what, d.size) for d in found.divided] == [("num_key_value_heads", 2)]


def test_a_degree_that_does_not_divide_is_refused_with_the_nearest_that_does() -> None:
    found = TensorStyles(modules=(), divided=(DivisibleSize(size=8, what="num_key_value_heads"),))
    found.insist_on_degree(4)
    with pytest.raises(BadOption) as refused:
        found.insist_on_degree(3)
    assert str(refused.value).endswith(
        ": num_key_value_heads=8 is not divided by tp=3; 2, 4 and 8 divide all sizes. Next: "
        "axes={'tp': 2} (--axes tp=2)"
    )
    with pytest.raises(BadOption, match="num_key_value_heads=2 is not divided by tp=4; 2 divides all sizes"):
        tensor_styles(built("llama"), (), batch_of("llama"), degree=4)


def test_tied_embeddings_and_conv1d_of_gpt2() -> None:
    found = tensor_styles(built("gpt2"), (), batch_of("gpt2"))
    styles = {m.module: m.style for m in found.modules}
    assert styles["transformer.wte"] == "vocabulary"
    assert styles["lm_head"] == "column"
    assert styles["transformer.h.1.attn.c_attn"] == "column"
    assert styles["transformer.h.1.mlp.c_proj"] == "row"
    assert styles["transformer.wpe"] == "whole"


def test_experts_are_divided_because_it_was_tried() -> None:
    found = tensor_styles(built("mixtral"), (), batch_of("mixtral"))
    styles = {m.module: m.style for m in found.modules}
    assert styles["model.layers.0.mlp.experts"] == "experts"
    assert styles["model.layers.0.mlp.gate"] == "whole"


def test_the_models_own_plan_is_compared_and_not_followed() -> None:
    model = built("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.self_attn.o_proj": "colwise"}
    found = tensor_styles(model, (), batch_of("llama"))
    assert found.hints == (
        "the model's own plan says colwise for model.layers.*.self_attn.o_proj; derived: row",
    )
    assert tensor_styles(built("llama"), (), batch_of("llama")).hints == ()


def test_styles_of_a_model_on_meta_are_the_same() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    on_meta = tensor_styles(model, (X,))
    assert on_meta == tensor_styles(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True), (X,))
    assert {m.module: m.style for m in on_meta.modules}["self_attn"] == "heads"


def test_a_report_round_trips() -> None:
    found = tensor_styles(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)), (X,))
    assert TensorStyles.model_validate_json(found.to_json()) == found
    assert found.table().splitlines()[0] == "column      0  added up by 2"
