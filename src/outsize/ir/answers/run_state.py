"""Records what a run on this machine tells of itself while it goes on: `outsize top` and the dashboard read
it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Final, Literal, final

from outsize.errors import BadOption
from outsize.files.run_folders import LAUNCH, STATE, RunFolder, live_runs
from outsize.files.strict_json import BadJson
from outsize.ir.base import Bytes, Finite, Record, Seconds, Whole
from outsize.ir.cluster import Cluster

CAUSES: Final = ("weights", "gradients", "optimizer", "activations", "boundary")
"""The causes of planned memory, in the order of `RunDevice.planned_by_cause`."""


@final
class RunLaunch(Record):
    """Holds what a launcher has started: its process, what the user typed, how many processes there may be.

    `least` and `most` are those of this machine; they differ where the number may change.
    """

    pid: int
    command: str
    started_unix_s: Seconds
    least: int = 1
    most: int = 1


@final
class RunDevice(Record):
    """A process of the run with its device: the busy share of the step, and bytes measured and planned.

    `memory_bytes` is the peak of the device's tensors, or on a CPU what the process has resident.
    `planned_bytes` is what the plan expects (P50), `reserved_bytes` what it may need (P95), or its
    share of the device where it has one; 0 means unknown.
    """

    rank: int
    name: str
    busy: Finite | None = None
    memory_bytes: Bytes = 0
    planned_bytes: Bytes = 0
    reserved_bytes: Bytes = 0
    device_bytes: Bytes = 0
    planned_by_cause: tuple[int, ...] = ()


@final
class SlowRank(Record):
    """A rank that held up the others in `step`; `own` and `others` are in units of the cause.

    They are ratios to the plan ("compute"), or seconds of the rank's own code ("input") or of waiting for
    messages ("link", to rank `peer`).
    """

    rank: int
    cause: Literal["compute", "input", "link"]
    own: Finite
    others: Finite
    step: int
    peer: int = -1


@final
class SavedStep(Record):
    """The newest checkpoint: of how many steps, in which folder, and when."""

    step: Whole
    folder: str
    saved_unix_s: Seconds


@final
class RunState(Record):
    """How a run goes, after `step` steps.

    `step_s` are the seconds from step to step, the user's code included, `planned_step_s` those that the
    plan expects. `expert_imbalance` are the fullest rank's rows of experts by the mean rank's, with ep.
    A loss that is no finite number is None, as is what is not known.
    """

    model: str
    layout: str
    schedule: str
    step: Whole
    total_steps: int | None = None
    batch_size: int
    loss: Finite | None = None
    evaluation_loss: Finite | None = None
    learning_rate: Finite | None = None
    grad_norm: Finite | None = None
    expert_imbalance: Finite | None = None
    step_s: Seconds
    planned_step_s: Seconds | None = None
    bubble: Finite | None = None
    planned_bubble: Finite | None = None
    devices: tuple[RunDevice, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    checkpoint: SavedStep | None = None
    replans: int = 0
    updated_unix_s: Seconds

    @property
    def samples_per_s(self) -> float | None:
        """Returns the samples of a batch by the seconds from step to step."""
        return self.batch_size / self.step_s if self.step_s else None

    @property
    def left_s(self) -> float | None:
        """Returns the seconds of the steps that are left; None where nobody has said how many there are."""
        return None if self.total_steps is None else max(0, self.total_steps - self.step) * self.step_s


@final
class RunOnMachine(Record):
    """One run on this machine, as its folder tells; a run that has not ended a step has no state yet."""

    launch: RunLaunch
    state: RunState | None = None


def runs_on_machine() -> list[RunOnMachine]:
    """Returns the runs of this user that go on here, the oldest first. Raises BadOption."""
    try:
        folders = live_runs()
    except PermissionError as error:
        raise BadOption(
            f"{error.filename} has not been made by this user",
            numbers="runs are published in a folder of mode 0700",
            next_step=f"remove {error.filename}, or set TMPDIR to a folder of your own for runs and for this",
        ) from None
    read = map(read_run, folders)
    return [run for run in read if run is not None]


def run_of(name: str) -> RunOnMachine:
    """Returns the run whose process has this number. Raises BadOption."""
    runs = runs_on_machine()
    found = next((run for run in runs if str(run.launch.pid) == name.strip()), None)
    if found is None:
        known = ", ".join(str(run.launch.pid) for run in runs) or "none"
        raise BadOption(
            f"no run {name!r} on this machine", numbers=f"runs: {known}", next_step="outsize top --once"
        )
    return found


def room_beside(cluster: Cluster, run: RunOnMachine) -> Cluster:
    """Returns what a run leaves of this machine's devices; one that it fills is left out.

    Of each it needs what is reserved for it, or what it was measured to have, if that is more. Processes on
    a CPU share the host's memory. Raises BadOption.
    """
    if run.state is None:
        raise BadOption(
            f"run {run.launch.pid} has not told yet what it needs",
            numbers="it publishes that with its first step",
            next_step="the same command in a moment",
        )
    taken = Counter[str]()
    for device in run.state.devices:
        names = device.name.split(", ")
        for name in names:
            taken[name] += max(device.reserved_bytes, device.memory_bytes) // len(names)
    on_cpu = sum(size for name, size in taken.items() if name.startswith("cpu"))
    cpus = sum(not device.is_accelerator for device in cluster.devices)
    left = [
        (device, device.memory_bytes - (taken[device.name] if device.is_accelerator else on_cpu // cpus))
        for device in cluster.devices
    ]
    devices = tuple(
        device.model_copy(update={"memory_bytes": size}) for device, size in left if size > device.fixed_bytes
    )
    if not devices:
        raise BadOption(
            f"run {run.launch.pid} leaves no memory on any device",
            numbers=", ".join(f"{device.name} {max(0, size)} bytes" for device, size in left[:8]),
            next_step="start it with --ranks memory_share=0.5",
        )
    return cluster.model_copy(
        update={
            "name": f"{cluster.name} beside {run.launch.pid}",
            "devices": devices,
            "devices_per_node": len(devices),
        }
    )


def read_run(folder: RunFolder) -> RunOnMachine | None:
    """Returns what a folder tells; None where its run has just begun or ended, or is another version's."""
    with suppress(OSError, BadJson):
        launch, state = RunLaunch.read(folder.path / LAUNCH), folder.path / STATE
        return RunOnMachine(launch=launch, state=RunState.read(state) if state.exists() else None)
    return None
