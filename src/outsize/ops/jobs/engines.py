"""Lists the engines that a job file can be written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from outsize.ir.answers.job import ClusterJob
from outsize.ops.jobs import dstack, kubernetes, ray, skypilot, slurm

Engine = Literal["slurm", "kubernetes", "ray", "skypilot", "dstack"]
Scheduler = Literal["kubeflow", "kai", "kueue", "volcano"]
"""Names the scheduler that starts the pods of a job together, on Kubernetes."""

_ENGINES: Final[Mapping[Engine, Callable[[ClusterJob], str]]] = {
    "slurm": slurm.job_text,
    "ray": ray.job_text,
    "skypilot": skypilot.job_text,
    "dstack": dstack.job_text,
}
_SCHEDULERS: Final[Mapping[Scheduler, Callable[[ClusterJob], str]]] = {
    "kubeflow": kubernetes.kubeflow_text,
    "kai": kubernetes.kai_text,
    "kueue": kubernetes.kueue_text,
    "volcano": kubernetes.volcano_text,
}


def job_text(job: ClusterJob, engine: Engine, scheduler: Scheduler = "kubeflow") -> str:
    """Returns the job file of an engine; `scheduler` is for Kubernetes. Raises BadOption without PyYAML."""
    return (_SCHEDULERS[scheduler] if engine == "kubernetes" else _ENGINES[engine])(job)
