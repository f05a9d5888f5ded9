"""`outsize doctor`: what is said is what is there."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
import torch

from outsize import __version__
from outsize.cli.app import run
from outsize.device import futex
from outsize.ops.doctor import health
from outsize.train.variants.variant import KEPT


def test_the_document_is_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["outsize"] == __version__
    assert found["threads"] == torch.get_num_threads()
    assert found["captures"] == KEPT
    assert found["devices"][0] == {
        "name": "cpu",
        "kind": found["devices"][0]["kind"],
        "memory_bytes": psutil.virtual_memory().total,
    }
    assert len(found["devices"]) == 1 + torch.cuda.device_count()


def test_a_person_sees_it_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "shared memory" in shown
    assert f"an engine stores the programs of {KEPT} shapes" in shown


def test_what_is_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    really: Any = health._version
    monkeypatch.setattr(health, "_version", lambda name: None if name == "highspy" else really(name))
    monkeypatch.setattr(futex, "AVAILABLE", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    found = health.doctor()
    lines = "\n".join(found.missing)
    assert "pip install 'outsize[ilp]'" in lines
    assert "go over gloo" in lines
    assert "4096 threads share" in lines
    assert not found.shared_memory


@pytest.mark.parametrize(("connections", "says"), [("1", True), ("8", False), ("", False)])
def test_one_launch_queue_is_told(
    connections: str, says: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert run(["doctor", "--json"]) == 0
    missing = "\n".join(json.loads(capsys.readouterr().out)["missing"])
    assert ("unset CUDA_DEVICE_MAX_CONNECTIONS" in missing) is says


def test_the_versions_of_an_accelerators_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.9")
    assert health.doctor().versions["cuda"] == "13.9"
