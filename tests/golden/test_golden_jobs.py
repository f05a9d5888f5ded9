"""The job files of all engines, as in tests/golden/jobs, for one request with a number of nodes left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import pytest
from cluster_jobs import job

from outsize.ops.jobs.engines import Engine, Scheduler, job_text

ENDINGS: Mapping[Engine, str] = {
    "slurm": "sh",
    "kubernetes": "yaml",
    "ray": "txt",
    "skypilot": "yaml",
    "dstack": "yaml",
}
# What is asked for, by the name that the files have.
JOBS: Mapping[str, Mapping[str, Any]] = {
    "elastic": {},
    "gap": {"nodes": (1, 2, 4)},
    "fixed": {"elastic": False, "queue": "research", "minutes": 90},
    "one-node": {"nodes": (1,)},
    "cpu": {"kind": "cpu", "each": 2},
    "shared": {"share": True},
}


def written(engine: Engine, asked: Mapping[str, Any], scheduler: Scheduler) -> str:
    more = dict(asked)
    return job_text(job(*more.pop("nodes", (2, 3, 4)), **more), engine, scheduler)


@pytest.mark.parametrize("name", [name for name in JOBS if name != "shared"])
@pytest.mark.parametrize("engine", get_args(Engine))
def test_job_files_are_as_they_were(engine: Engine, name: str, golden: Callable[[str, str], None]) -> None:
    if engine != "kubernetes":
        golden(f"jobs/{engine}-{name}.{ENDINGS[engine]}", written(engine, JOBS[name], "kubeflow"))
        return
    for scheduler in get_args(Scheduler):
        golden(f"jobs/{scheduler}-{name}.yaml", written(engine, JOBS[name], scheduler))


def test_shared_devices_are_asked_for_by_memory(golden: Callable[[str, str], None]) -> None:
    golden("jobs/kai-shared.yaml", written("kubernetes", JOBS["shared"], "kai"))
