"""Odd models on images and features: U-Nets, autoencoders, codebooks, transforms, reparametrised layers.

Images are [n, 3, size, size]; nothing in here knows outsize.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as hooked_spectral_norm

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
        self.layers = nn.ModuleList([nn.Linear(12, 24), nn.Linear(24, 8)])
        self.biases = nn.ParameterList([torch.zeros(24), torch.zeros(12)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer, bias in zip(reversed(self.layers), self.biases, strict=True):
            x = F.linear(x, layer.weight.t(), bias)
        return x


@final
class NormZoo(nn.Module):
    """Spectral norm by hook and by parametrisation, weight norm, an orthogonal layer, standardised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = hooked_spectral_norm(nn.Conv2d(3, 8, 3))
        self.spectral = parametrizations.spectral_norm(nn.Conv2d(8, 8, 3))
        self.weighted = parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
        self.standard = nn.Conv2d(8, 8, 3)
        self.orthogonal = parametrizations.orthogonal(nn.Linear(8, 8))
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = F.leaky_relu(self.weighted(F.leaky_relu(self.spectral(F.leaky_relu(self.hooked(image))))))
        weight = self.standard.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (
            weight.std((1, 2, 3), keepdim=True) + 1e-5
        )
        x = F.conv2d(x, weight, self.standard.bias)
        return self.classifier(self.orthogonal(x.amax((2, 3))))


class SpectralConv(nn.Module):
    """Multiplies the lowest Fourier modes by complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low = spectrum[..., : self.modes, : self.modes]
        out[..., : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:])


@final
class FourierOperator(nn.Module):
    """Fourier neural operator (Li et al. 2020, arXiv:2010.08895)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(8, 4) for _ in range(3))
        self.local = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, field: Tensor) -> Tensor:
        x = self.lift(field)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


@final
class Capsules(nn.Module):
    """Dynamic routing between capsules (Sabour et al. 2017, arXiv:1710.09829)."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Conv2d(3, 16, 9, 8)
        self.votes = nn.Parameter(0.1 * torch.randn(36, CLASSES, 4, 6))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True)
        return x * norm / ((1 + norm) * (norm + 1e-8).sqrt())

    def forward(self, image: Tensor) -> Tensor:
        capsules = self.squash(self.primary(image).flatten(2).mT.reshape(len(image), -1, 4))
        votes = torch.einsum("bic,iocd->biod", capsules, self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        out = votes.sum(1)
        for _ in range(3):
            out = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes.detach() * out[:, None].detach()).sum(-1)
        return out.norm(dim=-1)


@final
class SpatialTransformer(nn.Module):
    """Warps its input by a predicted affine map (Jaderberg et al. 2015, arXiv:1506.02025)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(3, 8, 7, 4), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.theta = nn.Linear(8, 6)
        nn.init.zeros_(self.theta.weight)
        self.theta.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.PReLU(), nn.Flatten()
        )
        self.classifier = nn.LazyLinear(CLASSES)
        self.classifier(torch.zeros(1, 8 * 14 * 14))

    def forward(self, image: Tensor) -> Tensor:
        grid = F.affine_grid(
            self.theta(self.locate(image)).view(-1, 2, 3), list(image.shape), align_corners=False
        )
        return self.classifier(self.features(F.grid_sample(image, grid, align_corners=False)))


@final
class DenseConcat(nn.Module):
    """Each layer sees all earlier maps; pieces are changed in place on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(5))
        self.classifier = nn.Linear(23, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        maps = [image.clone()]
        maps[0][:, 0].mul_(0.5)
        for layer in self.layers:
            new = layer(torch.cat(maps, 1))
            new[:, ::2] += 1.0
            maps.append(new.clamp_(-1, 1))
        x = torch.cat(maps, 1).mean((2, 3))
        x.masked_fill_(x < -0.9, 0.0)
        return self.classifier(x)


@final
class CouplingFlow(nn.Module):
    """Normalising flow of affine couplings (Dinh et al. 2016, arXiv:1605.08803); returns its likelihood loss."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12)) for _ in range(4)
        )
        self.prior = nn.ParameterDict({"mean": torch.zeros(12), "log_std": torch.zeros(12)})

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.tensor_split(2, dim=-1)
            scale, shift = net(a).chunk(2, -1)
            scale = torch.tanh(scale)
            x, logdet = torch.cat([b * scale.exp() + shift, a], -1), logdet + scale.sum(-1)
        prior = torch.distributions.Normal(self.prior["mean"], self.prior["log_std"].exp())
        return -(prior.log_prob(x).sum(-1) + logdet).mean()


@final
class RadianceField(nn.Module):
    """A NeRF-like renderer: sine features of points along rays, densities composed by cumprod."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3 * 9, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.density, self.colour = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(1, 4, 12) + torch.rand(len(origin), 12) * 0.2
        points = origin[:, None] + direction[:, None] * depth[..., None]
        waves = [f(points * 2.0**i) for i in range(4) for f in (torch.sin, torch.cos)]
        features = self.trunk(torch.cat([points, *waves], -1))
        alpha = 1 - torch.exp(-F.softplus(self.density(features)).squeeze(-1) * 0.25)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * through)[..., None] * self.colour(features).sigmoid()).sum(1)
