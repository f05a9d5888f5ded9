"""Scripts as diffusers has them, by Accelerate: a split UNet with averaged weights, and a DiT with LoRA.

Both sides run the same lines; the plain one calls its model microbatch by microbatch.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import broadcast, broadcast_object_list
from forked import in_forks
from patience import free_port
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outsize
from outsize.errors import BadOption
from outsize.integrations.accelerate import Accelerator

diffusers: Any = pytest.importorskip("diffusers")
BATCH, MICROBATCHES = 4, 2


class InMicrobatches(nn.Module):
    """What a split model computes, by the plain one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> Any:
        parts = zip(*(each.split(BATCH // MICROBATCHES) for each in args), strict=True)
        outputs = []
        for part in parts:
            outputs.append(self.model(*part))
            torch.clear_autocast_cache()  # so that each microbatch is a region of autocast by itself
        return type(outputs[0])(sample=torch.cat([output.sample for output in outputs]))


def unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def dit() -> nn.Module:
    """With LoRA."""
    import peft

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=1, num_layers=3, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0  # of labels, whose draws a split model makes of its own
    model.requires_grad_(False)
    adapters = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    return peft.inject_adapter_in_model(adapters, model)


MODELS: dict[str, Callable[[], nn.Module]] = {"unet": unet, "dit": dit}


def trained(name: str, folder: Path, *, split: bool, precision: str = "no") -> dict[str, Any]:
    """What a training script logs, and the averaged and the last weights."""
    kind = Accelerator if split else accelerate.Accelerator
    accelerator = kind(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    # What the main process alone knows reaches the others.
    is_main = accelerator.is_main_process
    told = [*broadcast_object_list([is_main]), bool(broadcast(torch.tensor(int(is_main))))]
    accelerate.utils.set_seed(0)
    model = MODELS[name]()
    images, labels = torch.randn(22, 1, 8, 8), torch.arange(22) % 10
    more = (labels,) if name == "dit" else ()
    data = TensorDataset(images, *more)
    if split:
        example = (images[:BATCH], torch.ones(BATCH, dtype=torch.long), *(each[:BATCH] for each in more))
        model = outsize.split(model, example, stages=2, microbatches=MICROBATCHES)
    else:
        model = InMicrobatches(model)
    noises = diffusers.DDPMScheduler(num_train_timesteps=100)
    average = diffusers.training_utils.EMAModel(model.parameters(), decay=0.9)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    logs: list[Any] = []
    clip: Callable[..., Any] = accelerator.clip_grad_norm_
    for batch, *others in loader:
        with accelerator.accumulate(model):
            noise = torch.randn_like(batch)
            steps = torch.randint(0, 100, (len(batch),))
            predicted = model(noises.add_noise(batch, noise, steps), steps, *others).sample[:, :1]
            each = nn.functional.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3))
            accelerator.backward(each.mean())
            norm = None
            if accelerator.sync_gradients:
                norm = clip(model.parameters(), 0.5).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
        gathered: Any = accelerator.gather_for_metrics(each.detach())
        logs.append([gathered.tolist(), norm, len(batch)])
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save({key.removeprefix("model."): value for key, value in state.items()}, folder / "state.pt")
    average.copy_to(model.parameters())
    averaged = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save({key.removeprefix("model."): value for key, value in averaged.items()}, folder / "ema.pt")
    return {"logs": logs, "updates": average.optimization_step, "main": is_main, "told": told}


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def same_weights(folder: Path, other: Path) -> bool:
    for name in ("state.pt", "ema.pt"):
        one, two = torch.load(folder / name), torch.load(other / name)
        assert one.keys() == two.keys()
        if not all(torch.equal(one[key], two[key]) for key in one):
            return False
    return True


def made(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@pytest.mark.parametrize(("name", "precision"), [("unet", "no"), ("dit", "no"), ("dit", "bf16")])
@pytest.mark.dist
def test_a_split_model_has_the_bits_of_the_plain_script(name: str, precision: str, tmp_path: Path) -> None:
    """In one process, and over two, each of which draws the same batches."""
    one, two, plain = (made(tmp_path, each) for each in ("one", "two", "plain"))
    expected = trained(name, plain, split=False, precision=precision)
    _reset()
    assert trained(name, one, split=True, precision=precision) == expected
    assert same_weights(one, plain)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        _reset()
        found = trained(name, two, split=True, precision=precision)
        (two / f"found{number}.json").write_text(json.dumps(found))

    in_forks(tmp_path, 2, rank)
    for number in range(2):
        assert json.loads((two / f"found{number}.json").read_text()) == expected | {"main": number == 0}
    assert same_weights(two, plain)


def _reset() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_saved_in_one_process_goes_on(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    split = outsize.split(copy.deepcopy(model), (torch.randn(4, 4),), stages=2, microbatches=2)
    optimizer = torch.optim.AdamW(split.parameters())
    split, optimizer = accelerator.prepare(split, optimizer)
    split(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in split.state_dict().items()}
    accelerator.save_state(str(tmp_path))
    optimizer.step()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(before[name], value) for name, value in split.state_dict().items())
    accelerator._processes = 2
    with pytest.raises(BadOption, match=r"model\.engine\.save"):
        accelerator.save_state(str(tmp_path))
