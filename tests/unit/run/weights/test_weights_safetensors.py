"""Safetensors on disk against the safetensors library, and a model on meta that is loaded from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import Written
from torch import Tensor, nn

from outsize.errors import BadWeights
from outsize.run.weights.load import load_weights
from outsize.run.weights.safetensors import INDEX, SINGLE, WeightFiles
from outsize.run.weights.save import ShardWriter, shards
from outsize.run.weights.source import PIECE_BYTES, TensorPart, copy_weight, have_one_value

CPU = torch.device("cpu")
DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 float8_e4m3fn float8_e5m2"
)


def written(folder: Path, tensors: dict[str, Tensor], limit: int = 10**9) -> Path:
    parts = shards(tensors, limit)
    writer = ShardWriter(folder, parts)
    for number, part in enumerate(parts):
        writer.write(number, iter(part.values()))
    writer.publish()
    return folder


def loaded(model: nn.Module, path: Path, foreign: set[str] | None = None) -> tuple[str, ...]:
    return load_weights(model, WeightFiles(path), CPU, foreign or set())


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = linear()
    save_file(model.state_dict(), tmp_path / SINGLE)
    return model, tmp_path


# -- writing -------------------------------------------------------------------------------------------


def test_every_dtype_shape_and_layout_is_read_back_by_the_library(tmp_path: Path) -> None:
    numbers = torch.arange(6).reshape(2, 3)
    tensors = {name: numbers.to(getattr(torch, name)) for name in DTYPES.split()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.randn(3, 5).T}
    found = load_file(written(tmp_path, tensors) / SINGLE)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        bits, expected = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(bits, expected)
        assert found[name].shape == tensor.shape


def test_conjugates_and_negatives_that_are_views_have_their_values_in_the_file(tmp_path: Path) -> None:
    z = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    tensors = {"conjugate": z.conj(), "negative": z.conj().imag}
    assert tensors["conjugate"].is_conj()
    assert tensors["negative"].is_neg()
    found = load_file(written(tmp_path, tensors) / SINGLE)
    assert torch.equal(found["conjugate"], z.conj().resolve_conj())
    assert torch.equal(found["negative"], torch.tensor([-1.0, -3.0, -5.0, -7.0]))


def test_each_tensor_is_aligned_to_its_own_elements(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64)}
    raw = (written(tmp_path, tensors) / SINGLE).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert int.from_bytes(raw[:8], "little") % 8 == 0
    assert header["b"]["data_offsets"] == [0, 16]
    assert header["__metadata__"] == {"format": "pt"}


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(5)} | {"big": torch.ones(100)}
    parts = shards(tensors, 32)
    assert [list(part) for part in parts] == [["w0", "w1"], ["w2", "w3"], ["w4"], ["big"]]
    written(tmp_path, tensors, 32)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 16 + 400
    assert index["weight_map"]["w4"] == "model-00003-of-00004.safetensors"
    files = {tmp_path / name for name in index["weight_map"].values()}
    assert {*tmp_path.iterdir()} == {*files, tmp_path / INDEX}
    everything = {n: t for file in files for n, t in load_file(file).items()}
    assert all(torch.equal(everything[n], t) for n, t in tensors.items())


def test_what_was_saved_before_goes_and_nothing_else(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.ones(4) for i in range(4)}
    (tmp_path / "config.json").write_text("{}")
    for limit, count in ((16, 4), (32, 2), (1000, 1), (16, 4)):
        written(tmp_path, tensors, limit)
        assert len(list(tmp_path.glob("*.safetensors"))) == count
        assert (tmp_path / INDEX).exists() is (count > 1)
        assert sorted(WeightFiles(tmp_path).names) == sorted(tensors)
    assert (tmp_path / "config.json").exists()


def test_a_save_that_fails_leaves_the_old_weights(tmp_path: Path) -> None:
    written(tmp_path, {"w": torch.ones(4)})
    new = {"w": torch.zeros(4), "v": torch.zeros(4)}

    def broken() -> Iterator[Tensor]:
        yield new["w"]
        raise OSError

    writer = ShardWriter(tmp_path, shards(new, 10**9))
    with pytest.raises(OSError):  # noqa: PT011
        writer.write(0, broken())
    writer.discard()
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE]
    assert torch.equal(load_file(tmp_path / SINGLE)["w"], torch.ones(4))


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"E107.*no torch.complex128, the dtype of w"):
        written(tmp_path, {"w": torch.ones(2, dtype=torch.complex128)})


# -- finding and reading ---------------------------------------------------------------------------------


def test_a_folder_a_file_and_an_index_are_the_same_weights(tmp_path: Path) -> None:
    model = linear()
    written(tmp_path / "one", model.state_dict())
    written(tmp_path / "many", model.state_dict(), 40)
    for path in (tmp_path / "one", tmp_path / "one" / SINGLE, tmp_path / "many", tmp_path / "many" / INDEX):
        found = on_meta(linear)
        assert loaded(found, path) == ()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("gone", r"no weights at .*gone. Next: ls"),
        ("empty", r"no weights in .*; neither model.safetensors nor model.safetensors.index.json is there"),
        (
            "two",
            r"several weights in .*two; a.safetensors, b.safetensors. Next: weight_files= one of these files",
        ),
        ("text.safetensors", r"text.safetensors cannot be read as safetensors"),
        ("list.json", r"list.json is no index of safetensors; KeyError"),
        ("index.json", r"index.json names files that are not there; 1: part.safetensors"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").touch()
    (tmp_path / "text.safetensors").write_text("no header here, sorry")
    (tmp_path / "list.json").write_text('{"names": []}')
    (tmp_path / "index.json").write_text('{"weight_map": {"w": "part.safetensors"}}')
    with pytest.raises(BadWeights, match=said):
        WeightFiles(tmp_path / place)


def test_a_folder_of_another_library_is_read_by_its_only_plain_name(tmp_path: Path) -> None:
    model = linear()
    for name, scale in (("diffusion_pytorch_model", 1.0), ("diffusion_pytorch_model.fp16", 2.0)):
        save_file({n: t * scale for n, t in model.state_dict().items()}, tmp_path / f"{name}.safetensors")
    found = on_meta(linear)
    loaded(found, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


def test_a_stale_index_is_said(tmp_path: Path) -> None:
    written(tmp_path, linear().state_dict(), 40)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["1.weight"] = index["weight_map"]["0.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        BadWeights, match=r"the index says that 1.weight is in model-00001-of-0000\d.safetensors"
    ):
        loaded(on_meta(linear), tmp_path)


# -- a model on meta -----------------------------------------------------------------------------------


def test_foreign_weights_stay_on_meta(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    found = on_meta(linear)
    loaded(found, path, {"0.weight", "0.bias"})
    assert [n for n, p in found.named_parameters() if p.is_meta] == ["0.weight", "0.bias"]
    assert torch.equal(found[1].weight, model[1].weight)  # pyright: ignore[reportIndexIssue]


def test_flags_attributes_and_channels_last_stay(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        model.weight.requires_grad_(False)
        model.weight.decay = 0.5  # pyright: ignore[reportAttributeAccessIssue]
        return model

    model, found = make(), on_meta(make)
    written(tmp_path, dict(model.state_dict()))
    loaded(found, tmp_path)
    assert torch.equal(model.weight, found.weight)
    assert (found.weight.requires_grad, found.bias.requires_grad, found.weight.decay) == (False, True, 0.5)
    assert found.weight.stride() == model.weight.stride()


def test_values_come_in_the_models_dtype_with_a_note(tmp_path: Path) -> None:
    model = linear()
    save_file(model.state_dict(), tmp_path / SINGLE)
    found = on_meta(lambda: linear().bfloat16())
    notes = loaded(found, tmp_path)
    model.bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))
    assert notes == ("4 weights are float32 in the file and were copied into the model's bfloat16",)


def tied() -> nn.Module:
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return Written(lambda self, x: self.head(self.embed(x)), embed=embed, head=head)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_found_under_any_name_and_stays_one(tmp_path: Path, name: str) -> None:
    written(tmp_path, {name: torch.ones(5, 3)})
    found = on_meta(tied)
    assert loaded(found, tmp_path) == ()
    assert found.head.weight is found.embed.weight
    assert torch.equal(found.head.weight, torch.ones(5, 3))


def test_a_tied_weight_with_two_values_is_refused(tmp_path: Path) -> None:
    names = ("embed.weight", "head.weight")
    save_file({name: torch.ones(5, 3) for name in names}, tmp_path / SINGLE)
    assert loaded(on_meta(tied), tmp_path) == ()
    save_file({name: torch.full((5, 3), float(at)) for at, name in enumerate(names)}, tmp_path / SINGLE)
    said = r"embed.weight and head.weight are one weight in the model and differ in"
    with pytest.raises(BadWeights, match=said):
        loaded(on_meta(tied), tmp_path)


def test_an_lstm_computes_with_what_was_loaded(tmp_path: Path) -> None:
    model, found = nn.LSTM(3, 4), on_meta(lambda: nn.LSTM(3, 4))
    written(tmp_path, dict(model.state_dict()))
    loaded(found, tmp_path)
    x = torch.randn(2, 1, 3)
    assert torch.equal(model(x)[0], found(x)[0])


def test_names_that_the_file_lacks_come_with_the_nearest(tmp_path: Path) -> None:
    written(tmp_path, {f"model.{n}": t for n, t in linear().state_dict().items()})
    said = r"4 missing: 0.weight, 0.bias, 1.weight, ...; nearest to the first: model.0.weight"
    with pytest.raises(BadWeights, match=said):
        loaded(on_meta(linear), tmp_path)


def test_names_that_the_model_lacks_are_noted(saved: tuple[nn.Module, Path]) -> None:
    notes = loaded(on_meta(lambda: nn.Sequential(nn.Linear(3, 4))), saved[1])
    assert len(notes) == 1
    assert notes[0].endswith("2 names are not the model's: 1.bias, 1.weight")


def test_another_shape_is_said_with_both(saved: tuple[nn.Module, Path]) -> None:
    wide = on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 9)))
    said = r"1.weight has another shape .*\[2, 4\] in the file, \[9, 4\] in the model; 2 such weights"
    with pytest.raises(BadWeights, match=said):
        loaded(wide, saved[1])


# -- buffers that no file holds --------------------------------------------------------------------------


class Table(nn.Module):
    """A buffer beside a parameter, and somebody who may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum() + self.table


@final
class Resetting(Table):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.table.copy_(torch.arange(4.0))


@final
class Drawing(Table):
    def reset_parameters(self) -> None:
        self.table.normal_()


@final
class Careless(Table):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


@final
class Failing(Table):
    def reset_parameters(self) -> None:
        raise RuntimeError("not today")


@final
class Initialised(nn.Module):
    """In the way of transformers: the model initialises its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Table())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            nn.init.zeros_(module.weight)
            module.table.copy_(torch.arange(4.0))


@final
class FromAbove(nn.Module):
    """In the way of Falcon-H1: a table is made in the turn of the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Table())
        self.config = Guarded(2)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.get_buffer("inner.0.table").copy_(torch.arange(4.0))


@final
@dataclass
class Guarded:
    """A config of transformers that refuses to be read."""

    heads: int

    def __getattribute__(self, name: str) -> Any:
        if name == "heads":
            raise AttributeError("heads vary across layers")
        return super().__getattribute__(name)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Resetting()), Initialised, FromAbove])
def test_a_buffer_is_made_by_its_initialiser_and_the_weights_are_the_files(tmp_path: Path, make: Any) -> None:
    model = make()
    written(tmp_path, model.state_dict())
    found = on_meta(make)
    loaded(found, tmp_path)
    for (name, a), (other, b) in zip(model.named_buffers(), found.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


def test_a_random_buffer_does_not_know_the_layout(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Drawing(), Drawing())

    written(tmp_path, make().state_dict())
    everything, last = on_meta(make), on_meta(make)
    state = torch.get_rng_state()
    loaded(everything, tmp_path)
    torch.rand(3)
    loaded(last, tmp_path, {"0.weight", "0.table"})
    assert last[0].table.is_meta
    assert torch.equal(everything[1].table, last[1].table)
    assert not torch.equal(everything[0].table, everything[1].table)
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Table, "it has neither"), (Careless, "it has neither"), (Failing, "RuntimeError: not today")],
)
def test_a_buffer_that_nobody_writes_is_named(tmp_path: Path, kind: type[nn.Module], why: str) -> None:
    written(tmp_path, {"0.weight": torch.ones(2)})
    said = (
        rf"buffer 0.table is on meta and no file holds it; in {kind.__name__}: .*{why}.*include_buffers=False"
    )
    with pytest.raises(BadWeights, match=said):
        loaded(on_meta(lambda: nn.Sequential(kind())), tmp_path)


def test_buffers_with_values_are_kept_and_persistent_ones_are_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Table())
    state = {**model.state_dict(), "0.running_mean": torch.full((3,), 7.0)}
    written(tmp_path, state)
    found = nn.Sequential(nn.BatchNorm1d(3), Table())
    for module in found:
        for name, parameter in module._parameters.items():
            assert parameter is not None
            module._parameters[name] = nn.Parameter(parameter.to("meta"))
    loaded(found, tmp_path)
    assert torch.equal(found.get_buffer("0.running_mean"), torch.full((3,), 7.0))
    assert torch.equal(found.get_buffer("1.table"), torch.arange(4.0))


# -- in pieces -----------------------------------------------------------------------------------------


@final
class Boxes:
    """Files that write down how large the boxes are that are read of them."""

    def __init__(self, path: Path, *, divided: bool = True) -> None:
        self._files, self._divided = WeightFiles(path), divided
        self.path, self.names, self.notes = path, self._files.names, self._files.notes
        self.bytes: list[int] = []

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def described(self, names: Any) -> dict[str, Tensor]:
        return self._files.described(names)

    def divides(self, name: str) -> bool:
        return self._divided

    def box(self, name: str, offsets: Any = None, sizes: Any = None) -> Tensor:
        found = self._files.box(name, offsets, sizes)
        self.bytes.append(found.numel() * found.element_size())
        return found


ROWS, COLUMNS = 5000, 1024  # 20 MiB


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Path]:
    values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    other = values.clone()
    other[-1, -1] = 0
    few = {"few": torch.ones(3, 4), "scalar": torch.tensor(2.0)}
    folder = tmp_path_factory.mktemp("pieces")
    written(folder, {"weight": values, "again": values.clone(), "other": other, **few})
    return values, folder


def test_a_large_tensor_is_copied_piece_by_piece(large: tuple[Tensor, Path]) -> None:
    values, folder = large
    files, into = Boxes(folder), torch.empty(ROWS, COLUMNS)
    copy_weight(files, "weight", into)
    assert torch.equal(into, values)
    assert sum(files.bytes) == values.numel() * 4
    assert max(files.bytes) <= PIECE_BYTES


def test_a_part_of_a_large_tensor_is_copied_piece_by_piece(large: tuple[Tensor, Path]) -> None:
    values, folder = large
    rows, columns = Boxes(folder), Boxes(folder)
    half = torch.empty(ROWS // 2, COLUMNS, dtype=torch.float64)
    copy_weight(rows, "weight", half, TensorPart(0, ROWS, [(1, 2001), (4500, 5000)]))
    assert torch.equal(half, torch.cat([values[1:2001], values[4500:]]).double())
    wide = torch.empty(ROWS, 700)
    copy_weight(columns, "weight", wide, TensorPart(1, COLUMNS, [(0, 600), (900, 1000)]))
    assert torch.equal(wide, torch.cat([values[:, :600], values[:, 900:1000]], 1))
    assert max(rows.bytes + columns.bytes) <= PIECE_BYTES


def test_what_its_source_does_not_divide_is_read_at_once(large: tuple[Tensor, Path]) -> None:
    values, folder = large
    files, into = Boxes(folder, divided=False), torch.empty(ROWS, COLUMNS)
    copy_weight(files, "weight", into)
    assert torch.equal(into, values)
    assert files.bytes == [values.numel() * 4]


@pytest.mark.parametrize("name", ["few", "scalar"])
def test_a_small_tensor_is_read_at_once(large: tuple[Tensor, Path], name: str) -> None:
    files = Boxes(large[1])
    into = torch.empty_like(files.described([name])[name], device="cpu")
    copy_weight(files, name, into)
    assert torch.equal(into, load_file(large[1] / SINGLE)[name])
    assert len(files.bytes) == 1


def test_tied_names_are_compared_piece_by_piece(large: tuple[Tensor, Path]) -> None:
    files = Boxes(large[1])
    assert have_one_value(files, "weight", "again")
    assert not have_one_value(files, "weight", "other")
    assert not have_one_value(files, "weight", "few")
    assert max(files.bytes[:-2]) <= PIECE_BYTES
