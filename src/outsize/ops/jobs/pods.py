"""Builds what all schedulers of Kubernetes share: the pod of a node, and a Job of so many numbered pods.

A pod that ends with the code of a run that has saved itself is made again without counting as a failure
(`podFailurePolicy`), and so is one that is evicted. Source: the API of Kubernetes 1.31 (batch/v1).
"""

from __future__ import annotations

from typing import Any, Final

from outsize.ir.answers.job import ClusterJob
from outsize.ir.hardware.devices import MIB
from outsize.ops.jobs.launch_line import GOES_ON, SIZES, command, meeting, sizes_text

CONTAINER: Final = "node"
GPU: Final = "nvidia.com/gpu"
_NUMBER: Final = "$JOB_COMPLETION_INDEX"
Document = dict[str, Any]


def resource(job: ClusterJob) -> str:
    """Returns the resource of Kubernetes that a device of the job is."""
    return GPU if job.request.has_accelerators else "cpu"


def devices(job: ClusterJob) -> dict[str, str]:
    """Returns the devices of a node, as a list of resources."""
    return {resource(job): str(job.request.devices_per_node)}


def memory_mib(job: ClusterJob) -> str:
    """Returns the memory of a device that the plans need at most, in MiB."""
    return str(-(-job.request.p95_bytes // MIB))


def container(job: ClusterJob, how_nodes_meet: str) -> Document:
    """Returns the container of a node.

    It names no number of devices where they are shared: an annotation asks for their memory.
    """
    made: Document = {
        "name": CONTAINER,
        "image": job.image,
        "workingDir": job.folder,
        "command": ["/bin/sh", "-c", f"exec {command(job, how_nodes_meet)}"],
        "env": [{"name": SIZES, "value": sizes_text(job)}],
        "volumeMounts": [
            {"name": "work", "mountPath": job.folder},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if not job.share:
        made["resources"] = {"requests": devices(job), "limits": devices(job)}
    return made


def pod_spec(job: ClusterJob, how_nodes_meet: str) -> Document:
    """Returns the specification of a node's pod."""
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container(job, how_nodes_meet)],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def failure_policy() -> Document:
    """Returns which ends of a pod are no failures: a signal has asked for it, or it was evicted."""
    saved = {"operator": "In", "values": list(GOES_ON), "containerName": CONTAINER}
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": "Ignore", "onExitCodes": saved},
            {"action": "Ignore", "onPodConditions": evicted},
        ]
    }


def numbered_job(job: ClusterJob) -> Document:
    """Returns a Job with a numbered pod for each node; pods find number 0 by its name."""
    spec = pod_spec(job, meeting(job, _NUMBER, f"{job.name}-0.{job.name}"))
    made: Document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": {}, "annotations": {}},
        "spec": {
            "completionMode": "Indexed",
            "parallelism": job.most_nodes,
            "completions": job.most_nodes,
            "backoffLimit": job.restarts,
            "podFailurePolicy": failure_policy(),
            "template": {
                "metadata": {"labels": {"app": job.name}, "annotations": {}},
                "spec": {"subdomain": job.name, **spec},
            },
        },
    }
    if job.minutes is not None:
        made["spec"]["activeDeadlineSeconds"] = job.minutes * 60
    return made


def headless_service(job: ClusterJob) -> Document:
    """Returns the service that gives each pod a name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": job.name},
        },
    }


def without_empty(document: Document) -> Document:
    """Returns the document without the maps in it that hold nothing."""
    kept = {k: without_empty(v) if isinstance(v, dict) and v else v for k, v in document.items()}
    return {k: v for k, v in kept.items() if v != {}}
