"""Odd models on images and features: U-Nets, autoencoders, codebooks, transforms, reparametrised layers.

Images are [n, 3, size, size]; nothing in here knows outsize.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH = 5, 16


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice; the time embedding enters between."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)
        self.conv1, self.conv2 = (
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.Conv2d(outside, outside, 3, padding=1),
        )
        self.time, self.skip = nn.Linear(WIDTH, 2 * outside), nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[..., None, None].chunk(2, dim=1)
        return self.skip(x) + self.conv2(
            F.dropout(F.silu(self.norm2(h) * (1 + scale) + shift), 0.1, self.training)
        )


class PixelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.inside, self.outside = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(self.norm(x)).flatten(2).mT.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.outside(mixed.mT.unflatten(2, x.shape[2:]))


@final
class DiffusionUNet(nn.Module):
    """Denoiser of a diffusion model (Ho et al. 2020, arXiv:2006.11239): skips are kept on a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([ResidualBlock(8, 8), ResidualBlock(8, 16)])
        self.shrink = nn.ModuleList([nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)])
        self.middle1, self.attention, self.middle2 = (
            ResidualBlock(16, 16),
            PixelAttention(16),
            ResidualBlock(16, 16),
        )
        self.up = nn.ModuleList([ResidualBlock(32, 8), ResidualBlock(16, 8)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def embed(self, step: Tensor) -> Tensor:
        rate = torch.exp(-math.log(1000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angle = step[:, None].float() * rate
        return self.time(torch.cat([angle.sin(), angle.cos()], -1))

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        time, x = self.embed(step), self.first(image)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), time)
        return self.last(x)


class Gate(nn.Module):
    """Weighs a skip by a coarser map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.skip, self.coarse, self.score = (
            nn.Conv2d(width, 4, 1),
            nn.Conv2d(2 * width, 4, 1),
            nn.Conv2d(4, 1, 1),
        )

    def forward(self, skip: Tensor, coarse: Tensor) -> Tensor:
        both = F.relu(self.skip(skip) + F.interpolate(self.coarse(coarse), skip.shape[-2:], mode="bilinear"))
        return skip * self.score(both).sigmoid()


@final
class AttentionUNet(nn.Module):
    """U-Net with attention gates (Oktay et al. 2018, arXiv:1804.03999), deeply supervised."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip((3, 8, 16), widths, strict=True)
        )
        self.norm = nn.ModuleList(nn.BatchNorm2d(b) for b in widths)
        self.gates = nn.ModuleList(Gate(b) for b in widths[:2])
        self.up = nn.ModuleList(nn.Conv2d(3 * b, b, 3, padding=1) for b in widths[:2])
        self.heads = nn.ModuleList(nn.Conv2d(b, CLASSES, 1) for b in widths[:2])

    def forward(self, image: Tensor) -> list[Tensor]:
        maps, x = [], image
        for conv, norm in zip(self.down, self.norm, strict=True):
            x = F.relu_(norm(conv(x)))
            maps.append(x)
            x = F.max_pool2d(x, 2)
        x, found = maps.pop(), []
        for level in (1, 0):
            gated = self.gates[level](maps[level], x)
            x = F.elu(self.up[level](torch.cat([gated, F.interpolate(x, scale_factor=2)], 1)))
            found.append(self.heads[level](x))
        return found


@final
class MLPMixer(nn.Module):
    """Tolstikhin et al. 2021 (arXiv:2105.01601): linear layers along patches and along channels in turn."""

    def __init__(self, patches: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, WIDTH, 8, 8)
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches)) for _ in range(layers)
        )
        self.within = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patchify(image).flatten(2).transpose(1, 2)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(self.norm(x).mT).mT
            x = x + within(self.norm(x))
        return self.classifier(x.mean(1))


class MaskedConv2d(nn.Conv2d):
    """Sees only pixels before its own. The mask is multiplied into the weight itself at each call."""

    mask: Tensor

    def __init__(self, own: bool, *args: Any) -> None:
        super().__init__(*args)
        mask = torch.ones_like(self.weight)
        rows, columns = mask.shape[2:]
        mask[:, :, rows // 2, columns // 2 + int(own) :] = 0
        mask[:, :, rows // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(input)


@final
class PixelCNN(nn.Module):
    """van den Oord et al. 2016 (arXiv:1601.06759): scores of 8 levels for each pixel of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            MaskedConv2d(False, 3, WIDTH, 5, 1, 2),
            nn.ReLU(inplace=True),
            MaskedConv2d(True, WIDTH, WIDTH, 3, 1, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(WIDTH, 3 * 8, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        levels = ((image.clamp(-2, 2) + 2) / 4 * 7).round().long()
        return F.cross_entropy(self.layers(image).unflatten(1, (8, 3)), levels)


class Codebook(nn.Module):
    """Vector quantisation whose code vectors are moving averages, written by hand (arXiv:1711.00937, A.1)."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, codes: int = 12, width: int = 8) -> None:
        super().__init__()
        first = torch.randn(codes, width)
        self.register_buffer("codes", first)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", first.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.movedim(1, -1).flatten(0, -2)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, len(self.codes)).float()
                self.counts.mul_(0.99).add_(hits.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(hits.T @ flat, alpha=0.01)
                self.codes.copy_(self.sums / self.counts.clamp_min(1e-5)[:, None])
        found = F.embedding(nearest, self.codes).unflatten(0, x.movedim(1, -1).shape[:-1]).movedim(-1, 1)
        return x + (found - x).detach(), F.mse_loss(x, found.detach())


@final
class VQVAE(nn.Module):
    """An autoencoder through a codebook; straight-through gradient, commitment loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH, 8, 4, 2, 1))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, WIDTH, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1)
        )

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        codes, commitment = self.codebook(self.encoder(image))
        again = self.decoder(codes)
        return {"loss": F.mse_loss(again, image) + 0.25 * commitment, "image": again}


@final
class VAE(nn.Module):
    """Reparametrised samples of the user's own randn; the output is a tuple of the terms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.Softplus())
        self.mean, self.log_variance = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


@final
class TiedAutoencoder(nn.Module):
    """The decoder's weights are the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(12, 24), nn.Linear(24, 8)
        self.biases = nn.ParameterList([torch.zeros(24), torch.zeros(12)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.narrow(torch.tanh(self.wide(x))))
        x = F.linear(x, self.narrow.weight.t(), self.biases[0])
        return F.linear(torch.relu(x), self.wide.weight.t(), self.biases[1])
