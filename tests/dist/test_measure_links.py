"""`outsize measure --links` between two real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from outsize.capture.measure.links import SIZES
from outsize.ir.cluster import Cluster

pytestmark = pytest.mark.dist


def test_messages_between_two_processes_give_a_cluster(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from outsize.cli import main; main()",
        "measure",
        "--links",
        "--repeats",
        "1",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--out", "here.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kinds = ("p2p", "all_reduce", "all_gather", "reduce_scatter")
    assert [(s["kind"], s["size_bytes"]) for s in found["samples"]] == [(k, n) for k in kinds for n in SIZES]
    assert all(sample["seconds"] > 0 for sample in found["samples"])
    cluster = Cluster.model_validate_json((tmp_path / "here.json").read_text())
    assert cluster.link(0, 1).latency_s == found["links"]["p2p"]["latency_s"]
    assert cluster.link(0, 1).bytes_per_s == found["links"]["p2p"]["bytes_per_s"]
    assert len(cluster.devices) == 2
