"""Tiny models of the tensor parallel tests: (model, args, kwargs), without and with dropout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny_transformers import SMALL, T5, batch_of, transformers

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
NO_DROPOUT: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
BERT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
VIT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4, "num_labels": 3,
}  # fmt: skip


class Attention(nn.Module):
    """Hand-written, with sizes of one device baked in and one fused projection."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        qkv = self.qkv(self.norm(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / (w // self.heads) ** 0.5
        mask = torch.full((t, t), float("-inf")).to(x.dtype).triu(1)
        mixed = (scores + mask).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, self.width))


class Rotated(nn.Module):
    """Complex rotary embeddings, repeated key heads and a gated product with slices, as in research code."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2, inner: int = 24) -> None:
        super().__init__()
        self.heads, self.groups, self.inner, self.head_dim = heads, groups, inner, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        angles = torch.outer(torch.arange(x.shape[1]), 1.0 / 100 ** torch.arange(0, 1, 0.5))
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.turn(self.q_norm(self.q(x).view(b, t, self.heads, self.head_dim)))
        k, v = self.kv(x).chunk(2, dim=-1)
        k = self.turn(k.view(b, t, self.groups, self.head_dim)).repeat_interleave(2, dim=2)
        v = v.view(b, t, self.groups, self.head_dim)[:, :, :, None].expand(
            b, t, self.groups, 2, self.head_dim
        )
        v = v.reshape(b, t, self.heads, self.head_dim)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(b, t, -1))
        up = self.up(x)
        return x + self.down(functional.silu(up[..., : self.inner]) * up[..., self.inner :])


class Joined(nn.Module):
    """Two streams of tokens that attend to each other, rotary embeddings by a stack of halves, and a product
    of what attention and an MLP beside it have joined: layers of transformers that make images.
    """

    def __init__(self, width: int = 16, heads: int = 4, inner: int = 32) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm, self.text_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.text_qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.up, self.out = nn.Linear(width, inner), nn.Linear(width + inner, width)
        self.text_out = nn.Linear(width, width)

    def turn(self, x: Tensor) -> Tensor:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
        angles = torch.outer(torch.arange(x.shape[1]), torch.ones(self.head_dim)).to(x.dtype)[None, :, None]
        return x * angles.cos() + turned * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        text, image = x.split_with_sizes([2, x.shape[1] - 2], dim=1)
        rows, text_rows = self.norm(image), self.text_norm(text)
        both = [
            torch.cat([own_text(text_rows), own(rows)], dim=1).unflatten(-1, (-1, self.head_dim))
            for own_text, own in zip(self.text_qkv, self.qkv, strict=True)
        ]
        q, k, v = self.turn(both[0]), self.turn(both[1]), both[2]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2, 3)
        text_mixed, mixed = mixed.split_with_sizes([2, x.shape[1] - 2], dim=1)
        text = text + self.text_out(text_mixed.contiguous())
        joined = torch.cat([mixed, functional.gelu(self.up(rows))], dim=2)
        return torch.cat([text, image + self.out(joined)], dim=1)


class Energy(nn.Module):
    """A force is the gradient of an energy, and the loss is of forces: gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.down(self.up(x).tanh()).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


def transformer(kind: str, config: str, fields: dict[str, Any]) -> nn.Module:
    return getattr(transformers, kind)(getattr(transformers, config)(**fields)).train()


def bert(dropout: float) -> Made:
    off = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ids = torch.randint(3, 61, (2, 9))
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    model = transformer("BertForMaskedLM", "BertConfig", {**BERT, **off})
    return model, (), {"input_ids": ids, "labels": ids, "attention_mask": mask}


def vit() -> Made:
    pixels = torch.randn(2, 3, 8, 8)
    model = transformer("ViTForImageClassification", "ViTConfig", VIT)
    return model, (), {"pixel_values": pixels, "labels": torch.tensor([0, 2])}


def gpt2(dropout: float) -> Made:
    fields = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
              "eos_token_id": 2, **dict.fromkeys(NO_DROPOUT, dropout)}  # fmt: skip
    return transformer("GPT2LMHeadModel", "GPT2Config", fields), (), batch_of("llama")


def t5(dropout: float) -> Made:
    fields = {**T5, "num_layers": 2, "dropout_rate": dropout, "initializer_factor": 0.5}
    return transformer("T5ForConditionalGeneration", "T5Config", fields), (), batch_of("t5")


def encoder(dropout: float) -> Made:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    return model.train(), (torch.randn(7, 3, 16),), {"src_key_padding_mask": padding}


def mlp() -> Made:
    sizes = 8, 32, 16, 24, 8, 4
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(5, 8),), {}


def decoder(name: str, **more: Any) -> Made:
    fields = {**SMALL, "num_hidden_layers": 2, **more}
    return transformer(f"{name}ForCausalLM", f"{name}Config", fields), (), batch_of("llama")


def adapters() -> Made:
    """A decoder with adapters of peft around every product of a layer: all other weights are frozen."""
    model, args, kwargs = decoder("Llama")
    peft = import_module("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(
                parameter, std=0.1
            )  # It begins with zeros, of which the other factor learns nothing.
    return model, args, kwargs


DROPOUT = {"gpt2", "bert", "t5", "encoder"}
# With --all alone: test_tensor_plans.py and test_sequence.py divide a llama, a BERT and the attention too.
RARE = {"llama", "bert", "mixtral eager", "qwen3", "attention", "vit", "rotated"}
NO_DOUBLE = {"mixtral"}  # torch's grouped matmul has no float64
MODELS: dict[str, Callable[[], Made]] = {
    "llama": lambda: decoder("Llama"),
    "gpt2": lambda: gpt2(0.2),
    "bert": lambda: bert(0.2),
    "t5": lambda: t5(0.2),
    "vit": vit,
    "mixtral": lambda: decoder("Mixtral", num_local_experts=4),
    "mixtral eager": lambda: decoder("Mixtral", num_local_experts=4, experts_implementation="eager"),
    "qwen3": lambda: decoder("Qwen3", head_dim=4, tie_word_embeddings=True),
    "encoder": lambda: encoder(0.2),
    "attention": lambda: (nn.Sequential(Attention(), Attention()), (torch.randn(2, 6, 16),), {}),
    "rotated": lambda: (nn.Sequential(Rotated(), Rotated()), (torch.randn(2, 6, 16),), {}),
    "joined": lambda: (nn.Sequential(Joined(), Joined()), (torch.randn(2, 6, 16),), {}),
    "mlp": mlp,
    "adapters": adapters,
    "energy": lambda: (Energy(), (torch.randn(5, 6),), {}),
}
