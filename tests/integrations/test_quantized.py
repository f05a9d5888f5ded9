"""Quantized weights and 8-bit states of real packages: checked, counted, saved, and gone on with.

`make test-integrations` installs them; without one of them its cases are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import on_ranks
from torch import nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.program.values.wrapper_tensors import is_wrapper, plain_parts
from outsize.train.engine.engine import Engine

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
QUANTIZED = (2, 4)  # the frozen layers, of 128 x 128 each


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (128, 128, 128, 128, 8)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(dtype)


def of_torchao(config: str, dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torchao: Any = pytest.importorskip("torchao.quantization")
        model = network(dtype)
        for at in QUANTIZED:
            torchao.quantize_(model[at], getattr(torchao, config)(**options))
        return model

    return make


def of_bitsandbytes() -> nn.Module:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    model = network()
    for at in QUANTIZED:
        layer = bitsandbytes.nn.Linear8bitLt(128, 128, has_fp16_weights=False)
        layer.load_state_dict(model[at].state_dict())
        model[at] = layer
    return model.to("cpu")


def of_quanto() -> nn.Module:
    import_transformers()
    quanto: Any = pytest.importorskip("optimum.quanto")
    model = network()
    quanto.quantize(model, weights=quanto.qint8, include=[str(at) for at in QUANTIZED])
    quanto.freeze(model)
    return model


def of_hqq() -> nn.Module:
    hqq: Any = pytest.importorskip("hqq.core.quantize")
    model = network()
    how = hqq.BaseQuantizeConfig(nbits=8, group_size=64)
    for at in QUANTIZED:
        model[at] = hqq.HQQLinear(model[at], how, compute_dtype=torch.float32, device="cpu")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchao int8": of_torchao("Int8WeightOnlyConfig"),
    "torchao fp8": of_torchao("Float8WeightOnlyConfig", torch.bfloat16),
    "torchao int4": of_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "bitsandbytes int8": of_bitsandbytes,
    "quanto int8": of_quanto,
    "hqq 8 bits": of_hqq,
}


def made(name: str) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    """Returns the model with its quantized layers frozen, its input, and the loss."""
    model = MODELS[name]()
    for at in QUANTIZED:
        model.get_submodule(str(at)).requires_grad_(False)
    dtype = next(model.parameters()).dtype
    return model, X.to(dtype), {"target": Y.to(dtype), "loss_fn": F.mse_loss}


@pytest.mark.parametrize("name", MODELS)
def test_a_split_run_has_the_bits_of_the_plain_loop(name: str) -> None:
    model, x, loss = made(name)
    assert outsize.check(model, (x,), **loss, stages=2, microbatches=2).bit_equal


@pytest.mark.parametrize("name", MODELS)
def test_their_bytes_are_those_of_the_codes(name: str) -> None:
    model, x, loss = made(name)
    plain = sum(p.numel() * x.element_size() for p in network().parameters())
    found = outsize.fit(model, (x,), **loss, cluster="1x1GB")
    saved = plain - sum(device.weights_bytes for device in found.devices)
    assert saved > 0.9 * 2 * 128 * 128 * (x.element_size() - 1) - 2 * 128 * 128 / 8


def engine_of(name: str, **options: Any) -> tuple[Engine, torch.Tensor, torch.Tensor]:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    model, x, loss = made(name)
    engine = outsize.parallelize(model, (x,), optimizer=sgd, **loss, stages=2, microbatches=2, **options)
    return engine, x, loss["target"]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_saved_and_goes_on(name: str, tmp_path: Path) -> None:
    engine, x, y = engine_of(name)
    engine.step(x, target=y)
    assert engine.weights.full_state_dict().keys() == engine.model.state_dict().keys()
    engine.save(tmp_path)
    losses = [float(engine.step(x, target=y).loss) for _ in range(2)]
    again, x, y = engine_of(name, resume=tmp_path)
    assert [float(again.step(x, target=y).loss) for _ in range(2)] == losses


def trained(name: str, root: Path | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A step before a checkpoint is saved, and two after; and the plain tensors of the state dict."""
    engine, x, y = engine_of(name)
    engine.step(x, target=y)
    if root is not None:
        engine.save(root)
    losses = [float(engine.step(x, target=y).loss) for _ in range(2)]
    tensors = {n: v for n, v in engine.weights.full_state_dict().items() if isinstance(v, torch.Tensor)}
    inner = {n: plain_parts(v) if is_wrapper(v) else {"": v} for n, v in tensors.items()}
    return losses, {f"{n} {path}": part for n, parts in inner.items() for path, part in parts.items()}


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_save_and_go_on_as_one_process(name: str, tmp_path: Path) -> None:
    losses, state = trained(name, None)
    first, second = on_ranks(tmp_path, 2, lambda group: trained(name, tmp_path / "run"))
    assert first[0] == second[0] == losses
    assert first[1].keys() == state.keys()
    assert all(torch.equal(value, state[n]) for n, value in first[1].items())
    assert not second[1]
    again, x, y = engine_of(name, resume=tmp_path / "run")
    assert [float(again.step(x, target=y).loss) for _ in range(2)] == losses


def losses_of(name: str, **options: Any) -> list[float]:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    model, x, loss = made(name)
    engine = outsize.parallelize(model, (x,), optimizer=sgd, **loss, **options)
    return [float(engine.step(x, target=loss["target"]).loss) for _ in range(3)]


@pytest.mark.parametrize("name", ["torchao fp8", "torchao int8"])
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
def test_two_replicas_train_as_one_process(name: str, axis: str, tmp_path: Path) -> None:
    """Codes of torchao's tensors stay whole where the other weights are sharded."""
    options: dict[str, Any] = {"axes": {axis: 2, "others": 1}, "stages": 1, "microbatches": 1}
    ranks = on_ranks(tmp_path, 2, lambda group: losses_of(name, **options))
    assert ranks == [losses_of(name, stages=1, microbatches=2)] * 2


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_few_bits_are_saved(kind: str, tmp_path: Path) -> None:
    optimizers: Any = pytest.importorskip("torchao.optim")

    def engine(**options: Any) -> Engine:
        return outsize.parallelize(
            network(), (X,), target=Y, loss_fn=F.mse_loss, stages=2, microbatches=2,
            optimizer=lambda parameters: getattr(optimizers, kind)(parameters, lr=0.01), **options,
        )  # fmt: skip

    torch.compiler.set_stance("force_eager")  # the step is compiled, which takes a minute and changes no bit
    try:
        first = engine()
        first.step(X, target=Y)
        first.save(tmp_path)
        losses = [float(first.step(X, target=Y).loss) for _ in range(2)]
        again = engine(resume=tmp_path)
        states = [s for s in again.optimizer.state.values() if "Optim" in type(s["exp_avg"]).__name__]
        assert len(states) >= 3  # those of matrices; smaller weights have plain ones
        assert [float(again.step(X, target=Y).loss) for _ in range(2)] == losses
    finally:
        torch.compiler.set_stance("default")
