"""The whole model's state, a rank's part of it, and models that begin on meta; all stages in one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption, BadWeights
from outsize.ir.plan import Plan
from outsize.train.context.options import EngineOptions
from outsize.train.crew.module_view import own_module
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

transformers = import_transformers()

pytestmark = pytest.mark.usefixtures("shared_recordings")
_RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 6, generator=_RANDOM), torch.randint(0, 4, (8,), generator=_RANDOM)
IDS = torch.randint(0, 32, (4, 8), generator=_RANDOM)


class Tied(nn.Module):
    """A norm with statistics, a tied pair, a frozen layer in half precision, a mask that is not saved."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.again.weight = self.first.weight
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def reset_parameters(self) -> None:
        self.mask.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).relu())
        x = self.frozen(x.bfloat16()).float() * self.mask
        return self.last(self.again(x))


def seeded() -> Tied:
    torch.manual_seed(0)
    return Tied()


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def split(model: nn.Module, **options: Any) -> Engine:
    wanted = {"stages": 3, "microbatches": 4, "loss_fn": F.cross_entropy, "target": Y, "optimizer": sgd}
    return outsize.parallelize(model, (X,), **{**wanted, **options})


def step(engine: Engine) -> Tensor:
    return engine.step(X, target=Y).loss


def insist_on_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert [n for n, t in expected.items() if not torch.equal(t, found[n])] == []


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The seeded model's weights in a file."""
    save_file({n: t.clone() for n, t in seeded().state_dict().items()}, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


# -- models on meta ------------------------------------------------------------------------------------


def test_a_model_on_meta_trains_as_one_in_memory(weights: Path) -> None:
    ours, theirs = split(on_meta(), weight_files=weights), split(seeded())
    for _ in range(2):
        assert torch.equal(step(ours), step(theirs))
    insist_on_equal(ours.weights.full_state_dict(), dict(theirs.model.state_dict()))
    assert ours.model.again.weight is ours.model.first.weight
    kinds = [(p.dtype, p.requires_grad) for p in theirs.model.parameters()]
    assert [(p.dtype, p.requires_grad) for p in ours.model.parameters()] == kinds


def test_a_check_with_weights_leaves_the_model_on_meta(weights: Path) -> None:
    model = on_meta()
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": Y, "stages": 3}
    assert outsize.check(model, (X,), weight_files=weights, **options).bit_equal
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(BadOption, match=r"first.weight is on meta .*Next: weight_files='FOLDER"):
        outsize.check(model, (X,), **options)


def test_without_weights_the_first_step_names_the_parameter_or_the_buffer() -> None:
    engine = split(on_meta())
    with pytest.raises(BadOption, match=r"weight first.weight is on meta .*Next: weight_files='FOLDER"):
        step(engine)
    model = seeded()
    model.mask = model.mask.to("meta")
    engine = split(model)
    with pytest.raises(BadOption, match="weight mask is on meta"):
        step(engine)


def test_notes_are_warnings(weights: Path) -> None:
    save_file({**load_file(weights), "ema.decay": torch.ones(1)}, weights)
    with pytest.warns(UserWarning, match="1 names are not the model's: ema.decay"):
        split(on_meta(), weight_files=weights)


def test_weights_are_looked_for_before_anything_is_planned(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"no weights at .*gone"):
        outsize.parallelize(nn.Linear(1, 1), ("no such input",), weight_files=tmp_path / "gone")


def test_a_decision_on_a_buffer_is_made_on_the_loaded_one(tmp_path: Path) -> None:
    class Guarded(nn.Module):
        limit: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)
            self.register_buffer("limit", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * 2 if bool((x[0, 0] > self.limit).item()) else self.a(x))

    torch.manual_seed(0)
    plain, model = Guarded(), Guarded()
    save_file({**plain.state_dict(), "limit": torch.tensor(0.0)}, tmp_path / "model.safetensors")
    model.to("meta")
    model.limit = torch.tensor(9.0)  # the file says 0
    engine = split(model, weight_files=tmp_path, stages=2)
    parts = zip(X.split(2), Y.split(2), strict=True)
    losses = [F.cross_entropy(plain(x), y).detach() * 0.25 for x, y in parts]
    assert len({bool(x[0, 0] > 0) for x in X.split(2)}) == 2
    assert torch.equal(step(engine), losses[0] + losses[1] + losses[2] + losses[3])


# -- the full state --------------------------------------------------------------------------------------


def test_the_full_state_is_the_state_dict_in_copies() -> None:
    engine = split(seeded())
    step(engine)
    found = engine.weights.full_state_dict()
    insist_on_equal(found, dict(engine.model.state_dict()))
    assert found["again.weight"] is found["first.weight"]
    before = {n: t.clone() for n, t in found.items()}
    step(engine)
    insist_on_equal(found, before)
    assert not torch.equal(engine.model.get_buffer("norm.running_mean"), found["norm.running_mean"])


class Joining(nn.Sequential):
    """Joins the state dicts of its parts under names of its own, as TRL's models with a value head do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = self[0].state_dict(*args, **kwargs)
        for name, value in self[1].state_dict(*args, **kwargs).items():
            state[f"head.{name}"] = value
        return state


def test_a_state_dict_that_is_not_made_for_a_destination_is_asked_for_without_one() -> None:
    torch.manual_seed(0)
    engine = split(Joining(nn.Linear(6, 6), nn.Linear(6, 4)), stages=2)
    found = engine.weights.full_state_dict()
    assert list(found) == ["weight", "bias", "head.weight", "head.bias"]
    insist_on_equal(found, dict(engine.model.state_dict()))


def test_saved_files_load_into_plain_torch(tmp_path: Path) -> None:
    engine = split(seeded())
    step(engine)
    assert engine.weights.full_state_dict(to=tmp_path / "new" / "folder") == {}
    model = seeded()
    lacking, unknown = model.load_state_dict(
        load_file(tmp_path / "new/folder/model.safetensors"), strict=False
    )
    assert (lacking, unknown) == (["again.weight"], [])
    insist_on_equal(dict(model.state_dict()), dict(engine.model.state_dict()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2", {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}),
        ("Llama", {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}),
    ],
)
@pytest.mark.sample("Llama")
def test_transformers_and_outsize_read_what_the_other_wrote(tmp_path: Path, name: str, options: Any) -> None:
    heads = {"num_attention_heads": 2} if name == "Llama" else {}
    config = getattr(transformers, f"{name}Config")(**options, **heads, bos_token_id=0, eos_token_id=1)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    with torch.device("meta"):
        empty = kind.from_config(config)
    batch = {"input_ids": IDS, "labels": IDS}
    engine = outsize.parallelize(
        empty, (), batch, stages=2, microbatches=2, optimizer=sgd, weight_files=tmp_path / "theirs"
    )
    insist_on_equal(dict(engine.model.named_buffers()), dict(model.named_buffers()))
    insist_on_equal(engine.weights.full_state_dict(), model.state_dict())
    engine.step(**batch)
    engine.weights.full_state_dict(to=tmp_path / "ours", shard_bytes=5000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    config.save_pretrained(tmp_path / "ours")
    insist_on_equal(kind.from_pretrained(tmp_path / "ours").state_dict(), dict(engine.model.state_dict()))


def test_misuse_of_saving_is_said(tmp_path: Path) -> None:
    engine = split(seeded())
    with pytest.raises(BadOption, match=r"a.safetensors is a file's name"):
        engine.weights.full_state_dict(to=tmp_path / "a.safetensors")
    fresh = make_engine(seeded(), engine.plan, None, EngineOptions(loss_fn=F.cross_entropy))
    for ask in (fresh.weights.full_state_dict, lambda: fresh.weights.module):
        with pytest.raises(BadOption, match="has met no batch"):
            ask()


# -- a rank's module -------------------------------------------------------------------------------------

MINE = {"first.weight", "first.bias", "norm.weight", "norm.bias", "norm.running_mean", "mask"}


def test_in_one_process_the_module_is_the_model() -> None:
    engine = split(seeded())
    assert engine.weights.module is engine.model


def test_the_view_has_the_very_tensors_under_the_users_names() -> None:
    model = seeded()
    view = own_module(model, MINE)
    found = dict(view.named_parameters())
    assert list(found) == ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    assert all(p is model.get_parameter(n) for n, p in found.items())
    assert list(view.state_dict()) == [n for n in model.state_dict() if n in MINE] + ["again.weight"]
    assert dict(view.named_buffers()).keys() == {"norm.running_mean", "mask"}
    assert [type(m).__name__ for m in view.modules()] == [type(m).__name__ for m in model.modules()]
    assert isinstance(view.get_submodule("norm"), nn.BatchNorm1d)


def test_compiled_parametrized_and_empty_modules_have_views() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    model = nn.Sequential(cast(nn.Module, torch.compile(nn.Linear(2, 2))), normed, nn.ModuleList())
    model.register_module("nothing", None)
    view = own_module(model, {"0._orig_mod.bias", "1.bias"})
    assert list(view.state_dict()) == ["0._orig_mod.bias", "1.bias"]
    assert [type(m).__name__ for m in view.modules()] == [type(m).__name__ for m in model.modules()]
    assert view[2] is not model[2]  # pyright: ignore[reportIndexIssue]
    assert list(copy.deepcopy(view).state_dict()) == ["0._orig_mod.bias", "1.bias"]


def test_the_view_loads_what_it_saved() -> None:
    model, other = seeded(), Tied()
    own_module(other, MINE).load_state_dict(own_module(model, MINE).state_dict())
    assert torch.equal(other.first.weight, model.first.weight)
    assert not torch.equal(other.last.weight, model.last.weight)


def test_modes_and_hooks_of_the_view_reach_the_model() -> None:
    model = seeded()
    view = own_module(model, MINE)
    view.get_submodule("norm").eval()
    assert [name for name, m in model.named_modules() if not m.training] == ["norm"]
    view.eval()
    assert not any(m.training for m in (*model.modules(), *view.modules()))
    view.train()
    assert all(m.training for m in (*model.modules(), *view.modules()))
    view.requires_grad_(False)
    assert model.last.weight.requires_grad
    assert not model.first.weight.requires_grad
    view.get_submodule("first").register_forward_hook(lambda *_: None)
    assert len(model.first._forward_hooks) == 1


def test_the_view_cannot_be_called() -> None:
    with pytest.raises(BadOption, match=r"engine.weights.module\(Tied\) .*Next: engine.step"):
        own_module(seeded(), MINE)(X)


def test_averages_of_the_view_follow_its_weights_alone() -> None:
    model = seeded()
    view = own_module(model, MINE)
    average = AveragedModel(view)
    average.update_parameters(view)
    with torch.no_grad():
        model.first.bias.add_(1.0)
    average.update_parameters(view)
    found = dict(average.named_parameters())
    assert len(found) == 4
    assert torch.allclose(found["module.first.bias"], model.first.bias - 0.5)
    assert average.module is not view
    assert copy.deepcopy(view).state_dict().keys() == view.state_dict().keys()


def test_a_plan_file_and_weights_go_together(tmp_path: Path, weights: Path) -> None:
    chosen: Plan = outsize.plan(
        on_meta(), (X,), loss_fn=F.cross_entropy, target=Y, cluster="2xcpu", stages=2, microbatches=2
    )
    options: dict[str, Any] = {"plan": chosen, "loss_fn": F.cross_entropy, "target": Y}
    engine = outsize.parallelize(on_meta(), (X,), weight_files=str(weights), **options)
    assert torch.isfinite(step(engine))
    engine.weights.full_state_dict(to=str(tmp_path / "out"), shard_bytes=100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "again.weight" not in index["weight_map"]
