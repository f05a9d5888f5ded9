from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outsize.run.transport.wire_layout import HEADER, NOTHING, WireLayout, pack


def cases() -> dict[str, Tensor]:
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    return {
        "contiguous": base,
        "transposed": base.transpose(1, 3),
        "channels_last": base.to(memory_format=torch.channels_last),
        "expanded": base[:1].expand(7, 3, 4, 5),
        "expanded with holes": base[:, :1].expand(2, 7, 4, 5),
        "expanded and permuted": base[:1].expand(6, 3, 4, 5).permute(3, 0, 2, 1),
        "empty": base[:, :0],
        "empty expanded": torch.empty(0).expand(3, 0),
        "zero expanded": torch.empty(1, 4).expand(0, 4),
        "a column": base[..., 2],
        "every second": base[:, :, ::2],
        "rows of a larger one": base[:, 1:2],
        "0-dim": torch.tensor(3.5),
        "0-dim of a row": base[1, 2, 3, 4],
        "size one": torch.ones(1, 5, 1),
        "overlapping": torch.arange(10.0).unfold(0, 4, 1),
        "integers": torch.arange(6).reshape(2, 3).T,
        "booleans": torch.tensor([[True, False, True]]).expand(4, 3),
        "complex": torch.randn(3, 2, dtype=torch.complex64).T,
        "bfloat16": base.to(torch.bfloat16).permute(1, 0, 3, 2),
    }


def sent_and_received(tensor: Tensor) -> Tensor:
    layout = WireLayout.decode(WireLayout.of(tensor).encode())
    assert layout is not None
    received = layout.empty(torch.device("cpu"))
    layout.memory(received).copy_(pack(tensor))
    return received


@pytest.mark.parametrize("name", cases())
def test_values_survive_the_wire(name: str) -> None:
    tensor = cases()[name]
    received = sent_and_received(tensor)
    assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(received, tensor)


KEEPS_STRIDES = ["contiguous", "transposed", "channels_last", "expanded", "0-dim", "size one", "integers"]
KEEPS_STRIDES += ["expanded and permuted", "booleans", "complex", "bfloat16"]


@pytest.mark.parametrize("name", KEEPS_STRIDES)
def test_dense_memory_keeps_its_strides(name: str) -> None:
    tensor = cases()[name]
    assert sent_and_received(tensor).stride() == tensor.stride()


@pytest.mark.parametrize("name", ["a column", "every second", "overlapping", "expanded with holes"])
def test_memory_with_holes_or_overlaps_is_made_dense(name: str) -> None:
    tensor = cases()[name]
    received = sent_and_received(tensor)
    assert received.stride() != tensor.stride()
    assert received.untyped_storage().nbytes() == pack(tensor).numel() * tensor.element_size()


def test_a_slice_of_channels_last_stays_channels_last() -> None:
    tensor = cases()["channels_last"][:, :, 1:3]
    assert tensor.is_contiguous(memory_format=torch.channels_last) is False
    assert sent_and_received(tensor).is_contiguous(memory_format=torch.channels_last)


def test_an_expanded_dimension_travels_once() -> None:
    assert pack(torch.ones(4, 1).expand(4, 1000)).numel() == 4
    assert pack(cases()["expanded"]).numel() == 3 * 4 * 5
    assert pack(cases()["expanded with holes"]).numel() == 2 * 4 * 5


def test_dense_memory_is_sent_as_it_lies_without_a_copy() -> None:
    for name in ("contiguous", "transposed", "channels_last", "expanded"):
        tensor = cases()[name]
        assert pack(tensor).data_ptr() == tensor.data_ptr(), name


def test_no_gradient_has_a_header_of_its_own() -> None:
    assert WireLayout.decode(NOTHING) is None
    assert WireLayout.of(torch.ones(2)).encode().shape == NOTHING.shape == (HEADER,)


def test_two_layouts_are_equal_when_shape_strides_and_type_are() -> None:
    a = torch.ones(2, 3)
    assert WireLayout.of(a) == WireLayout.of(a.clone())
    assert WireLayout.of(a) != WireLayout.of(a.T.contiguous().T)
    assert WireLayout.of(a) != WireLayout.of(a.double())
