"""Starts processes on this machine that send each other messages, and reads what rank 0 measured.

launcher --processes--> python -m outsize.cli.processes.link_worker FOLDER REPEATS    each of them
launcher <-- FOLDER/links.json                                          from rank 0
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outsize.cli.processes.launch import LaunchPlace
from outsize.cli.screen import Screen, error_document
from outsize.errors import RankFailed

if TYPE_CHECKING:
    from outsize.capture.measure.links import LinkMeasurements


def measured_links(screen: Screen, nproc: int, repeats: int) -> LinkMeasurements:
    """Returns the samples of `nproc` processes; typer.Exit with the run's code when it failed."""
    from outsize.capture.measure.links import LinkMeasurements

    with tempfile.TemporaryDirectory(prefix="outsize-links-") as folder:
        argv = ["outsize.cli.processes.link_worker", folder, str(repeats)]
        with screen.working(f"timing messages between {nproc} processes"):
            code = LaunchPlace().launch(argv, nproc, module=True, shown_as="outsize measure --links")
        if code:
            failed = RankFailed("a process failed", numbers=f"exit code {code}", next_step="see stderr")
            screen.emit({"error": error_document(failed) | {"exit_code": code}})
            raise typer.Exit(code)
        return LinkMeasurements.model_validate_json((Path(folder) / "links.json").read_text(encoding="utf-8"))


def main(folder: Path, repeats: int) -> None:
    """Measures on this rank: NCCL where each process has a GPU, else gloo, with shared memory between
    stages.
    """
    import torch

    from outsize.capture.measure.links import measure_links
    from outsize.device.accelerators import CPU, current_device, device_count, device_type
    from outsize.train.measure.round_trip import TimedWire
    from outsize.train.world.join import join
    from outsize.train.world.world import leave

    has_devices = device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    world = join(device_type() if has_devices else CPU)
    assert world.group is not None
    device = current_device() if has_devices else torch.device(CPU)
    measured = measure_links(world.group, TimedWire(world.group, device), device, repeats=4 * repeats)
    if world.rank == 0:
        (folder / "links.json").write_text(measured.to_json(), encoding="utf-8")
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
