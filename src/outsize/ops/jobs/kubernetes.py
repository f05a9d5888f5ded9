"""Writes jobs for Kubernetes, one way for each scheduler that starts all pods of a job together or none.

kubeflow   a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime (trainer.kubeflow.org/v1alpha1)
kai        a Job in a PodGroup and a Queue of the KAI scheduler (scheduling.run.ai/v2, v2alpha2)
kueue      a Job in a LocalQueue of Kueue, with the ClusterQueue behind it (kueue.x-k8s.io/v1beta2)
volcano    a Job and a Queue of Volcano (batch.volcano.sh/v1alpha1, scheduling.volcano.sh/v1beta1)

A queue guarantees the devices of the fewest nodes that have a plan, and lends those up to the most. Sources:
the definitions of these resources in each project's repository; tests/integrations/test_cluster_schemas.py
judges the documents by them and refuses a field that they do not have.
"""

from __future__ import annotations

from typing import Final

from outsize.ir.answers.job import ClusterJob
from outsize.ops.jobs.comments import header
from outsize.ops.jobs.launch_line import GOES_ON, changing_meeting, fixed_meeting
from outsize.ops.jobs.pods import (
    CONTAINER,
    Document,
    devices,
    failure_policy,
    headless_service,
    memory_mib,
    numbered_job,
    pod_spec,
    resource,
    without_empty,
)
from outsize.ops.jobs.yaml_text import yaml_text

_STEP: Final = "trainer.kubeflow.org/trainjob-ancestor-step"
_GANG_S: Final = 600
_MILLICPUS: Final = 1000


def kubeflow_text(job: ClusterJob) -> str:
    """Returns a TrainJob with the runtime that it refers to. Raises BadOption without PyYAML."""
    note = (
        "Kubeflow Trainer starts all nodes together (podGroupPolicy) and does not change their number: this "
        "file has the most nodes; another number that has a plan goes into numNodes. The trainer gives each "
        "node its place (PET_*), which outsize run reads."
    )
    template = {
        "spec": {
            "backoffLimit": 0,
            "podFailurePolicy": failure_policy(),
            "template": {"spec": pod_spec(job, "")},
        },
        "metadata": {"labels": {_STEP: "trainer"}},
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.most_nodes, "torch": {}},
            "podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": _GANG_S}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.restarts},
                    "replicatedJobs": [{"name": CONTAINER, "template": template}],
                }
            },
        },
    }
    labels = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue is not None else {}
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name, **({"labels": labels} if labels else {})},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": {
                "numNodes": job.most_nodes,
                "numProcPerNode": job.request.devices_per_node,
                "resourcesPerNode": {"requests": devices(job), "limits": devices(job)},
            },
        },
    }
    return header(job, [note]) + yaml_text(runtime, train_job)


def kai_text(job: ClusterJob) -> str:
    """Returns a Job for the KAI scheduler. Raises BadOption without PyYAML."""
    queue = job.queue or job.name
    run = numbered_job(job)
    run["metadata"]["annotations"] = {"kai.scheduler/skip-podgrouper": "true"}
    pod = run["spec"]["template"]
    pod["metadata"]["labels"]["kai.scheduler/queue"] = queue
    pod["metadata"]["annotations"]["pod-group-name"] = job.name
    pod["spec"]["schedulerName"] = "kai-scheduler"
    if job.share:
        pod["metadata"]["annotations"] |= {
            "gpu-memory": memory_mib(job),
            "gpu-fraction-num-devices": str(job.request.devices_per_node),
        }
    group = {
        "apiVersion": "scheduling.run.ai/v2alpha2",
        "kind": "PodGroup",
        "metadata": {"name": job.name},
        "spec": {"minMember": job.least_nodes, "queue": queue, "preemptibility": "preemptible"},
    }
    note = (
        f"minMember {job.least_nodes}: so many pods start together or none; the others join when there is "
        f"room. {_memory_note(job)}"
    )
    documents = [group, headless_service(job), without_empty(run)]
    return header(job, [note]) + yaml_text(*_with_queue(job, _kai_queue(job)), *documents)


def _memory_note(job: ClusterJob) -> str:
    needs = memory_mib(job)
    if job.share:
        return f"gpu-memory {needs} is the P95 of the plans, in MiB: KAI keeps it free and enforces nothing."
    return f"Whole devices are asked for; --share-gpus asks for the {needs} MiB of each that the plans need."


def _kai_queue(job: ClusterJob) -> Document:
    least, most = job.devices(job.least_nodes), job.devices(job.most_nodes)
    unlimited = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
    named, unit = ("gpu", 1) if job.request.has_accelerators else ("cpu", _MILLICPUS)
    quota = {"quota": least * unit, "limit": most * unit, "overQuotaWeight": 1}
    resources = dict.fromkeys(("gpu", "cpu", "memory"), unlimited) | {named: quota}
    return {
        "apiVersion": "scheduling.run.ai/v2",
        "kind": "Queue",
        "metadata": {"name": job.name},
        "spec": {"resources": resources},
    }


def kueue_text(job: ClusterJob) -> str:
    """Returns a Job for Kueue. Raises BadOption without PyYAML."""
    run = numbered_job(job)
    run["spec"] = {"suspend": True, **run["spec"]}  # Kueue starts it
    run["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = job.queue or job.name
    if job.least_nodes < job.most_nodes:
        run["metadata"]["annotations"] = {
            "kueue.x-k8s.io/job-min-parallelism": str(job.least_nodes),
            "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
        }
    note = (
        "Kueue admits all pods of a Job together. Where its quota has no room for the most nodes it admits "
        "fewer, down to job-min-parallelism, and the run is planned for those (feature PartialAdmission)."
    )
    documents = [headless_service(job), without_empty(run)]
    return header(job, [note]) + yaml_text(*_with_queue(job, *_kueue_queues(job)), *documents)


def _kueue_queues(job: ClusterJob) -> tuple[Document, ...]:
    least, most = job.devices(job.least_nodes), job.devices(job.most_nodes)
    quota = {
        "name": resource(job),
        "nominalQuota": str(least),
        "borrowingLimit": str(most - least),
    }
    group = {
        "coveredResources": [resource(job)],
        "flavors": [{"name": job.name, "resources": [quota]}],
    }
    version = "kueue.x-k8s.io/v1beta2"
    return (
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": job.name}},
        {
            "apiVersion": version,
            "kind": "ClusterQueue",
            "metadata": {"name": job.name},
            "spec": {
                "cohortName": "outsize",
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"},
            },
        },
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": job.name},
            "spec": {"clusterQueue": job.name},
        },
    )


def volcano_text(job: ClusterJob) -> str:
    """Returns a Job for Volcano. Raises BadOption without PyYAML."""
    host = f"{job.name}-{CONTAINER}-0.{job.name}"
    how = ""
    if job.least_nodes < job.most_nodes:
        how = changing_meeting(job, host)
    elif job.most_nodes > 1:
        how = fixed_meeting(str(job.most_nodes), "$VC_TASK_INDEX", host)
    task = {
        "name": CONTAINER,
        "replicas": job.most_nodes,
        "minAvailable": job.least_nodes,
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod_spec(job, how)},
    }
    run: Document = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "schedulerName": "volcano",
            "queue": job.queue or job.name,
            "minAvailable": job.least_nodes,
            "maxRetry": job.restarts,
            "plugins": {"svc": [], "env": []},
            "policies": [
                *({"exitCode": code, "action": "RestartJob"} for code in GOES_ON),
                {"event": "PodEvicted", "action": "RestartJob"},
            ],
            "tasks": [task],
        },
    }
    note = (
        f"minAvailable {job.least_nodes}: so many pods start together or none. A pod that ends with code "
        f"{GOES_ON[0]} has saved the run: the job starts again, as after an eviction, and goes on."
    )
    return header(job, [note]) + yaml_text(*_with_queue(job, _volcano_queue(job)), run)


def _volcano_queue(job: ClusterJob) -> Document:
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "Queue",
        "metadata": {"name": job.name},
        "spec": {
            "weight": 1,
            "reclaimable": True,
            "deserved": {resource(job): str(job.devices(job.least_nodes))},
            "capability": {resource(job): str(job.devices(job.most_nodes))},
        },
    }


def _with_queue(job: ClusterJob, *queues: Document) -> tuple[Document, ...]:
    """Returns the queues of the job; none where it waits in one that is there."""
    return queues if job.queue is None else ()
