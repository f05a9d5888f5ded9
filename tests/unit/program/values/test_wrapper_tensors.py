"""Tensors that are made of others are counted, taken apart and put together, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coded_tensors import Coded, coded, network
from safetensors.torch import save_file
from torch import Tensor

import outsize
from outsize.errors import BadOption, BadWeights
from outsize.program.values.wrapper_tensors import WrapperStructure, is_wrapper, plain_parts, stored_bytes
from outsize.run.weights.freed import freed, parts_of, structure_of
from outsize.run.weights.ownership import like
from outsize.train.checkpoint.plain_values import read, written
from outsize.train.engine.engine import Engine

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
LOSS: dict[str, Any] = {"target": X, "loss_fn": F.mse_loss, "stages": 2, "microbatches": 2}


def same(one: Tensor, other: Tensor) -> bool:
    pairs = plain_parts(one), plain_parts(other)
    return type(one) is type(other) and all(
        torch.equal(part, pairs[1][path]) for path, part in pairs[0].items()
    )


def test_a_tensor_is_taken_apart_and_put_together() -> None:
    tensor = coded(X)
    parts, structure = plain_parts(tensor), WrapperStructure.of(tensor)
    assert list(parts) == ["codes", "scale"]
    assert stored_bytes(tensor) == X.numel() + 8 * 4
    assert {path: twin.shape for path, twin in structure.twins().items()} == {
        p: t.shape for p, t in parts.items()
    }
    assert same(structure.built(parts), tensor)
    assert plain_parts(X) == {"": X}
    assert (is_wrapper(tensor), is_wrapper(X), is_wrapper(torch.nn.Parameter(X))) == (True, False, False)


def test_a_freed_one_holds_no_values_and_knows_its_parts() -> None:
    weight = torch.nn.Parameter(coded(X), requires_grad=False)
    stand_in = freed(weight, "w", "rank 1", torch.device("cpu"))
    assert (stand_in.shape, stand_in.dtype, stand_in.is_meta) == (X.shape, torch.float32, True)
    assert not any(isinstance(value, Tensor) for value in vars(stand_in).values())
    assert {path: (part.shape, part.dtype, part.is_meta) for path, part in parts_of(stand_in).items()} == {
        "codes": (X.shape, torch.int8, True),
        "scale": (torch.Size((8, 1)), torch.float32, True),
    }
    assert structure_of(stand_in) is not None


def test_attributes_stay_and_parts_are_those_of_the_new_values() -> None:
    old, new = torch.nn.Parameter(coded(X), requires_grad=False), coded(X * 2)
    old.decay = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    made = like(old, new)
    assert vars(made)["decay"] == 0.5
    assert same(made.detach(), new)


def test_plain_values_hold_one_and_classes_are_not_imported_for_it() -> None:
    tensors = dict[str, Tensor]()
    facts = written({"exp_avg": coded(X)}, "state", tensors)
    assert all(type(tensor) is Tensor for tensor in tensors.values())
    assert same(read(facts, tensors.__getitem__)["exp_avg"], coded(X))
    facts["exp_avg"]["$wrapper"]["class"] = "this:Sensor"
    with pytest.raises(
        BadOption, match=r"a tensor of the class this\.Sensor, which this process does not know"
    ):
        read(facts, tensors.__getitem__)


def engine_of(**options: Any) -> Engine:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.5)

    return outsize.parallelize(network(), (X,), optimizer=sgd, **LOSS, **options)


def test_a_model_with_such_weights_is_checked_counted_and_gathered() -> None:
    assert outsize.check(network(), (X,), **LOSS).bit_equal
    graph = outsize.capture(network(), (X,), loss_fn=F.mse_loss, target=X)
    assert sum(p.size_bytes for p in graph.parameters) == 4 * 64 + 2 * 16 * 16 * 4 + 2 * (16 * 16 + 16 * 4)
    state = engine_of().weights.full_state_dict()
    assert same(state["2.weight"], network().state_dict()["2.weight"])
    assert isinstance(state["2.weight"], Coded)


def test_a_run_goes_on_with_them(tmp_path: Path) -> None:
    engine = engine_of()
    engine.step(X, target=X)
    engine.save(tmp_path)
    losses = [engine.step(X, target=X).loss for _ in range(2)]
    again = engine_of(resume=tmp_path)
    assert [again.step(X, target=X).loss for _ in range(2)] == losses


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        BadWeights, match=r"E107.*2.weight is a Coded, which safetensors does not hold.*2 such"
    ):
        engine_of().weights.full_state_dict(to=tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_files_are_not_read_into_them(tmp_path: Path) -> None:
    values = {name: torch.zeros(tensor.shape) for name, tensor in network().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"2.weight is quantized in the model \(Coded\)"):
        engine_of(weight_files=tmp_path)
