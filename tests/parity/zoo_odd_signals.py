"""Odd models on images, fields and rays: reparametrised layers, spectra, capsules, warps, flows.

Images are [n, 3, size, size]; nothing in here knows outsize.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as hooked_spectral_norm

CLASSES = 5


@final
class NormZoo(nn.Module):
    """Spectral norm by hook and parametrised, weight norm, an orthogonal layer, standardised weights."""

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
    """Normalising flow of affine couplings (Dinh et al. 2016, arXiv:1605.08803); its loss inside."""

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
