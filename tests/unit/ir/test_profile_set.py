"""Profiles at several sizes: exact at each, straight between two, refused beyond; the file round-trips."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from outsize.errors import BadOption, ModelMismatch
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.profile import Profile, ProfileSet, UnitCost


def cost(name: str, forward_s: float, saved_bytes: int = 0) -> UnitCost:
    return UnitCost(
        name=name,
        forward_s=forward_s,
        backward_input_s=2 * forward_s,
        backward_weight_s=3 * forward_s,
        saved_bytes=saved_bytes,
        workspace_bytes=0,
        flops=0,
        source="measured",
        spread_s=forward_s / 10,
    )


def profile(size: int, *seconds: float) -> Profile:
    units = tuple(cost(f"u{n}", s, 100 * size) for n, s in enumerate(seconds))
    return Profile(fingerprint="f", device="cpu", microbatch_size=size, units=units)


MEASURED = ProfileSet.of("Net", [profile(8, 10.0, 80.0), profile(2, 4.0, 20.0), profile(4, 6.0, 40.0)])


def forwards(size: int) -> list[float]:
    return [u.forward_s for u in MEASURED.at(size).units]


def test_at_a_measured_size_it_is_the_measurement() -> None:
    assert MEASURED.sizes == (2, 4, 8)
    assert [forwards(size) for size in (2, 4, 8)] == [[4.0, 20.0], [6.0, 40.0], [10.0, 80.0]]


def test_between_two_sizes_each_unit_is_linear() -> None:
    assert [forwards(size) for size in (3, 5, 7)] == [[5.0, 30.0], [7.0, 50.0], [9.0, 70.0]]
    found = MEASURED.at(5).units[1]
    assert (found.backward_input_s, found.backward_weight_s, found.saved_bytes) == (100.0, 150.0, 500)
    assert found.spread_s == 8.0  # no smaller than that of the two it lies between
    assert MEASURED.at(5).microbatch_size == 5


@pytest.mark.parametrize("size", [1, 9])
def test_beyond_the_sizes_nothing_is_said(size: int) -> None:
    assert not MEASURED.covers(size)
    with pytest.raises(BadOption, match="measured at 2, 4, 8") as refused:
        MEASURED.at(size)
    wanted = ",".join(map(str, sorted((2, 4, 8, size))))
    assert f"--microbatch-sizes {wanted} " in refused.value.next_step


@pytest.mark.parametrize(
    "profiles",
    [
        (profile(4, 1.0), profile(2, 1.0)),
        (profile(2, 1.0), profile(2, 1.0)),
        (profile(2, 1.0), profile(4, 1.0, 1.0)),
        (profile(2, 1.0), profile(4, 1.0).model_copy(update={"fingerprint": "g"})),
        (profile(2, 1.0), profile(4, 1.0).model_copy(update={"precision": "bf16"})),
        (),
    ],
)
def test_a_set_is_of_one_model_with_ascending_sizes(profiles: tuple[Profile, ...]) -> None:
    with pytest.raises(ValidationError):
        ProfileSet(model="Net", profiles=profiles)


def graph(batch_size: int, fingerprint: str = "f") -> ModelGraph:
    fields = {"kind": "Linear", "parameters": (), "buffer_bytes": 0, "moved_bytes": 0}
    units = tuple(
        Unit(index=n, name=f"u{n}", flops=7, saved_bytes=11, workspace_bytes=13, **fields) for n in range(2)
    )
    return ModelGraph(
        model="Net", fingerprint=fingerprint, batch_size=batch_size, units=units, values=(), parameters=()
    )


def test_bytes_are_the_graph_s_own() -> None:
    found = MEASURED.of_graph(graph(3), "cpu")
    assert [u.forward_s for u in found.units] == [5.0, 30.0]
    assert {(u.flops, u.saved_bytes, u.workspace_bytes) for u in found.units} == {(7, 11, 13)}


def test_another_model_s_profile_is_refused() -> None:
    with pytest.raises(ModelMismatch, match="fingerprint f against other"):
        MEASURED.of_graph(graph(3, "other"), "cpu")


def test_a_cpu_s_times_do_not_hold_on_a_gpu() -> None:
    with pytest.raises(BadOption, match="does not hold for a100-80gb; measured on cpu"):
        MEASURED.of_graph(graph(3), "a100-80gb")


def test_another_precision_is_refused() -> None:
    with pytest.raises(BadOption, match="does not hold for precision bf16-mixed; measured in fp32"):
        MEASURED.of_graph(graph(3), "cpu", "bf16-mixed")


def test_counts_whose_microbatches_it_covers() -> None:
    assert MEASURED.counts([1, 2, 3, 8, 9], 17) == [3, 8, 9]  # microbatches of 17, 9, 6, 3, 2
    assert MEASURED.counts([1, 2], 100) == [1, 2]  # none: `at` will say what is missing


def test_the_file_round_trips(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "profile.json")
    assert ProfileSet.load(tmp_path / "profile.json") == MEASURED


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"version": 2}', b"[1]"])
def test_what_is_no_profile_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(BadOption, match=r"profile\.json is no profile"):
        ProfileSet.load(path)
    with pytest.raises(BadOption, match="No such file"):
        ProfileSet.load(tmp_path / "nowhere.json")
