"""Question: do models of published packages train in two stages with the bits of the plain loop?

    pip install --no-deps PACKAGE==VERSION ...      # those of CASES that are to be tried
    python benchmarks/ecosystem/packages/run.py [NAME ...]      writes results/packages.json

Each case is a model with a batch of eight and a loss. `outsize.check` compares two stages, 1F1B, with the
plain loop over four microbatches: loss, gradients, buffers, and a second batch. A package that is not
installed keeps the row of an earlier run.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import outsize
from outsize.capture.models.imports import import_torchvision
from outsize.errors import OutsizeError

RESULTS: Final = Path(__file__).parent / "results" / "packages.json"
_FOLDERS: Final = re.compile(r"\S*site-packages/")
Case = tuple[nn.Module, tuple[Any, ...], Any, Callable[..., Any]]
CASES: dict[str, tuple[str, Callable[[], Case]]] = {}


def case(package: str, name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Adds a model of a package under a name."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = package, make
        return make

    return add


def squared(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean of squares of the first tensor of an output."""
    first = output[0] if isinstance(output, list | tuple) else output
    return nn.functional.mse_loss(first.float(), target)


def words(logits: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the last dim."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


@case("x-transformers", "decoder of x-transformers")
def _() -> Case:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=3, heads=2, rotary_pos_emb=True, ff_glu=True)
    model = TransformerWrapper(num_tokens=40, max_seq_len=16, attn_layers=layers)
    ids = torch.randint(0, 40, (8, 12))
    return model, (ids,), ids, words


@case("x-transformers", "encoder with memory tokens of x-transformers")
def _() -> Case:
    from x_transformers import Encoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=40, max_seq_len=16, num_memory_tokens=2, attn_layers=Encoder(dim=32, depth=2, heads=2)
    )
    ids = torch.randint(0, 40, (8, 12))
    return model, (ids,), ids, words


@case("vit-pytorch", "ViT of vit_pytorch")
def _() -> Case:
    from vit_pytorch import ViT

    model = ViT(image_size=16, patch_size=4, num_classes=5, dim=32, depth=3, heads=2, mlp_dim=48, dropout=0.1)
    return model, (torch.randn(8, 3, 16, 16),), torch.randint(0, 5, (8,)), nn.functional.cross_entropy


@case("vit-pytorch", "MaxViT of vit_pytorch")
def _() -> Case:
    from vit_pytorch.max_vit import MaxViT

    model = MaxViT(num_classes=5, dim=16, dim_head=8, depth=(1, 1), window_size=2)
    return model, (torch.randn(8, 3, 32, 32),), torch.randint(0, 5, (8,)), nn.functional.cross_entropy


@case("perceiver-pytorch", "Perceiver")
def _() -> Case:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3, num_freq_bands=3, depth=2, max_freq=4.0, num_latents=8, latent_dim=24, num_classes=5
    )
    return model, (torch.randn(8, 8, 8, 3),), torch.randint(0, 5, (8,)), nn.functional.cross_entropy


@case("segmentation-models-pytorch", "U-Net over ResNet-18 of segmentation_models_pytorch")
def _() -> Case:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=3)
    return (
        model,
        (torch.randn(8, 3, 32, 32),),
        torch.randint(0, 3, (8, 32, 32)),
        smp.losses.DiceLoss("multiclass"),
    )


@case("segmentation-models-pytorch", "FPN over MobileNet of segmentation_models_pytorch")
def _() -> Case:
    import segmentation_models_pytorch as smp

    model = smp.FPN("mobilenet_v2", encoder_weights=None, classes=3)
    return model, (torch.randn(8, 3, 64, 64),), torch.randint(0, 3, (8, 64, 64)), nn.functional.cross_entropy


@case("monai", "UNet of MONAI with its DiceCELoss")
def _() -> Case:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), dropout=0.1
    )
    target = torch.randint(0, 2, (8, 1, 16, 16))
    return model, (torch.randn(8, 1, 16, 16),), target, DiceCELoss(to_onehot_y=True, softmax=True)


@case("monai", "SwinUNETR of MONAI")
def _() -> Case:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1))
    return model, (torch.randn(8, 1, 64, 64),), torch.randn(8, 2, 64, 64), squared


@case("torch_geometric", "GCN of PyTorch Geometric on one graph")
def _() -> Case:
    from torch_geometric.nn import GCN

    model = GCN(8, 16, num_layers=3, out_channels=4, dropout=0.1)
    edges = torch.randint(0, 8, (2, 24))
    return model, (torch.randn(8, 8), edges), torch.randint(0, 4, (8,)), nn.functional.cross_entropy


@case("snntorch", "spiking network of snntorch")
def _() -> Case:
    import snntorch as snn

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one = nn.Linear(12, 24), snn.Leaky(beta=0.9)
            self.last, self.two = nn.Linear(24, 4), snn.Leaky(beta=0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two, seen = self.one.init_leaky(), self.two.init_leaky(), []
            for _ in range(4):
                spikes, one = self.one(self.first(x), one)
                spikes, two = self.two(self.last(spikes), two)
                seen.append(two)
            return torch.stack(seen, 1).mean(1)

    return Spiking(), (torch.randn(8, 12),), torch.randint(0, 4, (8,)), nn.functional.cross_entropy


@case("torchdiffeq", "neural ODE of torchdiffeq")
def _() -> Case:
    from torchdiffeq import odeint

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.body(y)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.flow, self.last = nn.Linear(12, 12), Flow(), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(odeint(self.flow, self.first(x), torch.tensor([0.0, 1.0]), method="rk4")[-1])

    return Net(), (torch.randn(8, 12),), torch.randint(0, 4, (8,)), nn.functional.cross_entropy


@case("normflows", "Glow-like flow of normflows")
def _() -> Case:
    import normflows

    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for _ in range(3):
                layers.append(
                    normflows.flows.AffineCouplingBlock(normflows.nets.MLP([1, 16, 2], init_zeros=True))
                )
                layers.append(normflows.flows.Permute(2, mode="swap"))
            self.flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(2), layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -self.flow.log_prob(x)

    return Density(), (torch.randn(8, 2),), torch.zeros(8), lambda output, _: output.mean()


@case("pyro-ppl", "inverse autoregressive flow of Pyro")
def _() -> Case:
    from pyro.nn import AutoRegressiveNN

    model = nn.Sequential(nn.Linear(6, 6), AutoRegressiveNN(6, [12], param_dims=(1,)))
    return model, (torch.randn(8, 6),), torch.randn(8, 6), squared


@case("open_clip_torch", "CLIP of open_clip")
def _() -> Case:
    from open_clip.model import CLIP

    model = CLIP(
        embed_dim=16,
        vision_cfg={"layers": 2, "width": 64, "image_size": 16, "patch_size": 4, "head_width": 32},
        text_cfg={"context_length": 8, "vocab_size": 40, "width": 32, "heads": 2, "layers": 2},
    )
    args = torch.randn(8, 3, 16, 16), torch.randint(1, 40, (8, 8))
    return model, args, torch.zeros(8), lambda output, _: (output[0] * output[1]).sum(1).mean()


@case("efficientnet_pytorch", "EfficientNet of efficientnet_pytorch")
def _() -> Case:
    from efficientnet_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-b0", num_classes=4, image_size=32)
    return model, (torch.randn(8, 3, 32, 32),), torch.randint(0, 4, (8,)), nn.functional.cross_entropy


@case("pytorchcv", "DenseNet of pytorchcv")
def _() -> Case:
    from pytorchcv.model_provider import get_model

    model = get_model("densenet40_k12_cifar10")
    return model, (torch.randn(8, 3, 32, 32),), torch.randint(0, 10, (8,)), nn.functional.cross_entropy


@case("e3nn", "equivariant layers of e3nn")
def _() -> Case:
    from e3nn import o3

    model = nn.Sequential(o3.Linear("4x0e+2x1o", "8x0e+2x1o"), o3.Linear("8x0e+2x1o", "4x0e"))
    return model, (torch.randn(8, 10),), torch.randn(8, 4), squared


@case("pytorch-metric-learning", "ArcFace loss of pytorch_metric_learning")
def _() -> Case:
    from pytorch_metric_learning import losses

    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 8))
    return model, (torch.randn(8, 12),), torch.randint(0, 4, (8,)), losses.ArcFaceLoss(4, 8)


@case("conformer", "Conformer of conformer")
def _() -> Case:
    from conformer import Conformer

    model = Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5)
    return model, (torch.randn(8, 10, 16),), torch.randn(8, 10, 16), squared


@case("denoising-diffusion-pytorch", "Unet of denoising_diffusion_pytorch")
def _() -> Case:
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Unet

    model = Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    return model, (torch.randn(8, 3, 16, 16), torch.randint(0, 100, (8,))), torch.randn(8, 3, 16, 16), squared


@case("gpytorch", "deep kernel features of gpytorch")
def _() -> Case:
    import gpytorch

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
            self.kernel = gpytorch.kernels.RBFKernel()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = self.body(x)
            return self.kernel(features, features).to_dense().sum(-1)

    return Features(), (torch.randn(8, 6),), torch.randn(8), squared


@case("tab-transformer-pytorch", "FT-Transformer of tab_transformer_pytorch")
def _() -> Case:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(categories=(5, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2)
    args = torch.randint(0, 3, (8, 2)), torch.randn(8, 4)
    return model, args, torch.randn(8, 1), squared


@case("kornia", "kornia's augmentation before a network")
def _() -> Case:
    import kornia

    model = nn.Sequential(
        kornia.augmentation.RandomHorizontalFlip(p=0.5),
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    model(torch.rand(8, 3, 12, 12))
    return model, (torch.rand(8, 3, 12, 12),), torch.randint(0, 4, (8,)), nn.functional.cross_entropy


def outcome(make: Callable[[], Case]) -> str:
    """Returns what came out of one case."""
    torch.manual_seed(0)
    try:
        model, args, target, loss = make()
        loss(model(*args), target).backward()
        model.zero_grad()
    except ImportError:
        raise
    except Exception as error:
        return f"theirs: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    try:
        report = outsize.check(model, args, target=target, loss_fn=loss, stages=2, microbatches=4)
    except OutsizeError as error:
        return f"refused: {_FOLDERS.sub('', str(error))[:200]}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    if report.bit_equal:
        return "equal"
    return f"wrong: {report.first_divergence}: loss {report.loss_diff:.1e}, gradients {report.grad_diff:.1e}"


def main(wanted: list[str]) -> None:
    """Runs the cases whose package is here and writes the table."""
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows, versions = (
        old.get("models", {}),
        old.get("versions", {"torch": torch.__version__.partition("+")[0]}),
    )
    for name, (package, make) in CASES.items():
        if wanted and not any(text in name or text == package for text in wanted):
            continue
        try:
            version = importlib.metadata.version(package)
            rows[name] = {"two stages": outcome(make)}
            versions[package] = version
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            print(f"{name}: {error}")
            continue
        print(f"{name} ({package} {version}): {rows[name]['two stages']}", flush=True)
        document = {
            "question": "models of other packages, in two stages",
            "versions": versions,
            "models": rows,
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import_torchvision()  # Some packages import it; beside a CPU build of torch its operators are missing.
    main(sys.argv[1:])
