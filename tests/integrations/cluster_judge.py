"""Judges job files by the engines' own packages; runs in `.venv-clusters`, which has them and no torch.

    cluster_judge.py kubernetes|skypilot|dstack FILE...     prints what is wrong, a line each

Kubeflow's Python models accept unknown fields, so each document is walked beside its model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError


def kubernetes(text: str) -> Iterator[str]:
    """Judges TrainJob, TrainingRuntime, Job, Service, and the pods of other Jobs."""
    from kubeflow_trainer_api import models

    kinds = {
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): models.TrainerV1alpha1TrainingRuntime,
        ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
        ("v1", "Service"): models.IoK8sApiCoreV1Service,
    }
    for document in yaml.safe_load_all(text):
        kind = document["apiVersion"], document["kind"]
        if kind in kinds:
            yield from _judged(document, kinds[kind], document["kind"])
        elif kind == ("batch.volcano.sh/v1alpha1", "Job"):
            for task in document["spec"]["tasks"]:
                yield from _judged(task["template"], models.IoK8sApiCoreV1PodTemplateSpec, "template")


def skypilot(text: str) -> Iterator[str]:
    """Judges by the schema of a task and that of its resources."""
    from sky.utils import common_utils, schemas

    task = yaml.safe_load(text)
    pairs = ((task, schemas.get_task_schema()), (task["resources"], schemas.get_resources_schema()))
    for value, schema in pairs:
        try:
            common_utils.validate_schema(value, schema)
        except ValueError as error:
            yield str(error).splitlines()[0]
    unknown = set(task["resources"]["job_recovery"]) - {
        "strategy",
        "max_restarts_on_errors",
        "recover_on_exit_codes",
    }
    yield from (f"job_recovery.{name}: unknown" for name in unknown)  # the client's schema leaves it open


def dstack(text: str) -> Iterator[str]:
    """Judges by dstack's parser of run configurations, which forbids unknown fields."""
    from dstack._internal.core.errors import ConfigurationError
    from dstack._internal.core.models.configurations import parse_run_configuration

    try:
        parse_run_configuration(yaml.safe_load(text))
    except (ConfigurationError, ValidationError) as error:
        yield str(error)


def _judged(value: Any, model: type[BaseModel], where: str) -> Iterator[str]:
    yield from _unknown(value, model, where)
    try:
        model.model_validate(value)
    except ValidationError as error:
        for one in error.errors():
            # A quantity is a class in these models, and a text or a number in every document.
            if not (one["msg"].endswith("ResourceQuantity") and isinstance(one["input"], str | int)):
                yield f"{where}.{'.'.join(map(str, one['loc']))}: {one['msg']}"


def _unknown(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Yields the fields of a value that its type does not have."""
    kind = (
        next((one for one in get_args(kind) if one is not type(None)), kind)
        if get_origin(kind) is Union
        else kind
    )
    if isinstance(value, list) and get_args(kind):
        for number, one in enumerate(value):
            yield from _unknown(one, get_args(kind)[0], f"{where}[{number}]")
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        for name, one in value.items():
            if name not in fields:
                yield f"{where}.{name}: no such field of {kind.__name__}"
            else:
                yield from _unknown(one, fields[name], f"{where}.{name}")


if __name__ == "__main__":
    judge = {"kubernetes": kubernetes, "skypilot": skypilot, "dstack": dstack}[sys.argv[1]]
    for path in map(Path, sys.argv[2:]):
        for line in judge(path.read_text(encoding="utf-8")):
            print(f"{path.name}: {line}")
