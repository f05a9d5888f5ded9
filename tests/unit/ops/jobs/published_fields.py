"""Fields of cluster resources, by name and type, and a judge that refuses a field which is not among them.

Only names and types are here, as read in the projects' own definitions; all are Apache-2.0:

    KAI scheduler   deployments/kai-scheduler/crds/scheduling.run.ai_{queues,podgroups}.yaml, 2026
    Kueue           apis/kueue/v1beta2/{clusterqueue,localqueue,resourceflavor}_types.go, 2026
    Volcano         apis/pkg/apis/batch/v1alpha1/job.go and scheduling.volcano.sh_queues.yaml, 2026

What has a Python package is judged by it instead (tests/integrations/test_cluster_schemas.py). A type is a
class; a tuple, one of these values; a list, a list of its one element; `{"*": t}`, a map with any keys. A
field with `!` must be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ANY = object()
QUANTITY = (str, int)
METADATA = {"name!": str, "namespace": str, "labels": {"*": str}, "annotations": {"*": str}}
_SHARE = {"quota": (int, float), "limit": (int, float), "overQuotaWeight": (int, float)}
_TOPOLOGY = {"preferredTopologyLevel": str, "requiredTopologyLevel": str, "topology": str}
_SUBGROUP = {
    "name!": str,
    "parent": str,
    "minMember": int,
    "minSubGroup": int,
    "topologyConstraint": _TOPOLOGY,
}
_POLICY = {"action": str, "event": str, "events": [str], "exitCode": int, "timeout": str}
_STOP = ("None", "Hold", "HoldAndDrain")
_FAIR = {"weight": QUANTITY}
_TASK = {
    "name": str,
    "replicas": int,
    "minAvailable": int,
    "template": ANY,  # a pod: judged by Kubernetes' own models in the integration tests
    "policies": [_POLICY],
    "topologyPolicy": ("none", "best-effort", "restricted", "single-numa-node"),
    "maxRetry": int,
    "dependsOn": {"name": [str], "iteration": str},
    "partitionPolicy": ANY,
}

SPECS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("scheduling.run.ai/v2", "Queue"): {
        "displayName": str,
        "parentQueue": str,
        "preemptMinRuntime": str,
        "reclaimMinRuntime": str,
        "priority": int,
        "resources": {"cpu": _SHARE, "gpu": _SHARE, "memory": _SHARE},
    },
    ("scheduling.run.ai/v2alpha2", "PodGroup"): {
        "markUnschedulable": bool,
        "minMember": int,
        "minSubGroup": int,
        "preemptibility": ("preemptible", "non-preemptible"),
        "priorityClassName": str,
        "queue": str,
        "schedulingBackoff": int,
        "subGroups": [_SUBGROUP],
        "topologyConstraint": _TOPOLOGY,
    },
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): {
        "nodeLabels": {"*": str},
        "nodeTaints": [ANY],
        "tolerations": [ANY],
        "topologyName": str,
    },
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): {
        "resourceGroups": [
            {
                "coveredResources!": [str],
                "flavors!": [
                    {
                        "name!": str,
                        "resources!": [
                            {
                                "name!": str,
                                "nominalQuota!": QUANTITY,
                                "borrowingLimit": QUANTITY,
                                "lendingLimit": QUANTITY,
                            }
                        ],
                    }
                ],
            }
        ],
        "cohortName": str,
        "queueingStrategy": ("StrictFIFO", "BestEffortFIFO"),
        "namespaceSelector": {"matchLabels": {"*": str}, "matchExpressions": [ANY]},
        "flavorFungibility": {
            "whenCanBorrow": ("MayStopSearch", "TryNextFlavor"),
            "whenCanPreempt": ("MayStopSearch", "TryNextFlavor"),
            "preference": ("BorrowingOverPreemption", "PreemptionOverBorrowing"),
        },
        "preemption": {
            "reclaimWithinCohort": ("Never", "LowerPriority", "Any"),
            "borrowWithinCohort": {"policy": ("Never", "LowerPriority"), "maxPriorityThreshold": int},
            "withinClusterQueue": ("Never", "LowerPriority", "LowerOrNewerEqualPriority"),
        },
        "admissionChecksStrategy": ANY,
        "stopPolicy": _STOP,
        "fairSharing": _FAIR,
        "admissionScope": ANY,
        "concurrentAdmissionPolicy": ANY,
    },
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): {
        "clusterQueue": str,
        "stopPolicy": _STOP,
        "fairSharing": _FAIR,
        "wallTimePolicy": ANY,
    },
    ("scheduling.volcano.sh/v1beta1", "Queue"): {
        "affinity": ANY,
        "capability": {"*": QUANTITY},
        "deserved": {"*": QUANTITY},
        "extendClusters": [ANY],
        "guarantee": {"resource": {"*": QUANTITY}},
        "parent": str,
        "priority": int,
        "reclaimable": bool,
        "type": str,
        "weight": int,
    },
    ("batch.volcano.sh/v1alpha1", "Job"): {
        "schedulerName": str,
        "minAvailable": int,
        "volumes": [{"mountPath!": str, "volumeClaimName": str, "volumeClaim": ANY}],
        "tasks": [_TASK],
        "policies": [_POLICY],
        "plugins": {"*": [str]},
        "runningEstimate": str,
        "queue": str,
        "maxRetry": int,
        "ttlSecondsAfterFinished": int,
        "priorityClassName": str,
        "minSuccess": int,
        "networkTopology": {"mode": ("hard", "soft"), "highestTierAllowed": int, "highestTierName": str},
    },
}


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document: `spec.minMembr: no such field`."""
    kind = document["apiVersion"], document["kind"]
    whole = {"apiVersion!": str, "kind!": str, "metadata!": METADATA, "spec": SPECS[kind]}
    return list(_problems(document, whole, ""))


def _problems(value: Any, wanted: Any, where: str) -> Iterator[str]:
    if wanted is ANY:
        return
    if isinstance(wanted, Mapping):
        yield from _in_map(value, wanted, where)
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            yield f"{where}: no list"
            return
        for number, one in enumerate(value):
            yield from _problems(one, wanted[0], f"{where}[{number}]")
    elif not _is(value, wanted):
        yield f"{where}: {value!r} is none of {wanted}"


def _in_map(value: Any, wanted: Mapping[str, Any], where: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{where}: no map"
        return
    fields = {name.rstrip("!"): kind for name, kind in wanted.items()}
    for name in (name.rstrip("!") for name in wanted if name.endswith("!")):
        if name not in value:
            yield f"{where}.{name}".lstrip(".") + ": is missing"
    for name, one in value.items():
        place = f"{where}.{name}".lstrip(".")
        kind = fields.get(name, fields.get("*"))
        if kind is None:
            yield f"{place}: no such field"
        else:
            yield from _problems(one, kind, place)


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return any(_is(value, one) for one in wanted)
    if isinstance(wanted, type):
        return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    return value == wanted
