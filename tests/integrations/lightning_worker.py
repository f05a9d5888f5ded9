"""A user's script for Lightning, plain or split: `lightning_worker.py '{"split": {"stages": 2}}'`.

Rank 0 writes to the file `out` what its logger got, and the checkpoint's weights as one digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.capture.models.imports import import_package

lightning: Any = import_package("lightning.pytorch", extra="lightning")
torchmetrics: Any = import_package("torchmetrics", extra="lightning")
mse = nn.functional.mse_loss
SETTINGS = {"max_epochs": 3, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}


class Kept(lightning.loggers.logger.Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append([step, dict(metrics)])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Losses(lightning.Callback):
    """Keeps what callbacks are given of each batch, and the global step then."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss", 0)  # A manual step returns none.
        self.lines.append([trainer.global_step, float(loss), float(batch[0].sum())])


class Net(lightning.LightningModule):
    """A module with all that is asked of automatic optimization."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.job = job
        middle = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 4))
        self.error = torchmetrics.MeanSquaredError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = mse(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"absolute": (out - y).abs().mean().detach(), "epochs": float(self.current_epoch)})
        return {"loss": loss, "mean": out.mean().detach()} if self.job.get("dict") else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.log("val_error", self.error)
        self.log("val_loss", mse(out, y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", mse(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        rate = self.job.get("rate", 1e-2)
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ReadsNumber(Net):
    """A module whose training_step reads the number of the batch, and a loss in Python."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse(self(batch[0]), batch[1])
        if batch_idx % 2 == 0:
            self.log("even_loss", loss)
        return loss


class KeepsMetric(Net):
    """A module that keeps a metric over an epoch of training, in a method that steps share."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def step(self, batch: Any) -> Any:
        out = self(batch[0])
        self.error(out, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return mse(out, batch[1])


class ReadsLoss(Net):
    """A module whose training_step cannot be recorded."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse(self(batch[0]), batch[1])
        self.log("loss", loss.item(), on_step=True)
        return loss


class TwoOptimizers(Net):
    """Manual optimization of two parts, with clipping."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = mse(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            scheduler.step()
            self.untoggle_optimizer(optimizer)
            self.log("loss", loss, on_step=True)

    def configure_optimizers(self) -> Any:
        parts = self.net[:4].parameters(), self.net[4:].parameters()
        optimizers = [torch.optim.Adam(part, lr=1e-2) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


class Gan(lightning.LightningModule):
    """Two networks that train each other, by hand; `parts` is how plain Lightning divides a batch."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.job, self.automatic_optimization = job, False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
        self.judges = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))])
        self.scale = nn.Parameter(torch.ones(1))
        self.error = torchmetrics.MeanSquaredError()

    def by_parts(self, network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = self.job.get("parts")
        return torch.cat([network(part) for part in x.tensor_split(parts)]) if parts else network(x)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.by_parts(self.generator, z) * self.scale

    def judged(self, x: torch.Tensor, real: bool) -> torch.Tensor:
        score = self.by_parts(self.judges[0], x)
        return nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, noise = batch
        making, judging = self.optimizers()
        self.toggle_optimizer(making)
        made = self(noise)
        self.error(made, x)
        loss = self.judged(made, True)
        self.log_dict({"making": loss, "error": self.error, "spread": made.std()}, on_step=True)
        self.manual_backward(loss)
        self.clip_gradients(making, 0.1, "norm")
        making.step()
        making.zero_grad()
        self.untoggle_optimizer(making)
        self.toggle_optimizer(judging)
        halves = [self.judged(x, True) / 2, self.judged(self(noise).detach(), False) / 2]
        self.log("judging", sum(halves), on_step=True)
        for loss in halves if self.job.get("apart") else [sum(halves)]:
            self.manual_backward(loss)
        self.clip_gradients(judging, 0.1, "norm")
        judging.step()
        judging.zero_grad()
        self.untoggle_optimizer(judging)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        made = self(batch[1])
        self.error(made, batch[0])
        self.log_dict({"val_error": self.error, "val_loss": self.judged(made, True)})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.judged(self(batch[1]), True))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[1])

    def configure_optimizers(self) -> Any:
        making = torch.optim.AdamW([*self.generator.parameters(), self.scale], lr=1e-2)
        return making, torch.optim.SGD(self.judges.parameters(), lr=1e-1, momentum=0.9)


class Turned(nn.Sequential):
    """Layers with a decision on activations, which no recording has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x) if x.sum() > 0 else layer(-x)
        return x


class DecidingGan(Gan):
    """A generator that runs by modules, with the whole batch, beside a judge that is divided."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.generator = Turned(*self.generator)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.generator(z) * self.scale


class Contrasted(Net):
    """A loss over all pairs of a batch, by Lightning's own optimization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.job.get("parts")
        return torch.cat([self.net(part) for part in x.tensor_split(parts)]) if parts else self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self(batch[0]), self(batch[0] + 0.1)
        loss = nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))
        self.log("loss", loss, on_step=True)
        return loss


MODULES = {
    cls.__name__: cls
    for cls in (Net, ReadsNumber, KeepsMetric, ReadsLoss, TwoOptimizers, Gan, DecidingGan, Contrasted)
}


def digest(state: Any) -> str:
    """Returns a digest of all tensors in a tree of dicts and lists, and of its numbers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                found.update(str(key).encode())
                add(each)
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()


def main(job: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", module="lightning")
    folder = Path(job["folder"])
    more: dict[str, Any] = {}
    if "split" in job:
        from outsize.integrations.lightning import OutsizeStrategy

        more["strategy"] = OutsizeStrategy(**job["split"]) if job["split"] else "outsize"
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(28, 8), torch.randn(28, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    held_out = torch.utils.data.DataLoader(data, batch_size=8)
    logger, losses = Kept(), Losses()
    saver = lightning.callbacks.ModelCheckpoint(
        folder / "saved", monitor="val_loss", save_last=True, filename="best"
    )
    callbacks = [losses, saver, lightning.callbacks.LearningRateMonitor("step"), *made_callbacks(job)]
    trainer = lightning.Trainer(
        accelerator="cpu", logger=logger, callbacks=callbacks, log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **{**SETTINGS, **job.get("trainer", {})}, **more,
    )  # fmt: skip
    module = MODULES[job.get("module", "Net")](job)
    trainer.fit(module, loader, held_out, ckpt_path=job.get("resume"))
    tested = trainer.test(module, held_out, verbose=False)
    predicted = trainer.predict(module, held_out)
    if trainer.is_global_zero:
        saved = torch.load(folder / "saved" / "last.ckpt", weights_only=False)
        result = {
            "logs": logger.lines, "losses": losses.lines, "tested": tested, "steps": trainer.global_step,
            "weights": digest(saved["state_dict"]), "states": digest(saved["optimizer_states"]),
            "keys": sorted(saved), "predicted": digest(predicted), "epochs": trainer.current_epoch,
        }  # fmt: skip
        Path(job["out"]).write_text(json.dumps(result))


def made_callbacks(job: dict[str, Any]) -> list[Any]:
    stop = job.get("stop")
    return [lightning.callbacks.EarlyStopping("val_loss", **stop)] if stop else []


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
