"""The zoo: the networks of diffusers that denoise images and videos, and the autoencoder around them.

Their `config` is a FrozenDict, a dict whose class refuses changes. Each is trained as its library's scripts
do it: noisy latents, a time step for each sample, what the picture shall show, and the squared error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import CLASSES, Batch, Case, images
from zoo_hf import batch, drawn, integers

Config = dict[str, Any]
TEXT, LATENT = 16, 8  # the width of a token of text, and the side of a latent picture
STEPS = 1000


def built(kind: str, **config: Any) -> nn.Module:
    """A model of diffusers with random weights."""
    model = getattr(import_module("diffusers"), kind)(**config)
    # Layers that begin as zeros would hide what comes before them.
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def denoised(output: Any, target: Tensor) -> Tensor:
    """The squared error of the predicted noise; a predicted variance is left out."""
    return F.mse_loss(output.sample[:, : target.shape[1]], target)


def denoiser(name: str, kind: str, config: Config, made: Callable[[int], Batch], *noise: int) -> Case:
    """A network that predicts noise of this shape for each sample."""
    return Case(name, partial(built, kind, **config), made, denoised, drawn(*noise, seed=13))


def same_for_all(*shape: int) -> Callable[[int], Tensor]:
    """Positions, which all samples share."""
    return lambda _: torch.arange(shape[0])[:, None].expand(shape).float()


def all_ones(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.ones(n, *shape)


BLOCKS: Config = {
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "sample_size": LATENT,
}
TWO_HEADS: Config = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
TIMES = integers(STEPS)

CASES: tuple[Case, ...] = (
    denoiser(
        "diffusers_unet",
        "UNet2DModel",
        {
            **BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        batch(sample=drawn(3, LATENT, LATENT), timestep=TIMES),
        *(3, LATENT, LATENT),
    ),
    denoiser(
        "diffusers_unet_conditioned",
        "UNet2DConditionModel",
        {
            **BLOCKS,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": TEXT,
            "attention_head_dim": 2,
        },
        batch(sample=drawn(4, LATENT, LATENT), timestep=TIMES, encoder_hidden_states=drawn(6, TEXT, seed=14)),
        *(4, LATENT, LATENT),
    ),
    denoiser(
        "diffusers_dit",
        "DiTTransformer2DModel",
        {
            **TWO_HEADS,
            "sample_size": LATENT,
            "num_embeds_ada_norm": CLASSES,
            "norm_num_groups": 4,
            "out_channels": 8,
        },
        batch(hidden_states=drawn(4, LATENT, LATENT), timestep=TIMES, class_labels=integers(CLASSES)),
        *(4, LATENT, LATENT),
    ),
    denoiser(
        "diffusers_pixart",
        "PixArtTransformer2DModel",
        {
            **TWO_HEADS,
            "sample_size": LATENT,
            "cross_attention_dim": 16,
            "caption_channels": TEXT,
            "use_additional_conditions": False,
        },
        batch(
            hidden_states=drawn(4, LATENT, LATENT),
            encoder_hidden_states=drawn(6, TEXT, seed=14),
            timestep=TIMES,
            encoder_attention_mask=all_ones(6),
        ),
        *(4, LATENT, LATENT),
    ),
    denoiser(
        "diffusers_sd3",
        "SD3Transformer2DModel",
        {
            **TWO_HEADS,
            "sample_size": LATENT,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": TEXT,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 12,
            "pos_embed_max_size": LATENT,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        batch(
            hidden_states=drawn(4, LATENT, LATENT),
            encoder_hidden_states=drawn(6, TEXT, seed=14),
            pooled_projections=drawn(12, seed=15),
            timestep=TIMES,
        ),
        *(4, LATENT, LATENT),
    ),
    denoiser(
        "diffusers_flux",
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "joint_attention_dim": TEXT,
            "pooled_projection_dim": 12,
            "guidance_embeds": True,
            "axes_dims_rope": (2, 2, 4),
        },
        batch(
            hidden_states=drawn(16, 4),
            encoder_hidden_states=drawn(6, TEXT, seed=14),
            pooled_projections=drawn(12, seed=15),
            timestep=drawn(),
            img_ids=same_for_all(16, 3),
            txt_ids=same_for_all(6, 3),
            guidance=all_ones(),
        ),
        *(16, 4),
    ),
    denoiser(
        "diffusers_mochi",
        "MochiTransformer3DModel",
        {
            **TWO_HEADS,
            "in_channels": 4,
            "pooled_projection_dim": 8,
            "text_embed_dim": TEXT,
            "time_embed_dim": 8,
            "max_sequence_length": 6,
        },
        batch(
            hidden_states=drawn(4, 2, 4, 4),
            encoder_hidden_states=drawn(6, TEXT, seed=14),
            timestep=TIMES,
            encoder_attention_mask=lambda n: torch.arange(6)[None] < 4 + torch.arange(n)[:, None] % 3,
        ),
        *(4, 2, 4, 4),
    ),
    Case(
        "diffusers_autoencoder",
        partial(
            built,
            "AutoencoderKL",
            **{
                **BLOCKS,
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
            },
        ),
        batch(sample=partial(images, size=LATENT)),
        denoised,
        partial(images, size=LATENT),
    ),
)
