"""A training script like any other: it learns a piece of its own source, byte by byte. Run it in three ways.

    python examples/05_train_script.py                                # both stages in this process
    outsize run --nproc-per-node 2 examples/05_train_script.py        # one process per stage
    torchrun --nproc-per-node 2 examples/05_train_script.py           # the same

Every run prints the same lines, digit by digit: clipping, dropout and the learning rate's schedule included.
"""

# %%
from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize

CONTEXT, BATCH, STEPS = 32, 16, 40


# %% The model
class ByteModel(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embedding(text) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def next_byte_loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


# %% The data: a piece of the source above
SOURCE = torch.frombuffer(bytearray(inspect.getsource(ByteModel.__init__), "utf-8"), dtype=torch.uint8).long()


def draw(step: int) -> tuple[Tensor, Tensor]:
    """BATCH windows of the source and, for each byte, the one behind it; the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(SOURCE) - CONTEXT, (BATCH,), generator=generator).tolist()
    windows = torch.stack([SOURCE[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


# %% Training
def main() -> None:
    torch.manual_seed(0)
    model = ByteModel()
    text, following = draw(0)
    engine = outsize.parallelize(
        model,
        (text,),
        stages=2,
        microbatches=4,
        loss_fn=next_byte_loss,
        target=following,
        optimizer=make_optimizer,
        clip_norm=1.0,
    )
    assert engine.optimizer is not None
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, STEPS, eta_min=3e-4)
    for step in range(STEPS):
        text, following = draw(step)
        result = engine.step(text, target=following)
        rate.step()
        if engine.rank == 0 and step % 10 == 0:
            print(f"step {step:2}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}")
    evaluated = engine.evaluate(text, target=following)
    if engine.rank == 0:
        print(f"evaluated: loss {evaluated.loss:.4f}")


if __name__ == "__main__":
    main()
