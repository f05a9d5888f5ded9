"""Defines a job of a cluster: the numbers of nodes that have a plan, and how the run is started on them.

outsize emit ENGINE TARGET -> JobRequest (ops/jobs/requests.py) -> ClusterJob -> ops/jobs writes the file
"""

from __future__ import annotations

from typing import Annotated, Final, Self, final

from pydantic import Field, model_validator

from outsize.ir.base import Bytes, Count, Rate, Record, Seconds, Whole
from outsize.ir.plan import Axes, Plan, ScheduleName

CPU: Final = "cpu"

DNS_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,46}[a-z0-9])?"
DnsLabel = Annotated[str, Field(pattern=f"^{DNS_LABEL}$")]
"""A name that Kubernetes takes for an object and for a host; numbers of pods still fit behind it."""


@final
class JobSize(Record):
    """Describes a number of nodes that has a plan, and what the plan is predicted to do.

    `p95_bytes` and `device_bytes` are those of the fullest device.
    """

    nodes: Count
    ranks: Count
    axes: Axes
    schedule: ScheduleName
    microbatches: Count
    bit_identical: bool
    step_s: Seconds
    samples_per_s: Rate
    p95_bytes: Bytes
    device_bytes: Bytes

    @classmethod
    def of(cls, plan: Plan, nodes: int) -> Self | None:
        """Returns the size of a plan for so many nodes; None for a plan without a prediction."""
        expected = plan.expected
        if expected is None:
            return None
        fullest = max(expected.stages, key=lambda stage: stage.p95_bytes)
        return cls(
            nodes=nodes,
            ranks=plan.axes.world_size,
            axes=plan.axes,
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            bit_identical=plan.bit_identical,
            step_s=expected.step_s,
            samples_per_s=expected.samples_per_s,
            p95_bytes=fullest.p95_bytes,
            device_bytes=fullest.device_bytes,
        )


@final
class JobSizeLeftOut(Record):
    """Describes a number of nodes without a plan, by the parts of the error that says why."""

    nodes: Count
    code: str
    what: str
    numbers: str


@final
class JobRequest(Record):
    """Holds the numbers of nodes that a run can have, ascending, and those that have no plan.

    `node` names the devices of one node, `kind` their kind in the table of ir/hardware/devices.py.
    """

    model: str
    batch_size: Count
    node: str
    kind: str
    devices_per_node: Count
    sizes: tuple[JobSize, ...] = Field(min_length=1)
    left_out: tuple[JobSizeLeftOut, ...] = ()

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        nodes = [size.nodes for size in self.sizes]
        if nodes != sorted(set(nodes)):
            raise ValueError("sizes are not ascending by nodes")
        return self

    @property
    def has_accelerators(self) -> bool:
        """Returns whether the devices are accelerators, and no processes of CPUs."""
        return self.kind != CPU

    @property
    def largest(self) -> JobSize:
        """Returns the size with the most nodes."""
        return self.sizes[-1]

    @property
    def together(self) -> tuple[JobSize, ...]:
        """Returns the sizes without a gap below the largest: a run may change between these."""
        start = len(self.sizes) - 1
        while start and self.sizes[start - 1].nodes == self.sizes[start].nodes - 1:
            start -= 1
        return self.sizes[start:]

    @property
    def p95_bytes(self) -> int:
        """Returns the memory that the fullest device of any size needs."""
        return max(size.p95_bytes for size in self.sizes)


@final
class ClusterJob(Record):
    """Describes how a run is started: a JobRequest, and what the cluster needs to know besides.

    target      what follows the options of `outsize run`: a script or a MODEL, with its arguments
    elastic     whether the number of nodes may change during the run, where the engine can change it
    grace_s     how long a run has to save itself after a signal, in seconds
    restarts    how often a run that has failed starts again
    minutes     a limit of its time, or None
    image       the container, where the engine has containers
    claim       the volume that holds the script and the checkpoints, mounted at `folder`
    queue       the queue, or partition, that the job waits in; None takes the engine's own
    share       whether pods ask for the memory that the plan needs, instead of for whole devices
    made_by     the version and the command that have made the file
    """

    name: DnsLabel
    request: JobRequest
    target: tuple[str, ...] = Field(min_length=1)
    elastic: bool = True
    grace_s: Count = 120
    restarts: Whole = 3
    minutes: Count | None = None
    image: str = "outsize:latest"
    claim: str = "outsize"
    folder: str = "/work"
    queue: DnsLabel | None = None
    share: bool = False
    made_by: str = ""

    @property
    def least_nodes(self) -> int:
        """Returns the fewest nodes that the run goes on with."""
        return self.request.together[0].nodes if self.elastic else self.most_nodes

    @property
    def most_nodes(self) -> int:
        """Returns the nodes that the run asks for."""
        return self.request.largest.nodes

    def devices(self, nodes: int) -> int:
        """Returns the number of devices of so many nodes."""
        return nodes * self.request.devices_per_node
