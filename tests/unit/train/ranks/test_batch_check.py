"""Which steps compare their batches, and what their texts tell apart."""

from __future__ import annotations

import torch

from outsize.train.batch.batch import Batch
from outsize.train.ranks.batch_check import _texts, is_checked


def test_early_steps_are_compared_and_later_ones_now_and_then() -> None:
    checked = [step for step in range(1025) if is_checked(step)]
    assert checked == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


def texts_of(*tensors: torch.Tensor) -> list[str]:
    return _texts([Batch(tensors, {})])


def test_texts_tell_values_shapes_and_dtypes_apart() -> None:
    x = torch.arange(6.0)
    others = [
        x + 1,
        x.view(2, 3),
        x.double(),
        x.bfloat16(),
        x.flip(0),
        x.int(),
        torch.empty(0),
        torch.tensor(1.0),
    ]
    texts = [texts_of(x)[0], *(texts_of(other)[0] for other in others)]
    assert len(set(texts)) == len(texts)
    assert texts_of(x.clone()) == texts_of(x)


def test_a_view_has_the_text_of_its_values() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert texts_of(x.t()) == texts_of(x.t().contiguous())
    assert texts_of(x.to_sparse()) == texts_of(x)
