"""Predicted costs against a real forward and backward: FLOPs and saved bytes equal, moved bytes near.

torch has no formula for the CPU's flash attention; it gets the one of the other flash kernels. Its formula
for the weight gradient of a grouped convolution counts `groups` times too much: counted by hand here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from outsize.capture.costs.meter import formula_of, grouped_flops
from outsize.capture.graph.build import build_graph
from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.capture.recording.fallbacks import record
from outsize.ir.graph import ModelGraph

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FREE = ("detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
Context = Callable[[], AbstractContextManager[Any]]


def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _backward_flops(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(g, q, k, v)


def _counter() -> FlopCounterMode:
    formulas = {_FLASH: _forward_flops, _FLASH_BACKWARD: _backward_flops}
    return FlopCounterMode(display=False, custom_mapping=formulas)


class _Moved(TorchDispatchMode):
    moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._overloadpacket.__name__ not in _FREE:
            found = torch.utils._pytree.tree_leaves((args, kwargs, out))
            tensors = [t for t in found if isinstance(t, Tensor)]
            self.moved_bytes += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
        return out


def _loss_of(output: Any) -> Tensor:
    return output.loss if hasattr(output, "loss") else output.float().pow(2).mean()


def _entropy(output: Any) -> Tensor:
    return F.cross_entropy(output, torch.arange(len(output)) % output.shape[1])


def graph_of(model: nn.Module, args: Any, kwargs: Any, loss: Any, context: Context) -> ModelGraph:
    with context():
        return build_graph(record(model, args, kwargs, loss), model).graph


def truth(model: nn.Module, args: Any, kwargs: Any, loss: Any, context: Context) -> tuple[int, int, int, int]:
    """FLOPs forward and backward, saved bytes without copies of weights, bytes moved in the backward."""
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    copies = [p.detach().to(torch.bfloat16).flatten() for p in model.parameters()]
    saved: dict[int, Any] = {}

    def is_copy(tensor: Tensor) -> bool:
        flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), 0)
        return any(flat.shape == c.shape and torch.equal(flat, c) for c in copies)

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bfloat16 and is_copy(tensor):
            return tensor
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    model.zero_grad()  # the first backward of a step: nothing is added to .grad yet
    forward, backward, moved = _counter(), _counter(), _Moved()
    with forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), context():
        found = loss(model(*args, **kwargs))
    with backward, moved:
        found.backward()
    kept = sum(s.nbytes() for key, s in saved.items() if key not in weights)
    return forward.get_total_flops(), backward.get_total_flops(), kept, moved.moved_bytes


def predicted(graph: ModelGraph) -> tuple[int, int, int, int]:
    back = [w for u in graph.units for w in (*u.backward_input, *u.backward_weight)]
    assert [u.flops for u in graph.units] == [sum(w.flops for w in u.forward) for u in graph.units]
    saved = sum(u.saved_bytes for u in graph.units)
    return (
        sum(u.flops for u in graph.units),
        sum(w.flops for w in back),
        saved,
        sum(w.moved_bytes for w in back if w.family != "layout_copy"),
    )


def insist(
    model: nn.Module, args: Any, kwargs: Any = None, loss: Any = _loss_of, context: Context = nullcontext
) -> tuple[int, int]:
    """All equal but the moved bytes, which are returned: predicted, real."""
    kwargs = kwargs or {}
    found = predicted(graph_of(model, args, kwargs, loss, context))
    real = truth(model, args, kwargs, loss, context)
    assert found[:3] == real[:3]
    return found[3], real[3]


X, IMAGE, SEQUENCE = (4, 8), (2, 4, 16, 16), (2, 5, 8)


def _pair(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), layer)


def _after_conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 1), *layers)


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.options = nn.Linear(8, 24), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class _Itself(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), attention

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.attention(y, y, y, need_weights=False)[0]


class _Glue(nn.Module):
    """Views, writes in place, a parameter that is used twice, a broadcast, a gradient added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * self.scale
        z = (y + self.scale).clone()
        z += 1
        z.mul_(y)
        z[:, 1:3].add_(1.0)
        return torch.cat([z[:, :4], z[:, 4:].exp()], 1).softmax(-1) @ y.t()


def _frozen(index: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 11))
    model[index].requires_grad_(False)
    return model


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (_pair(nn.Linear(8, 16)), X),
    "linear without bias": (_pair(nn.Linear(8, 16, bias=False)), SEQUENCE),
    "frozen below": (_frozen(0), X),
    "frozen above": (_frozen(1), X),
    "conv strided": (_after_conv(nn.Conv2d(4, 8, 3, stride=2, padding=1)), IMAGE),
    "conv transposed": (_after_conv(nn.ConvTranspose2d(4, 8, 3, stride=2)), IMAGE),
    "batch norm, relu in place": (_after_conv(nn.BatchNorm2d(4), nn.ReLU(inplace=True)), IMAGE),
    "batch norm, eval": (_after_conv(nn.BatchNorm2d(4), nn.ReLU()).eval(), IMAGE),
    "group norm": (_after_conv(nn.GroupNorm(2, 4)), IMAGE),
    "layer norm": (_pair(nn.LayerNorm(8)), X),
    "rms norm": (_pair(nn.RMSNorm(8)), X),
    "dropout": (_pair(nn.Dropout(0.3)), X),
    "pooling": (_after_conv(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)), IMAGE),
    "attention": (_Attention(), SEQUENCE),
    "causal": (_Attention(is_causal=True), SEQUENCE),
    "attention with dropout": (_Attention(dropout_p=0.1), SEQUENCE),
    "multi-head": (_Itself(nn.MultiheadAttention(8, 2, batch_first=True)), SEQUENCE),
    "multi-head with dropout": (_Itself(nn.MultiheadAttention(8, 2, 0.2, batch_first=True)), SEQUENCE),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
    "GRU": (nn.GRU(8, 6), SEQUENCE),
    "glue": (_Glue(), X),
    "spectral norm": (_pair(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))), X),
} | {
    type(f).__name__: (_pair(f), X)
    for f in (
        nn.GELU(),
        nn.SiLU(),
        nn.Tanh(),
        nn.Hardswish(inplace=True),
        nn.PReLU(),
        nn.Softmax(-1),
        nn.GLU(),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_flops_and_saved_bytes_are_those_of_a_real_step(name: str) -> None:
    model, shape = CASES[name]
    if name == "GRU":
        model = nn.Sequential(nn.Linear(8, 8), model)
        insist(model, (torch.randn(shape),), loss=lambda out: _loss_of(out[0]))
        return
    insist(model, (torch.randn(shape),))


def test_an_embedding_scatters() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))
    ids = torch.randint(0, 50, (3, 7))
    insist(model, (ids,))
    found = graph_of(model, (ids,), {}, _loss_of, nullcontext).units[0].backward_weight
    assert [(w.family, w.flops, w.moved_bytes) for w in found] == [
        ("embedding", 0, ids.nbytes + 4 * 21 * 8 + 4 * 50 * 8)
    ]


@pytest.mark.parametrize("groups", [2, 4])
def test_a_grouped_convolution_computes_for_its_weights_what_its_forward_does(groups: int) -> None:
    unit = graph_of(
        _after_conv(nn.Conv2d(4, 8, 3, groups=groups)), (torch.randn(IMAGE),), {}, _loss_of, nullcontext
    ).units[1]
    assert unit.flops == 2 * (2 * 14 * 14) * 8 * (4 // groups) * 9
    assert (
        sum(w.flops for w in unit.backward_weight) == sum(w.flops for w in unit.backward_input) == unit.flops
    )


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.GELU()])
def test_under_autocast_the_loss_and_the_statistics_are_fp32(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 11))
    insist(model, (torch.randn(X),), {}, _entropy, lambda: torch.autocast("cpu", torch.bfloat16))


def test_whole_models() -> None:
    resnet = import_torchvision().models.resnet18(weights=None)
    moved, real = insist(resnet, (torch.randn(2, 3, 64, 64),), {}, _entropy)
    assert moved == pytest.approx(real, rel=0.1)

    hf, ids = import_transformers(), torch.randint(0, 100, (2, 16))
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = hf.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=64)
    gpt2 = hf.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    for model in (hf.LlamaForCausalLM(llama), hf.GPT2LMHeadModel(gpt2)):
        for context in (nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)):
            moved, real = insist(model, (), {"input_ids": ids, "labels": ids}, _loss_of, context)
            assert moved == pytest.approx(real, rel=0.1)


class _Product(torch.autograd.Function):
    """x @ w, whose backward computes a product more than torch's own, and works in place on its own copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        checked = grads[0].clone().mul_(1 + 0 * (x @ w))
        return checked @ w.t(), x.t() @ checked


class _Raising(torch.autograd.Function):
    """Its backward asks for a value, which no fake has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ grads[0].t() @ grads[0] if float(grads[0].sum()) > -1 else None


class _Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.function(x, self.weight) if self.function == _Product.apply else self.function(x)


class _Leaf(nn.Linear):
    """Is recorded as a whole, as layers with a forward of their own, which are swapped in, are."""

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.weight.t())


def test_the_backward_of_a_custom_function_is_counted_as_it_runs() -> None:
    x = torch.randn(X)
    insist(_Custom(_Product.apply), (x,))
    insist(nn.Sequential(nn.Linear(8, 8), _Leaf(8, 8, bias=False)), (x,))


def test_a_backward_that_needs_values_is_not_counted() -> None:
    units = graph_of(_Custom(_Raising.apply), (torch.randn(X),), {}, _loss_of, nullcontext).units
    back = [w for unit in units for w in unit.backward_input]
    assert not any(w.family == "matmul" for w in back)


def test_what_the_loss_leaves_out_has_no_backward() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x)
            return y, self.extra(y)

    graph = graph_of(Heads(), (torch.randn(X),), {}, lambda out: _loss_of(out[0]), nullcontext)
    back = {u.name: (*u.backward_input, *u.backward_weight) for u in graph.units}
    assert back["body"]
    assert not back["extra.0"]
    assert next(u for u in graph.units if u.name == "extra.0").flops


def test_products_of_experts_are_those_of_each_with_its_rows() -> None:
    """torch has no formula for `_grouped_mm`: each of eight rows meets the weights of one of two experts."""
    rows, weights = torch.Size((8, 16)), torch.Size((2, 16, 32))
    assert grouped_flops(rows, weights) == 2 * 8 * 16 * 32
    assert grouped_flops(torch.Size((16, 8)), torch.Size((8, 32))) == 2 * 16 * 8 * 32
    assert grouped_flops(torch.Size((2, 4, 16)), weights) == 2 * 8 * 16 * 32
    assert grouped_flops(torch.Size((2, 4, 16)), torch.Size((16, 8))) == 2 * 4 * 16 * 8
    assert formula_of(torch.ops.aten._grouped_mm.default) is not None
