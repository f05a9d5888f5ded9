"""Files that people have edited by hand: plans and clusters."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mistake import Mistake
from option_mistakes import planned

from outsize.ir.cluster import parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.plan import Plan


def _changed(record: Any, load: Callable[[Path], Any], *path: Any, value: Any) -> None:
    """Reads the file of a record in which the field at the path has another value."""
    document = json.loads(record.to_json())
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "edited.json"
        file.write_text(json.dumps(document))
        load(file)


def _plan(*path: Any, value: Any) -> None:
    _changed(planned(stages=2, microbatches=2), Plan.load, *path, value=value)


def _cluster(*path: Any, value: Any) -> None:
    _changed(parse_cluster("2xh100-80gb"), load_cluster, *path, value=value)


FILE_MISTAKES = {
    "a plan with more ranks than stages": Mistake(
        lambda: _plan("axes", "pp", value=13), "13 ranks of a pipeline", "outsize plan MODEL"
    ),
    "a plan without stages": Mistake(
        lambda: _plan("stages", value=[]), "stages for 0 of them", "outsize plan MODEL"
    ),
    "a plan with a misspelt field": Mistake(
        lambda: _plan("microbatchs", value=2), "microbatchs: Extra inputs", "outsize plan MODEL"
    ),
    "a plan with a device of another kind": Mistake(
        lambda: _plan("stages", 0, "device", value="'"), "stages.0.device: String", "outsize plan MODEL"
    ),
    "a plan with another schedule": Mistake(
        lambda: _plan("schedule", value="1F1B"), "schedule: Input should be", "outsize plan MODEL"
    ),
    "a cluster with a device that is a quote": Mistake(
        lambda: _cluster("devices", 0, "name", value="'"), "devices.0.name: String", '{"devices"'
    ),
    "a cluster with memory as text": Mistake(
        lambda: _cluster("devices", 0, "memory_bytes", value="80GB"), "memory_bytes", '{"devices"'
    ),
    "a cluster without devices": Mistake(
        lambda: _cluster("devices", value=[]), "a list of at least one device is missing", '{"devices"'
    ),
    "a cluster of unknown links": Mistake(
        lambda: _cluster("inner", value="nvlink9"), "inner: 'nvlink9' is none of", '{"devices"'
    ),
}  # fmt: skip
