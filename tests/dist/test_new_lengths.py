"""Lengths that none had before, where ranks divide a model: its weights, its sequences or its experts.

Each rank follows lengths by itself, and has at each step the bits that it has where every length is recorded;
to the plain loop they are equal but for the order of sums, as everywhere with these axes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from parity_runs import fresh
from torch import Tensor, nn

import outsize
from outsize.run.collectives.tensor_parallel import full_of
from outsize.train.variants import dynamic_shapes, variant
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

pytestmark = pytest.mark.dist

LENGTHS = (12, 8, 10, 6, 11, 9, 7)
WORDS = 40
SAMPLES = (4, 4, 4, 4, 4, 3, 4)
# What DESIGN says of these axes; grouped products, of experts, have no float64.
WITHIN = {"gpt2": 1e-10, "mixtral": 1e-5}
LAYOUTS = {"tp": ({"tp": 2}, "gpt2"), "cp": ({"cp": 2}, "gpt2"), "ep": ({"ep": 2}, "mixtral")}


def batches() -> list[Tensor]:
    """Words of each length; one step has a sample less, which two replicas divide unevenly."""
    draw = torch.Generator().manual_seed(0)
    sizes = zip(SAMPLES, LENGTHS, strict=True)
    return [torch.randint(1, WORDS, size, generator=draw) for size in sizes]


def mask_of(ids: Tensor) -> Tensor:
    """Which words are no padding: all but the last one, so that every microbatch has some."""
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return mask


def made(name: str) -> nn.Module:
    model = fresh(name)
    return model.double() if name == "gpt2" else model


def next_words(output: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plainly_trained(name: str) -> list[Tensor]:
    """The losses of the plain loop."""
    model = made(name)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for ids in batches():
        loss = next_words(model(input_ids=ids, attention_mask=mask_of(ids)), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def trained(name: str, axes: dict[str, int]) -> dict[str, Any]:
    """The losses of this rank, its last weights, and how often it has recorded."""
    recorded, record = [0, 0], variant.record

    def counted(*given: Any) -> Any:
        recorded[given[-1].numbers is not None] += 1
        return record(*given)

    first, *_ = batches()
    replicas = axes.get("ep", 1)
    with patch.object(variant, "record", counted):
        engine = outsize.parallelize(
            made(name),
            (),
            {"input_ids": first, "attention_mask": mask_of(first)},
            target=first,
            loss_fn=next_words,
            stages=1,
            microbatches=2 // replicas,
            axes=axes,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        losses = [
            engine.step(input_ids=ids, attention_mask=mask_of(ids), target=ids).loss for ids in batches()
        ]
    weights = {n: full_of(p.detach()).clone() for n, p in engine.weights.named_parameters()}
    return {"losses": losses, "weights": weights, "recorded": recorded}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_divide_a_model_run_new_lengths(tmp_path: Path, layout: str) -> None:
    axes, name = LAYOUTS[layout]

    def work() -> None:
        world = join()
        torch.set_num_threads(1)
        found = trained(name, axes)
        with patch.object(dynamic_shapes, "_MOST_FAILURES", 0):
            recorded = trained(name, axes)
        torch.save((found, recorded), tmp_path / f"{world.rank}.pt")
        leave(world)

    run_in_forks(2, work)
    expected = plainly_trained(name)
    for rank in range(2):
        found, recorded = torch.load(tmp_path / f"{rank}.pt")
        plain, followed = found["recorded"]
        assert (followed, recorded["recorded"][1]) == (1, 0)
        assert plain < recorded["recorded"][0] - 3
        for loss, other, alone in zip(found["losses"], recorded["losses"], expected, strict=True):
            assert torch.equal(loss, other)
            assert torch.allclose(loss, alone, rtol=WITHIN[name], atol=0)
        for weight, value in recorded["weights"].items():
            assert torch.equal(found["weights"][weight], value), weight
