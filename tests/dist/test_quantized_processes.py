"""Weights that are made of codes and scales over two ranks: trained, gathered, saved, and gone on with."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from coded_tensors import Coded, network
from forked import on_ranks
from safetensors.torch import load_file

import outsize
from outsize.errors import BadOption
from outsize.program.values.wrapper_tensors import plain_parts
from outsize.program.weights.beside import beside_weights
from outsize.train.engine.engine import Engine

pytestmark = pytest.mark.dist
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def engine_of(**options: Any) -> Engine:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.5)

    loss = {"target": X, "loss_fn": F.mse_loss, "microbatches": 2}
    return outsize.parallelize(network(), (X,), optimizer=sgd, **loss, **options)


def trained(root: Path, group: dist.ProcessGroup) -> tuple[list[float], dict[str, Any]]:
    engine = engine_of(stages=2)
    engine.step(X, target=X)
    engine.save(root)
    losses = [float(engine.step(X, target=X).loss) for _ in range(2)]
    state = engine.weights.full_state_dict()
    coded = {name: plain_parts(tensor) for name, tensor in state.items() if isinstance(tensor, Coded)}
    return losses, coded


class Telling(nn.Linear):
    """Names what it saves by what it has, as quanto's layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}{'freed' if self.weight.is_meta else 'weight'}"] = self.weight


class Computing(Telling):
    """Saves a number that it computes of its weights."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}norm"] = self.weight.detach().norm()


def network_of(kind: type[Telling]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(16, 16) for _ in range(3)))


def engine_for(model: nn.Module) -> Engine:
    return outsize.parallelize(model, (X,), target=X, loss_fn=F.mse_loss, microbatches=2, stages=2)


def gathered(kind: type[Telling]) -> tuple[dict[str, Any], bool]:
    engine = engine_for(model := network_of(kind))
    before = [*model.parameters()]
    state = engine.weights.full_state_dict()
    return state, all(p is q for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Telling, Computing])
def test_what_depends_on_the_rank_is_saved_as_of_the_whole_model(tmp_path: Path, kind: type[Telling]) -> None:
    (state, is_untouched), other = on_ranks(tmp_path, 2, lambda group: gathered(kind))
    wanted = network_of(kind).state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in state.items())
    assert is_untouched
    assert other == ({}, True)


def streamed(folder: Path) -> str:
    with pytest.raises(BadOption) as caught:
        engine_for(network_of(Telling)).weights.full_state_dict(to=folder)
    return str(caught.value)


def test_names_that_depend_on_the_rank_are_not_streamed(tmp_path: Path) -> None:
    said = on_ranks(tmp_path, 2, lambda group: streamed(tmp_path / "model"))
    words = "state_dict() of Sequential has other names on rank 1 than on rank 0"
    assert all(words in each and "torch.save(engine.weights.full_state_dict()" in each for each in said)


def test_two_ranks_train_and_save_what_one_process_does(tmp_path: Path) -> None:
    ranks = on_ranks(tmp_path, 2, lambda group: trained(tmp_path / "run", group))
    alone = engine_of(stages=2)
    alone.step(X, target=X)
    losses = [float(alone.step(X, target=X).loss) for _ in range(2)]
    assert [found[0] for found in ranks] == [losses, losses]
    wanted = {n: plain_parts(t) for n, t in network().state_dict().items() if isinstance(t, Coded)}
    assert ranks[0][1].keys() == wanted.keys() == {"2.weight", "4.weight"}
    for name, parts in wanted.items():
        assert all(torch.equal(part, ranks[0][1][name][path]) for path, part in parts.items())
    assert ranks[1][1] == {}
    again = engine_of(stages=1, resume=tmp_path / "run")
    assert [float(again.step(X, target=X).loss) for _ in range(2)] == losses


class Scaled(nn.Linear):
    """int8 codes whose scales are in a dict beside the weight, as HQQ has them, and in the state dict."""

    def __init__(self, width: int, dtype: torch.dtype = torch.int8) -> None:
        super().__init__(width, width, bias=False)
        rows = self.weight.detach().reshape(-1, 8)
        absmax = rows.abs().amax(1)
        codes = (rows / absmax[:, None] * 127).round().to(dtype).reshape(width, width)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.meta = {"absmax": absmax, "mean": torch.tensor(127.0)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        values = self.weight.reshape(-1, 8).float() * (self.meta["absmax"] / self.meta["mean"])[:, None]
        return F.linear(input, values.reshape(self.weight.shape))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.meta["absmax"]
        destination[f"{prefix}weight.mean"] = torch.tensor(self.meta["mean"].item())


def scaled(dtype: torch.dtype = torch.int8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), Scaled(64, dtype))))


def scaled_engine(model: nn.Module, **options: Any) -> Engine:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.5)

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"target": x, "loss_fn": F.mse_loss, "microbatches": 2, **options}
    return outsize.parallelize(model, (x,), optimizer=sgd, **given)


def scales_held(folder: Path | None = None, **options: Any) -> tuple[list[float], dict[str, Any], list[str]]:
    """Losses, the state dict, and the weights whose scales this process has; `folder` gets the state, too."""
    engine = scaled_engine(model := scaled(), **options)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    losses = [float(engine.step(x, target=x).loss) for _ in range(2)]
    held = [each.owner for each in beside_weights(model) if each.key == "absmax" and not each.tensor.is_meta]
    if folder is not None:
        engine.weights.full_state_dict(to=folder)
    return losses, engine.weights.full_state_dict(), held


def test_scales_are_with_the_ranks_that_own_their_weights_and_in_every_saved_state(tmp_path: Path) -> None:
    losses, state, held = scales_held(tmp_path / "alone", stages=1)
    assert held == ["1.weight", "3.weight", "5.weight"]
    ranks = on_ranks(tmp_path, 2, lambda group: scales_held(tmp_path / "both", stages=2))
    assert [found[0] for found in ranks] == [losses, losses]
    owners = [found[2] for found in ranks]
    assert sorted(owners[0] + owners[1]) == held
    assert all(owners)
    assert ranks[0][1].keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in ranks[0][1].items())
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "both")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())


def spread(dtype: torch.dtype, axes: dict[str, int], group: dist.ProcessGroup) -> list[bool]:
    """Whether a replica has the codes and scales of rank 0, which were others on rank 1."""
    model, wanted = scaled(dtype), scaled(dtype)
    if dist.get_rank(group) == 1:
        for each in (
            *beside_weights(model),
            *(layer.weight.data for layer in model if isinstance(layer, Scaled)),
        ):
            (each if isinstance(each, torch.Tensor) else each.tensor).zero_()
    engine = scaled_engine(model, axes={**axes, "others": 1}, microbatches=1)
    engine.step(x := torch.ones(8, 64), target=x)
    state, plain = engine.weights.full_state_dict(), wanted.state_dict()
    kept = [n for n in plain if state and n.startswith(("1.", "3.", "5."))]
    pairs = zip(beside_weights(model), beside_weights(wanted), strict=True)
    return [torch.equal(one.tensor, other.tensor) for one, other in pairs] + [
        torch.equal(state[name].float(), plain[name].float()) for name in kept
    ]


@pytest.mark.parametrize(
    ("axis", "dtype"),
    [("dp_replicate", torch.int8), ("dp_replicate", torch.float8_e4m3fn), ("dp_shard", torch.int8)],
)
def test_replicas_begin_with_the_codes_and_scales_of_the_first(
    tmp_path: Path, axis: str, dtype: torch.dtype
) -> None:
    first, second = on_ranks(tmp_path, 2, partial(spread, dtype, {axis: 2}))
    assert first == [True] * 15
    assert second == [True] * 6


class OnWeight(Scaled):
    """Has its scales in an attribute of the weight, and nowhere else."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        vars(self.weight)["quant_state"] = self.__dict__.pop("meta")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        meta = vars(self.weight)["quant_state"]
        values = self.weight.reshape(-1, 8).float() * (meta["absmax"] / meta["mean"])[:, None]
        return F.linear(input, values.reshape(self.weight.shape))


def losses_on_weights(**options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), OnWeight(64), nn.Linear(64, 64))
    engine = scaled_engine(model, **options)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    return [float(engine.step(x, target=x).loss) for _ in range(2)]


def test_gathered_weights_have_the_scales_that_are_their_attributes(tmp_path: Path) -> None:
    def sharded(group: dist.ProcessGroup) -> list[float]:
        return losses_on_weights(axes={"dp_shard": 2, "others": 1}, microbatches=1)

    assert on_ranks(tmp_path, 2, sharded) == [losses_on_weights(stages=1)] * 2


def refused(group: dist.ProcessGroup) -> str:
    with pytest.raises(BadOption) as caught:
        scaled_engine(scaled(torch.float8_e4m3fn), axes={"dp_shard": 2, "others": 1}, microbatches=1)
    return str(caught.value)


def test_floats_of_eight_bits_are_not_sharded_over_gloo(tmp_path: Path) -> None:
    for said in on_ranks(tmp_path, 2, refused):
        assert "would gather 1.weight, which is of floats of 8 bits, and gloo gathers none" in said
        assert "4,096 bytes" in said
        assert "--stages 2" in said
