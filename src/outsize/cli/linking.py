"""Start processes on this machine that send each other messages, and read what rank 0 found.

launcher --processes--> python -m outsize.cli.linking FOLDER REPEATS    each of them
launcher <-- FOLDER/links.json                                          from rank 0
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outsize.cli.launching import Place
from outsize.cli.screen import Screen, error_document
from outsize.errors import RankFailed

if TYPE_CHECKING:
    from outsize.capture.links import Links


def measured_links(screen: Screen, nproc: int, repeats: int) -> Links:
    """The samples of `nproc` processes; typer.Exit with the run's code when it failed."""
    from outsize.capture.links import Links

    with tempfile.TemporaryDirectory(prefix="outsize-links-") as folder:
        argv = ["outsize.cli.linking", folder, str(repeats)]
        with screen.working(f"timing messages between {nproc} processes"):
            code = Place().launch(argv, nproc, module=True, shown_as="outsize measure --links")
        if code:
            failed = RankFailed("a process failed", numbers=f"exit code {code}", next_step="see stderr")
            screen.emit({"error": error_document(failed) | {"exit_code": code}})
            raise typer.Exit(code)
        return Links.model_validate_json((Path(folder) / "links.json").read_text(encoding="utf-8"))


def main(folder: Path, repeats: int) -> None:
    """This rank's part: NCCL where each process has a GPU, else gloo, with shared memory between stages."""
    import torch

    from outsize.capture.links import measure_links
    from outsize.train.launch import join, leave
    from outsize.train.wire import make_wire

    kind = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    world = join(kind)
    assert world.group is not None
    device = torch.device(kind, world.local_rank) if kind == "cuda" else torch.device(kind)
    found = measure_links(world.group, make_wire(world.group, device), device, repeats=4 * repeats)
    if world.rank == 0:
        (folder / "links.json").write_text(found.to_json(), encoding="utf-8")
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
