"""Builds on meta the models of the third table (recent.py): each one that of its library, at a row's sizes.

What a benchmark's own code computes otherwise is built as it computes it: BERT's head sees masked positions
alone, and a detector's loss is dense over its anchors (no shape tells how many anchors match a box).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.models.imports import import_transformers

MASKED_SHARE: Final = 0.15
# Open Images at 800 x 800: nine anchors at each of the cells of five levels, strides 8 to 128.
DETECTOR_SIDE: Final = 800
DETECTOR_CLASSES: Final = 264


@dataclass(frozen=True)
class Sizes:
    """What a row says of its model; what it does not say is 0, or {} of `more`."""

    name: str
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    ffn: int = 0
    vocabulary: int = 0
    length: int = 0
    tied: bool = False
    experts: tuple[int, int, int] = (0, 0, 0)  # how many, of which each token takes, and the width of one


@dataclass(frozen=True, eq=False)
class Built:
    """A model with the example batch of `samples` samples that it takes."""

    model: nn.Module
    example: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def built(sizes: Sizes) -> Built:
    """The model of a row, with weights on meta. Raises KeyError where nobody has written its family here."""
    make = next(make for start, make in _FAMILIES.items() if sizes.name.startswith(start))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(sizes)


def known(name: str) -> bool:
    """Whether a model of this name can be built."""
    return any(name.startswith(start) for start in _FAMILIES)


def _language(config: Any, model_class: Any, sizes: Sizes) -> Built:
    def example(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.zeros(samples, sizes.length, dtype=torch.long)
        return (), {"input_ids": ids, "labels": ids}

    return Built(model_class(config).train(), example)


def _common(sizes: Sizes) -> dict[str, Any]:
    found = {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads or sizes.heads,
        "intermediate_size": sizes.ffn,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.length,
        "tie_word_embeddings": sizes.tied,
        "use_cache": False,
    }
    return found | ({"head_dim": sizes.head_size} if sizes.head_size else {})


def _llama(sizes: Sizes) -> Built:
    found = import_transformers()
    return _language(found.LlamaConfig(**_common(sizes)), found.LlamaForCausalLM, sizes)


def _qwen2(sizes: Sizes) -> Built:
    found = import_transformers()
    return _language(found.Qwen2Config(**_common(sizes)), found.Qwen2ForCausalLM, sizes)


def _qwen3(sizes: Sizes) -> Built:
    found = import_transformers()
    if not sizes.experts[0]:
        return _language(found.Qwen3Config(**_common(sizes)), found.Qwen3ForCausalLM, sizes)
    count, chosen, width = sizes.experts
    more = {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }
    return _language(found.Qwen3MoeConfig(**_common(sizes) | more), found.Qwen3MoeForCausalLM, sizes)


def _mixtral(sizes: Sizes) -> Built:
    found, (count, chosen, width) = import_transformers(), sizes.experts
    more = {"num_local_experts": count, "num_experts_per_tok": chosen, "intermediate_size": width}
    return _language(found.MixtralConfig(**_common(sizes) | more), found.MixtralForCausalLM, sizes)


_FUSED_WITH_SINKS: Final = "fused_with_sinks"


def _with_sinks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_options: Any
) -> tuple[Tensor, None]:
    """Attention as the fused kernels of these systems have it, whose sinks scale the result of each head.

    transformers has it eager, with its scores in memory, or for GPUs alone. Windows count as full.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return (found * module.sinks.sigmoid()[None, :, None, None]).transpose(1, 2), None


def _gpt_oss(sizes: Sizes) -> Built:
    import_transformers().AttentionInterface.register(_FUSED_WITH_SINKS, _with_sinks)
    found, (count, chosen, width) = import_transformers(), sizes.experts
    more = {
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
        "intermediate_size": width,
        "sliding_window": 128,
        "attn_implementation": _FUSED_WITH_SINKS,
    }
    return _language(found.GptOssConfig(**_common(sizes) | more), found.GptOssForCausalLM, sizes)


def _deepseek(sizes: Sizes) -> Built:
    found = import_transformers()
    large = sizes.experts[0] == 256
    config = found.DeepseekV3Config(
        **_common(sizes) | {"num_key_value_heads": sizes.heads},
        n_routed_experts=sizes.experts[0],
        num_experts_per_tok=sizes.experts[1],
        moe_intermediate_size=sizes.experts[2],
        n_shared_experts=1 if large else 2,
        first_k_dense_replace=3 if large else 1,
        q_lora_rank=1536 if large else None,
        kv_lora_rank=512,
        n_group=8 if large else 1,
        topk_group=4 if large else 1,
    )
    return _language(config, found.DeepseekV3ForCausalLM, sizes)


def _gpt(sizes: Sizes) -> Built:
    """GPT-3 as OPT with GELU: the same layers, of linear ones, which precisions of eight bits know."""
    found = import_transformers()
    config = found.OPTConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        word_embed_proj_dim=sizes.hidden,
        num_attention_heads=sizes.heads,
        ffn_dim=sizes.ffn,
        max_position_embeddings=sizes.length,
        vocab_size=sizes.vocabulary,
        activation_function="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return _language(config, found.OPTForCausalLM, sizes)


class _MaskedBert(nn.Module):
    """BERT, whose head sees the masked positions of each sequence alone, as MLPerf's code gathers them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        found = import_transformers()
        whole = found.BertForPreTraining(config)
        self.bert, self.cls = whole.bert, whole.cls
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids: Tensor, positions: Tensor, labels: Tensor, following: Tensor) -> Tensor:
        """The sum of the loss of masked tokens and of the next sentence."""
        rows, pooled = self.bert(input_ids=input_ids, return_dict=False)[:2]
        masked = rows.gather(1, positions[:, :, None].expand(-1, -1, rows.shape[-1]))
        scores, relation = self.cls(masked, pooled)
        found = functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        return found + functional.cross_entropy(relation.float(), following)


def _bert(sizes: Sizes) -> Built:
    found = import_transformers()
    # MLPerf's code pads the vocabulary to whole rows of 16 bytes.
    padded = {"vocab_size": -(-sizes.vocabulary // 8) * 8, "tie_word_embeddings": True}
    config = found.BertConfig(**_common(sizes) | padded, attn_implementation="sdpa")
    masked = round(MASKED_SHARE * sizes.length)

    def example(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.zeros(samples, sizes.length, dtype=torch.long)
        few = torch.zeros(samples, masked, dtype=torch.long)
        return (ids, few, few, torch.zeros(samples, dtype=torch.long)), {}

    return Built(_MaskedBert(config).train(), example)


class _Detector(nn.Module):
    """RetinaNet with a dense loss: focal over all anchors and classes, and distances of all boxes."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection import backbone_utils, retinanet
        from torchvision.models.resnet import resnext50_32x4d
        from torchvision.ops import FrozenBatchNorm2d
        from torchvision.ops.feature_pyramid_network import LastLevelP6P7

        trunk = resnext50_32x4d(weights=None, norm_layer=FrozenBatchNorm2d)
        self.backbone = backbone_utils._resnet_fpn_extractor(
            trunk, 3, returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256)
        )
        self.head = retinanet.RetinaNetHead(256, 9, DETECTOR_CLASSES)

    def forward(self, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        """The loss of a batch of images of one size."""
        from torchvision.ops import sigmoid_focal_loss

        found = self.head(list(self.backbone(images).values()))
        focal = sigmoid_focal_loss(found["cls_logits"], classes, reduction="sum")
        return focal + functional.l1_loss(found["bbox_regression"], boxes, reduction="sum")


def _detector(_sizes: Sizes) -> Built:
    anchors = 9 * sum((-(-DETECTOR_SIDE // stride)) ** 2 for stride in (8, 16, 32, 64, 128))

    def example(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        images = torch.zeros(samples, 3, DETECTOR_SIDE, DETECTOR_SIDE)
        classes = torch.zeros(samples, anchors, DETECTOR_CLASSES)
        return (images, classes, torch.zeros(samples, anchors, 4)), {}

    return Built(_Detector().train(), example)


def _sample_loss(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output[0].float(), target)


def _diffusion(_sizes: Sizes) -> Built:
    found: Any = importlib.import_module("diffusers")
    model = found.UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(320, 640, 1280, 1280),
        attention_head_dim=(5, 10, 20, 20),
        cross_attention_dim=1024,
        use_linear_projection=True,
    )

    def example(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        steps = torch.zeros(samples, dtype=torch.long)
        inputs = {
            "sample": torch.zeros(samples, 4, 64, 64),
            "timestep": steps,
            "encoder_hidden_states": torch.zeros(samples, 77, 1024),
            "return_dict": False,
        }
        return (), inputs

    return Built(
        model.train(), example, {"loss_fn": _sample_loss, "target": lambda n: torch.zeros(n, 4, 64, 64)}
    )


def _flux(_sizes: Sizes) -> Built:
    found: Any = importlib.import_module("diffusers")
    model = found.FluxTransformer2DModel(
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=False,
    )

    def example(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = {
            "hidden_states": torch.zeros(samples, 256, 64),
            "encoder_hidden_states": torch.zeros(samples, 256, 4096),
            "pooled_projections": torch.zeros(samples, 768),
            "timestep": torch.zeros(samples),
            "img_ids": torch.zeros(256, 3),
            "txt_ids": torch.zeros(256, 3),
            "return_dict": False,
        }
        return (), inputs

    return Built(
        model.train(), example, {"loss_fn": _sample_loss, "target": lambda n: torch.zeros(n, 256, 64)}
    )


_FAMILIES: Final[dict[str, Callable[[Sizes], Built]]] = {
    "Llama": _llama,
    "Qwen2.5": _qwen2,
    "DeepSeek-R1-Distill Qwen": _qwen2,
    "Qwen3": _qwen3,
    "Mixtral": _mixtral,
    "gpt-oss": _gpt_oss,
    "DeepSeek-V3": _deepseek,
    "Moonlight": _deepseek,
    "GPT-3": _gpt,
    "BERT": _bert,
    "RetinaNet": _detector,
    "Stable Diffusion": _diffusion,
    "FLUX": _flux,
}
