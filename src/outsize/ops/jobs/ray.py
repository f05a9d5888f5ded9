"""Writes a driver for Ray: a Python program that places one launcher on each node, all or none.

Source: ray.util.placement_group of Ray 2. Oracle: tests/integrations/test_ray_job.py runs it on a local Ray.
"""

from __future__ import annotations

import json

from outsize.ir.answers.job import ClusterJob
from outsize.ops.jobs.comments import header
from outsize.ops.jobs.launch_line import GOES_ON, PORT, SIZES, run_options, sizes_text

_BODY = '''
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}  # the numbers of nodes that have a plan, the most first
DEVICES = {devices}  # of one node
OPTIONS = {options}
TARGET = {target}
WAIT_S = 60  # for the nodes of one number, before the next smaller one is tried
GOES_ON = {goes_on}  # exit codes of a run that a signal has asked to end: it starts again


@ray.remote(max_retries=0)
def node(number: int, nodes: int, address: str) -> int:
    """Runs one node's part and returns its exit code."""
    place = [f"--nnodes={{nodes}}", f"--node-rank={{number}}"]
    meeting = [*place, f"--master-addr={{address}}", "--master-port={port}"] if nodes > 1 else []
    command = ["outsize", "run", *OPTIONS, *meeting, *TARGET]
    return subprocess.run(command, env={{**os.environ, "{sizes}": "{ranks}"}}, check=False).returncode


@ray.remote
def address_here() -> str:
    """Returns the address of the node that runs this."""
    return ray.util.get_node_ip_address()


def placed(nodes: int):
    """Returns a group of so many whole nodes, or None where they are not free together."""
    group = placement_group([DEVICES] * nodes, strategy="STRICT_SPREAD")
    if group.wait(WAIT_S):
        return group
    remove_placement_group(group)
    return None


def attempt() -> int:
    """Runs on the most nodes that are free together and have a plan; returns the exit code."""
    group, nodes = next(((group, n) for n in NODES if (group := placed(n)) is not None), (None, 0))
    if group is None:
        print("outsize: none of", NODES, "nodes are free together", file=sys.stderr)
        return GOES_ON[0]
    try:
        on = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(nodes)]
        address = ray.get(address_here.options(scheduling_strategy=on[0], num_cpus=0).remote())
        options = [{{"scheduling_strategy": one, **resources()}} for one in on]
        parts = [node.options(**options[i]).remote(i, nodes, address) for i in range(nodes)]
        return max(ray.get(parts))
    except ray.exceptions.RayError as lost:  # a machine is gone
        print("outsize:", lost, file=sys.stderr)
        return GOES_ON[0]
    finally:
        remove_placement_group(group)


def resources() -> dict[str, float]:
    """Returns a node's devices as options of a task."""
    return {{"num_cpus": 0, **{{f"num_{{name.lower()}}s": number for name, number in DEVICES.items()}}}}


def main() -> int:
    """Starts the run, and starts it again while it has saved itself or its machines are lost."""
    ray.init()
    code = GOES_ON[0]
    for _ in range(1 + {restarts}):
        code = attempt()
        if code not in GOES_ON:
            break
    return code


if __name__ == "__main__":
    sys.exit(main())
'''


def job_text(job: ClusterJob) -> str:
    """Returns the program, for `ray job submit --working-dir . -- python FILE`."""
    each = job.request.devices_per_node
    sizes = job.request.sizes if job.elastic else (job.request.largest,)
    devices = {"GPU": each} if job.request.has_accelerators else {"CPU": each}
    body = _BODY.format(
        nodes=[size.nodes for size in reversed(sizes)],
        devices=json.dumps(devices),
        options=json.dumps(run_options(job).split()),
        target=json.dumps(job.target),
        goes_on=list(GOES_ON),
        port=PORT,
        sizes=SIZES,
        ranks=sizes_text(job),
        restarts=job.restarts,
    )
    note = "Start it with: ray job submit --working-dir . -- python FILE"
    return header(job, [note]) + body
