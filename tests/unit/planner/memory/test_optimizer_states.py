from __future__ import annotations

import weakref
from contextlib import ExitStack
from itertools import chain
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from outsize.errors import BadOption
from outsize.ir.graph import Parameter
from outsize.planner.memory.optimizer_states import (
    MASTER,
    MASTER_FLOAT32_GRADIENTS,
    Precision,
    optimizer_bytes,
    style_of,
)

MAKERS: dict[str, Any] = {
    "sgd": lambda weights, **more: torch.optim.SGD(weights, lr=0.1, **more),
    "momentum": lambda weights, **more: torch.optim.SGD(weights, lr=0.1, momentum=0.9, **more),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}
SHAPES = ((64, 48), (48,), (8, 4, 3, 3), (100, 20), (30, 100), (7,), (500,))


def parameter(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, trainable: bool = True
) -> Parameter:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return Parameter(names=("w",), shape=shape, dtype=name, size_bytes=size_bytes, trainable=trainable)


def stepped(name: str, dtype: torch.dtype, **more: Any) -> Any:
    """An optimizer over SHAPES after its first step, with gradients for the next one."""
    weights = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = MAKERS[name](weights, **more)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [t for t in states if isinstance(t, torch.Tensor)]


class Newborn(TorchDispatchMode):
    """The most bytes that storages made while it is on have at one time."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                self._born(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._died(key, size))  # pyright: ignore[reportArgumentType]
        self.now += size

    def _died(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_what_torch_keeps(name: str, dtype: torch.dtype) -> None:
    kept = sum(t.numel() * t.element_size() for t in tensors_of(stepped(name, dtype)))
    assert kept == sum(optimizer_bytes(name).held(parameter(shape, dtype)).state for shape in SHAPES)


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("style", ["foreach", "loop"])
def test_temporaries_of_a_step_are_those_of_torch(name: str, style: Any) -> None:
    optimizer = stepped(name, torch.float32, foreach=style == "foreach")
    weights = optimizer.param_groups[0]["params"]
    meter = Newborn([*weights, *(w.grad for w in weights), *tensors_of(optimizer)])
    with meter:
        optimizer.step()
    told = optimizer_bytes(name).step_bytes([parameter(s) for s in SHAPES], style)
    # Adafactor's factors have temporaries of rows and columns, a few percent here.
    assert meter.peak == told if name != "adafactor" else 0.96 * meter.peak <= told <= meter.peak


class Accesses(TorchDispatchMode):
    """Elements of whole tensors that operations read and write while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        read = {id(tensor): tensor for tensor in tree_leaves((args, kwargs))}
        written = [
            tree_leaves(value)
            for argument, value in zip(op._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        made = [] if op._schema.is_mutable else tree_leaves(out)
        self.elements += sum(map(self._size, (*read.values(), *chain.from_iterable(written), *made)))
        return out

    def _size(self, value: Any) -> int:
        return value.numel() if isinstance(value, torch.Tensor) and value.ndim else 0


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_foreach_step_moves_what_its_operations_access(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = MAKERS[name]([weight], foreach=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with Accesses() as counted:
        optimizer.step()
    told = optimizer_bytes(name).moved_per_gradient([parameter((256, 256))], "foreach")
    # Adafactor's rows and columns are a percent of the whole tensors.
    assert counted.elements / weight.numel() == pytest.approx(told, rel=0.02 if name == "adafactor" else 0)


MATRICES = ((256, 512), (512, 256), (256, 256))


def muon_step(shape: tuple[int, ...], *modes: Any) -> torch.optim.Optimizer:
    """Muon of torch after its second step, which runs under these modes."""
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.Muon([weight], lr=0.1)
    for counted in ((), modes):
        weight.grad = torch.randn(shape)
        with ExitStack() as stack:
            for mode in counted:
                stack.enter_context(mode)
            optimizer.step()
    return optimizer


class ElementwiseAccesses(Accesses):
    """The same without views, and without products, whose seconds follow from their FLOPs."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if op.overloadpacket in (aten.mm, aten.addmm, aten.t, aten.permute):
            return op(*args, **(kwargs or {}))
        return super().__torch_dispatch__(op, types, args, kwargs)


@pytest.mark.parametrize("shape", MATRICES)
def test_muon_is_counted_as_torch_runs_it(shape: tuple[int, int]) -> None:
    flops, moved, muon = FlopCounterMode(display=False), ElementwiseAccesses(), optimizer_bytes("muon")
    optimizer, matrix = muon_step(shape, flops, moved), parameter(shape)
    assert sum(t.numel() * 4 for t in tensors_of(optimizer)) == muon.held(matrix).state
    assert flops.get_total_flops() == muon.product_flops(matrix)
    told = muon.moved_per_gradient([matrix], "foreach")
    assert moved.elements / matrix.numel == pytest.approx(told, rel=0.02)
    weight = optimizer.param_groups[0]["params"][0]
    meter = Newborn([weight, weight.grad, *tensors_of(optimizer)])
    with meter:
        optimizer.step()
    assert meter.peak == muon.step_bytes([matrix], "loop") == muon.step_bytes([matrix], "foreach")


def test_muon_leaves_lookups_and_the_last_layer_to_adamw() -> None:
    muon, adamw = optimizer_bytes("muon"), optimizer_bytes("adamw")
    outer = parameter((100, 64)).model_copy(update={"outer": True})
    for other in (outer, parameter((64,)), parameter((8, 4, 3, 3))):
        assert muon.held(other) == adamw.held(other)
        assert muon.product_flops(other) == 0.0
        assert muon.exchanged_bytes(other) == 0
    experts = parameter((4, 32, 64)).model_copy(update={"experts": 4})
    assert muon.product_flops(experts) == 4 * muon.product_flops(parameter((32, 64)))
    both = [parameter((64, 64)), outer]
    assert muon.step_bytes(both, "foreach") == max(muon.tensor_bytes(both[0]), outer.size_bytes)


def test_owners_of_whole_tensors_share_states_and_products() -> None:
    """Two tensor-parallel ranks have halves of a matrix; the factors of its halves would be others."""
    whole = parameter((64, 48))
    half = whole.model_copy(
        update={"shape": (32 * 48,), "size_bytes": whole.size_bytes // 2, "whole": (64, 48)}
    )
    for name in ("adafactor", "muon", "soap", "adam8bit"):
        optimizer = optimizer_bytes(name)
        assert optimizer.held(half).state == optimizer.held(whole).state // 2
        assert optimizer.product_flops(half) == optimizer.product_flops(whole) / 2
        assert optimizer.exchanged_bytes(half) == 3 * whole.size_bytes // 2
        assert optimizer.tensor_bytes(half) >= 2 * whole.size_bytes
    adamw = optimizer_bytes("adamw")
    assert adamw.exchanged_bytes(half) == adamw.owner_bytes(half) == 0
    assert adamw.held(half) == adamw.held(parameter((32, 48)))


def test_a_fused_step_moves_each_tensor_once() -> None:
    adamw = optimizer_bytes("adamw")
    weights = [parameter((1000,)), parameter((9,), trainable=False)]
    # Gradient, weight and two moments are read, weight and moments written; a step counter of 4 bytes, too.
    assert adamw.moved_per_gradient(weights, "fused") == pytest.approx(7 + 2 * 4 / 4000)
    master = optimizer_bytes("adamw", MASTER)
    # A gradient of 2 bytes; master copy and moments, 4 each, there and back; the weight, 2, is written.
    assert master.moved_per_gradient([parameter((1000,), torch.bfloat16)], "fused") * 2 == pytest.approx(
        2 + 2 * 12 + 2 + 8 / 1000
    )
    assert adamw.moved_per_gradient([parameter((9,), trainable=False)], "fused") == 0.0
    assert optimizer_bytes("adam8bit").moved_per_gradient([parameter((10_000,))], "foreach") < 5


def test_torch_updates_in_lists_on_cuda_and_one_by_one_on_a_cpu() -> None:
    weights: list[torch.Tensor] = [torch.nn.Parameter(torch.ones(3))]
    _, foreach = _default_to_fused_or_foreach(weights, differentiable=False)
    assert foreach == (style_of("cpu") == "foreach")
    assert "cuda" in _get_foreach_kernels_supported_devices()
    assert style_of("h100-80gb") == "foreach"


def test_sixteen_bytes_per_parameter() -> None:
    """ZeRO, sec. 3.1: 2 + 2 + 4 + 4 + 4; 7 B parameters take 112 GB."""
    weight = parameter((70_000, 100_000))
    held = optimizer_bytes("adamw", MASTER).held(weight)
    assert (held.weight, held.gradient, held.master) == (14e9, 14e9, 28e9)
    assert held.total_bytes == 112e9 + 4
    assert optimizer_bytes("adamw", MASTER_FLOAT32_GRADIENTS).held(weight).total_bytes == 18 * 7e9 + 4
    assert optimizer_bytes("adamw").held(weight).total_bytes == 16 * 7e9 + 4  # plain float32: 4 + 4 + 8
    assert optimizer_bytes("adamw", Precision(parameter="bfloat16")).held(weight).total_bytes == 8 * 7e9 + 4


def test_eight_bit_moments_have_a_scale_per_block() -> None:
    held = optimizer_bytes("adam8bit", MASTER).held(parameter((64, 64)))
    assert held.state == 2 * (4096 + 4 * 16)
    assert optimizer_bytes("adam8bit").held(parameter((100,))).state == 2 * 400


def test_a_frozen_parameter_has_no_gradient_master_or_state() -> None:
    frozen = parameter((10, 10), trainable=False)
    held = optimizer_bytes("adamw", MASTER).held(frozen)
    assert held.total_bytes == held.weight == 200
    assert optimizer_bytes("adamw").step_bytes([frozen], "foreach") == 0


def test_an_unknown_optimizer_names_the_known_ones() -> None:
    known = "known: sgd, momentum, adam, adamw, adafactor, adam8bit, muon, soap"
    with pytest.raises(BadOption, match=rf"'lion' is not known; {known}\. Next:"):
        optimizer_bytes("lion")
