"""The unmodified models of the parity tests: each class as its library ships it, tiny, with random weights.

A case builds its model from a fixed seed, so that two builds are equal, and makes batches of any size;
twelve samples split into 1, 3, 4 and 6 microbatches (`smallest_microbatch` says how far they may be split).
The loss is either inside the model (labels among the keyword arguments, `case.loss is None`, read
`output.loss`) or a function `loss(output, target)`; `loss_of` does the right one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models import LateFusion, LSTMClassifier, ToyModel, UNet, mlp

from outsize.capture.models import import_torchvision
from outsize.capture.providers import import_transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    tv = import_torchvision()
    hf = import_transformers()

Batch = tuple[tuple[Any, ...], dict[str, Any]]
VOCABULARY, LENGTH, CLASSES = 128, 16, 5


@final
@dataclass(frozen=True)
class Case:
    """One model with its batches. `make` builds it as shipped; with a loss inside, `loss` is None."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor] | None = None
    target: Callable[[int], Tensor | None] = lambda batch_size: None
    smallest_microbatch: int = 1

    def build(self, dropout: bool = False, seed: int = 0) -> nn.Module:
        """A new model in train mode; `dropout=True` keeps the class's own probabilities."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        return (model if dropout else without_randomness(model)).train()

    def loss_of(self, output: Any, target: Tensor | None) -> Tensor:
        """The training loss of one (micro)batch's output."""
        if self.loss is None:
            return output.loss
        assert target is not None
        return self.loss(output, target)


def without_randomness(model: nn.Module) -> nn.Module:
    """Set every probability of dropout, stochastic depth, layer drop and router noise to zero, in place.

    They are floats named `...drop...` on modules and on transformers' configs, the `p` of dropout
    modules and of torchvision's StochasticDepth, and Mixtral's `router_jitter_noise`.
    """
    for module in model.modules():
        _silence(module)
        if hasattr(module, "config"):
            _silence(module.config)
    return model


def _silence(holder: Any) -> None:
    kind = type(holder).__name__.lower()
    dropping = "drop" in kind or kind == "stochasticdepth"
    for name, value in list(vars(holder).items()):
        random = "drop" in name or "jitter" in name or (dropping and name == "p")
        if random and isinstance(value, float):
            setattr(holder, name, 0.0)


# -- batches ---------------------------------------------------------------------------------------


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(batch_size: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(batch_size, 3, size, size, generator=_seeded(seed))


def tokens(batch_size: int, length: int = LENGTH, seed: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, length), generator=_seeded(seed))


def classes(batch_size: int) -> Tensor:
    return torch.randint(0, CLASSES, (batch_size,), generator=_seeded(3))


def label_map(batch_size: int, size: int) -> Tensor:
    return torch.randint(0, CLASSES, (batch_size, size, size), generator=_seeded(4))


def features(batch_size: int, width: int) -> Tensor:
    return torch.randn(batch_size, width, generator=_seeded(5))


def causal_batch(batch_size: int) -> Batch:
    ids = tokens(batch_size)
    return (), {"input_ids": ids, "labels": ids}


def seq2seq_batch(batch_size: int) -> Batch:
    return (), {"input_ids": tokens(batch_size), "labels": tokens(batch_size, 12, seed=6)}


def masked_batch(batch_size: int) -> Batch:
    ids = tokens(batch_size)
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def image_labels_batch(batch_size: int) -> Batch:
    return (), {"pixel_values": images(batch_size, 32), "labels": classes(batch_size)}


def whisper_batch(batch_size: int) -> Batch:
    mel = torch.randn(batch_size, 8, 64, generator=_seeded(7))
    return (), {"input_features": mel, "labels": tokens(batch_size, 12)}


# -- losses outside the model ----------------------------------------------------------------------


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def segmentation_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Main head plus 0.4 of the auxiliary head, as in torchvision's reference training script."""
    return F.cross_entropy(output["out"], target) + 0.4 * F.cross_entropy(output["aux"], target)


# -- models ----------------------------------------------------------------------------------------


def deeplab() -> nn.Module:
    """DeepLabV3-ResNet101 with both heads changed to the user's class count, as users do it."""
    model = tv.models.segmentation.deeplabv3_resnet101(weights=None, weights_backbone=None, aux_loss=True)
    model.classifier[4] = nn.Conv2d(256, CLASSES, 1)
    model.aux_classifier[4] = nn.Conv2d(256, CLASSES, 1)
    return model


def late_fusion() -> nn.Module:
    return LateFusion(tv.models.resnet18(weights=None), tv.models.resnet18(weights=None), CLASSES)


def resnet(name: str) -> Callable[[], nn.Module]:
    return lambda: tv.models.get_model(name, weights=None, num_classes=CLASSES)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=4,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    )
    return hf.BartForConditionalGeneration(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return hf.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config)


def swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    )
    return hf.SwinForImageClassification(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=32,
        max_target_positions=32,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hf.WhisperForConditionalGeneration(config)


def mamba() -> nn.Module:
    config = hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=4)
    return hf.MambaForCausalLM(config)


# -- the registry ----------------------------------------------------------------------------------

CASES: tuple[Case, ...] = (
    Case("toy", ToyModel, lambda n: ((features(n, 10),), {}), squared_error, lambda n: features(n, 5)),
    Case("mlp", mlp, lambda n: ((features(n, 12),), {}), cross_entropy, classes),
    Case("resnet18", resnet("resnet18"), lambda n: ((images(n, 64),), {}), cross_entropy, classes),
    # One image of 32 pixels is one value per channel at the end, which BatchNorm refuses.
    Case("resnet50", resnet("resnet50"), lambda n: ((images(n, 32),), {}), cross_entropy, classes, 2),
    Case(
        "deeplabv3",
        deeplab,
        lambda n: ((images(n, 32),), {}),
        segmentation_loss,
        lambda n: label_map(n, 32),
        smallest_microbatch=2,  # BatchNorm behind the global pooling of ASPP wants two values per channel
    ),
    Case("unet", UNet, lambda n: ((images(n, 32),), {}), cross_entropy, lambda n: label_map(n, 32)),
    Case(
        "late_fusion",
        late_fusion,
        lambda n: ((images(n, 64), images(n, 64, seed=8)), {}),
        cross_entropy,
        classes,
    ),
    Case("gpt2", gpt2, causal_batch),
    Case("llama", llama, causal_batch),
    Case("qwen3", qwen3, causal_batch),
    Case("mixtral", mixtral, causal_batch),
    Case("t5", t5, seq2seq_batch),
    Case("bart", bart, seq2seq_batch),
    Case("bert", bert, masked_batch),
    Case("vit", vit, image_labels_batch),
    Case("swin", swin, image_labels_batch),
    Case("whisper", whisper, whisper_batch),
    Case("mamba", mamba, causal_batch),
    Case("lstm", LSTMClassifier, lambda n: ((tokens(n),), {}), cross_entropy, classes),
)


def case(name: str) -> Case:
    """The case of this name; KeyError otherwise."""
    return {c.name: c for c in CASES}[name]
