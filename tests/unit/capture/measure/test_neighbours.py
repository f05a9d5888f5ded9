"""Neighbours that compute on other cores while units are timed: they work, end, and change nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outsize.capture.graph.by_modules import capture_model
from outsize.capture.measure import units
from outsize.capture.measure.neighbours import Lap, neighbours
from outsize.capture.measure.units import UnitTimingOptions, measure_units
from outsize.ir.cluster import parse_cluster
from outsize.train.measure.units import how_on


def marks(folder: Path) -> Lap:
    """Each lap leaves a line in the file of its process."""

    def lap() -> None:
        with (folder / str(os.getpid())).open("a") as file:
            file.write(f"{sorted(os.sched_getaffinity(0))}\n")
        time.sleep(0.01)

    return lap


def test_neighbours_do_laps_on_their_cores_and_end(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    with neighbours(lambda: marks(tmp_path), cores) as count:
        assert count == len(cores)
        before = {path.name: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
        time.sleep(0.2)
    after = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert set(after) == set(before) != {str(os.getpid())}
    assert all(len(lines) > before[name] >= 1 for name, lines in after.items())
    assert sorted(lines[0] for lines in after.values()) == sorted(f"[{core}]" for core in cores)
    for name in after:
        with pytest.raises(ProcessLookupError):
            os.kill(int(name), 0)


def test_a_neighbour_that_fails_is_not_counted() -> None:
    def fails() -> Lap:
        raise RuntimeError("no room")

    with neighbours(fails, [min(os.sched_getaffinity(0))]) as count:
        assert count == 0


def test_units_are_timed_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.zeros(4, 8)
    captured = capture_model(model, (x,), {}, lambda out: out.sum(), (), 4)
    weights, asked = [p.data_ptr() for p in model.parameters()], list[list[int]]()

    def counted(lap_of: Callable[[], Lap], cores: Sequence[int]) -> Any:
        asked.append(list(cores))
        return neighbours(lap_of, cores)

    monkeypatch.setattr(units, "neighbours", counted)
    profile = measure_units(captured, model, [x], UnitTimingOptions(repeats=1, beside=1))
    others = sorted(os.sched_getaffinity(0))[:-1]
    assert asked == [others[-1:]]
    assert profile.beside == 1
    assert all(unit.forward_s > 0 for unit in profile.units)
    assert [p.data_ptr() for p in model.parameters()] == weights
    assert all(p.grad is None for p in model.parameters())


def test_ranks_that_share_a_host_are_timed_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.train.measure.units.psutil.cpu_count", lambda logical: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = {
        name: how_on(parse_cluster(name)) for name in ("1xcpu", "2xcpu", "4xcpu", "8xcpu", "4xa100-80gb")
    }
    assert {name: (how.threads, how.beside) for name, how in found.items()} == {
        "1xcpu": (4, 0),
        "2xcpu": (2, 0),
        "4xcpu": (1, 3),
        "8xcpu": (1, 3),
        "4xa100-80gb": (1, 0),
    }
