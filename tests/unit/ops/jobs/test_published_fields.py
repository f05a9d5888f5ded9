"""What is written for KAI, Kueue and Volcano has only fields that these define, with their types."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml
from cluster_jobs import job
from published_fields import SPECS, problems

from outsize.ops.jobs.engines import Scheduler, job_text


def documents(scheduler: Scheduler, **more: Any) -> list[dict[str, Any]]:
    text = job_text(job(2, 3, 4, **more), "kubernetes", scheduler)
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.parametrize("more", [{}, {"elastic": False}, {"kind": "cpu", "each": 2}], ids=str)
@pytest.mark.parametrize("scheduler", [name for name in get_args(Scheduler) if name != "kubeflow"])
def test_no_field_is_unknown(scheduler: Scheduler, more: dict[str, Any]) -> None:
    judged = [d for d in documents(scheduler, **more) if (d["apiVersion"], d["kind"]) in SPECS]
    assert judged
    assert [line for document in judged for line in problems(document)] == []


def test_a_wrong_field_is_found() -> None:
    group = next(d for d in documents("kai") if d["kind"] == "PodGroup")
    group["spec"] |= {"minMembr": 2, "minMember": "2", "preemptibility": "maybe"}
    assert problems(group) == [
        "spec.minMember: '2' is none of <class 'int'>",
        "spec.preemptibility: 'maybe' is none of ('preemptible', 'non-preemptible')",
        "spec.minMembr: no such field",
    ]
    queue = next(d for d in documents("kueue") if d["kind"] == "ClusterQueue")
    del queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"]
    assert problems(queue) == ["spec.resourceGroups[0].flavors[0].resources[0].nominalQuota: is missing"]


def test_queues_guarantee_the_least_and_lend_up_to_the_most() -> None:
    kai = next(d for d in documents("kai") if d["kind"] == "Queue")
    assert kai["spec"]["resources"]["gpu"] == {"quota": 16, "limit": 32, "overQuotaWeight": 1}
    kueue = next(d for d in documents("kueue") if d["kind"] == "ClusterQueue")
    (quota,) = kueue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    assert (quota["nominalQuota"], quota["borrowingLimit"]) == ("16", "16")
    volcano = next(d for d in documents("volcano") if d["kind"] == "Queue")
    assert (volcano["spec"]["deserved"], volcano["spec"]["capability"]) == (
        {"nvidia.com/gpu": "16"},
        {"nvidia.com/gpu": "32"},
    )


def test_pods_start_together_down_to_the_fewest_nodes_with_a_plan() -> None:
    group = next(d for d in documents("kai") if d["kind"] == "PodGroup")
    assert group["spec"]["minMember"] == 2
    run = next(d for d in documents("kueue") if d["kind"] == "Job")
    assert run["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"
    fixed = next(d for d in documents("kueue", elastic=False) if d["kind"] == "Job")
    assert "annotations" not in fixed["metadata"]  # Kueue refuses a minimum that is the whole


def test_a_pod_asks_for_the_memory_that_the_plans_need() -> None:
    run = next(d for d in documents("kai", share=True) if d["kind"] == "Job")
    annotations = run["spec"]["template"]["metadata"]["annotations"]
    assert annotations["gpu-memory"] == str(38 * 1024)
    assert annotations["gpu-fraction-num-devices"] == "8"
    assert "resources" not in run["spec"]["template"]["spec"]["containers"][0]
