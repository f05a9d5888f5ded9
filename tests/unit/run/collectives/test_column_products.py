"""Products with their collective in one node: bits of separate nodes, and the order of what is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.calls import ColumnProduct
from outsize.run.collectives.tensor_parallel import TensorParallelGroup

WIDTH, SIZES = 6, (4, 8, 2)


@pytest.fixture
def group() -> Iterator[TensorParallelGroup]:
    """Rank 0 of two, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield TensorParallelGroup(init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()


def separate(
    group: TensorParallelGroup, x: Tensor, share: Share | None, products: tuple[ColumnProduct, ...]
) -> tuple[Tensor, ...]:
    """The same by an entered value and torch's own products."""
    entered = group.enter(x) if share is None else group.collect(x, share)
    return entered, *(functional.linear(entered, w.t() if turned else w, b) for w, b, turned in products)


Ways = Callable[..., tuple[Tensor, ...]]


def drawn(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=requires_grad
    )


def products_of(turned: bool, trained: bool = True) -> tuple[ColumnProduct, ...]:
    """Three products; the second has no bias, and with `trained` False the first weight is frozen."""
    made = list[ColumnProduct]()
    for at, size in enumerate(SIZES):
        weight = drawn(*((WIDTH, size) if turned else (size, WIDTH)), requires_grad=trained or at > 0)
        made.append((weight, None if at == 1 else drawn(size), turned))
    return tuple(made)


def found(
    way: Ways, group: TensorParallelGroup, share: Share | None, products: tuple[ColumnProduct, ...]
) -> list[Tensor]:
    """Values, and the gradients of a loss that reads the last product late and the entered value, too."""
    x = drawn(2, 5, WIDTH)
    entered, first, second, third = way(group, x * 1, share, products)
    loss = first.sin().sum() * second.sum() + third.square().sum() + (entered * 0.3).cos().sum()
    wanted = [x, *(t for w, b, _ in products for t in (w, b) if t is not None and t.requires_grad)]
    return [entered, first, second, third, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("share", [None, Share(1, (10,)), Share(0, (4,)), Share(1, (9,))], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_values_and_gradients_have_the_bits_of_separate_products(
    group: TensorParallelGroup, share: Share | None, turned: bool, autocast: bool, trained: bool
) -> None:
    answers = list[list[Tensor]]()
    for way in (separate, TensorParallelGroup.columns):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            answers.append(found(way, group, share, products_of(turned, trained)))
    assert len(answers[0]) == len(answers[1])
    assert all(map(torch.equal, *answers))
    assert [t.dtype for t in answers[0]] == [t.dtype for t in answers[1]]


@pytest.mark.parametrize("trained", [True, False])
def test_a_gathered_value_is_saved_as_the_shard_that_it_was(
    group: TensorParallelGroup, trained: bool
) -> None:
    """Ten tokens of two samples are gathered, of which this rank has five; frozen products need none."""
    x, saved = drawn(2, 5, WIDTH), list[Tensor]()
    weights = [w.detach().requires_grad_(trained) for w, *_ in products_of(False)]
    products = tuple((weight, None, False) for weight in weights)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        entered, *_ = group.columns(x * 1, Share(1, (10,)), products)
    assert entered.shape == (2, 10, WIDTH)
    known = {weight.data_ptr() for weight in weights}
    kept = [t.shape for t in saved if t.data_ptr() not in known]
    assert kept == [(2, 5, WIDTH)] * trained


@pytest.mark.parametrize("share", [None, Share(1, (10,))], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_second_derivatives_are_those_of_separate_products(
    group: TensorParallelGroup, autocast: bool, share: Share | None
) -> None:
    answers = list[tuple[Tensor, ...]]()
    for way in (separate, TensorParallelGroup.columns):
        products, x = products_of(False), drawn(2, 5, WIDTH)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            _, *outs = way(group, x * 1, share, products)
        (slope,) = torch.autograd.grad(sum(out.sin().sum() for out in outs), x, create_graph=True)
        weights = [w for w, _, _ in products]
        answers.append((slope, *torch.autograd.grad(slope.square().sum(), [x, *weights])))
    # Under autocast the value is cast once, and gradients of gradients are added before they are cast back.
    within = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    assert all(torch.allclose(*pair, **within) for pair in zip(*answers, strict=True))


@pytest.mark.parametrize("share", [None, Share(1, (10,))], ids=str)
def test_the_weights_gradients_are_computed_while_the_inputs_is_sent(
    group: TensorParallelGroup, share: Share | None
) -> None:
    said = list[str]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                said.append("product")
            return func(*args, **(kwargs or {}))

    class Work:
        def wait(self) -> None:
            said.append("wait")

    def send(*_: Any, async_op: bool = False, **__: Any) -> Work:
        assert async_op
        said.append("send")
        return Work()

    _, *outs = group.columns(drawn(2, 5, WIDTH) * 1, share, products_of(False))
    name = "all_reduce" if share is None else "reduce_scatter_single"
    name = name if hasattr(dist, name) else "reduce_scatter_tensor"
    with patch.object(dist, name, send), Watch():
        sum(out.sum() for out in outs).backward()
    assert said == ["product"] * 3 + ["send"] + ["product"] * 3 + ["wait"]


def test_a_value_of_which_no_product_has_a_gradient_is_sent_as_it_is(group: TensorParallelGroup) -> None:
    x = drawn(2, 5, WIDTH)
    entered, *_ = group.columns(x * 1, None, products_of(False))
    given = torch.ones_like(entered)
    (slope,) = torch.autograd.grad(entered, x, given)
    assert torch.equal(slope, given)
    assert group.collectives.sent == {"all_reduce": given.nbytes}


def test_nothing_is_kept_for_weights_that_are_frozen(group: TensorParallelGroup) -> None:
    products = tuple((drawn(size, WIDTH, requires_grad=False), None, False) for size in SIZES)
    _, first, *_ = group.columns(drawn(2, 5, WIDTH) * 1, None, products)
    node: Any = first.grad_fn
    assert node.saved_tensors[0] is None
