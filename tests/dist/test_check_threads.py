"""`check` over processes is bit-equal whatever number of threads the asking process has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize

pytestmark = pytest.mark.dist
ROWS, WIDTH, THREADS = 4096, 64, 3


@pytest.fixture
def three_threads() -> Iterator[None]:
    """More threads than a launcher gives to each of its processes here."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def model() -> nn.Module:
    """LayerNorm's weight gradient is added up in as many parts as there are threads."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def gradient(threads: int, data: torch.Tensor) -> torch.Tensor:
    """The LayerNorm's weight gradient with so many threads."""
    torch.set_num_threads(threads)
    net = model()
    F.mse_loss(net(data), data).backward()
    found = net.get_parameter("1.weight").grad
    assert found is not None
    return found


@pytest.mark.interpreters  # libgomp does not survive a fork with threads
def test_the_threads_of_the_asking_process_do_not_matter(three_threads: None) -> None:
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    if torch.equal(gradient(1, data), gradient(THREADS, data)):
        pytest.skip("here the kernel does not depend on the number of threads")
    verdict = outsize.check(model(), (data,), microbatches=1, loss_fn=F.mse_loss, target=data, processes=True)
    assert verdict.bit_equal, (verdict.first_divergence, verdict.grad_diff)
