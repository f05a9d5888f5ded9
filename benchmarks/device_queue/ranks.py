"""Runs a function on several ranks, each a new interpreter with its place on the devices of this machine.

    results = run_ranks("schedules", 2, "cuda", per_device=2, names=["gpipe", "1f1b"])

The functions are those of tests/device/rank_scenarios.py and of scenarios.py beside this file; each takes the
World and returns what `torch.save` can write. Ranks are no forks, because a process that has asked the driver
for its devices cannot be forked. `python ranks.py FILE` is one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
_FOLDERS: Final = ("unit", "parity", "simdev", "device", "dist")
_ONE_GPU: Final = str(ROOT / "benchmarks/one-gpu")
IMPORTED: Final = [str(ROOT / "src"), str(HERE), _ONE_GPU, *(str(ROOT / "tests" / name) for name in _FOLDERS)]
_PAUSE_S: Final = 0.2
SLOWER: Final = 10
"""How much longer a rehearsal may take on a machine that others use as well."""


class RanksFailed(Exception):
    """A rank has failed, or the ranks have not ended in time; the text has what they wrote last."""


def run_ranks(
    scenario: str,
    count: int,
    device_type: str,
    *,
    limit_s: float,
    per_device: int = 1,
    backend: str | None = None,
    **given: Any,
) -> list[Any]:
    """Returns what each of `count` ranks returned, `per_device` of them on one device. Raises RanksFailed.

    They may take `limit_s` seconds on CUDA.
    """
    import torch

    limit_s *= 1 if device_type == "cuda" else SLOWER
    with TemporaryDirectory() as name:
        folder = Path(name)
        request = {"scenario": scenario, "count": count, "device_type": device_type, "given": given}
        request |= {"per_device": per_device, "backend": backend, "limit_s": limit_s}
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(count):
            (folder / f"{rank}.json").write_text(json.dumps({**request, "rank": rank}))
            with (folder / f"{rank}.txt").open("wb") as said:
                command = [sys.executable, __file__, str(folder / f"{rank}.json")]
                started.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment()))
        end_s = time.monotonic() + limit_s
        while (codes := [one.poll() for one in started]).count(0) < count:
            if any(codes) or time.monotonic() > end_s:
                break
            time.sleep(_PAUSE_S)
        for one in started:
            one.kill()
            one.wait()
        if codes.count(0) < count:
            lasts = [(folder / f"{rank}.txt").read_text(errors="replace")[-1500:] for rank in range(count)]
            raise RanksFailed(
                f"exit codes {codes} within {limit_s:.0f} s\n"
                + "\n".join(f"rank {n}: {t}" for n, t in enumerate(lasts))
            )
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def environment() -> dict[str, str]:
    """Returns this process's environment with the folders of the tests and repeatable kernels."""
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = os.pathsep.join([*IMPORTED, *known])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def load(device_type: str) -> None:
    """Loads the simulated device where it is the one; CUDA is torch's own."""
    if device_type == "sim":
        import simdev

        simdev.load()


def main(file: Path) -> None:
    """Runs one rank of a request."""
    request = json.loads(file.read_text())
    load(request["device_type"])
    import torch

    from outsize.ops.launch.spec import SHARED_DEVICE
    from outsize.train.world.join import join, take_place
    from outsize.train.world.variables import PER_DEVICE
    from outsize.train.world.world import leave

    torch.use_deterministic_algorithms(request["device_type"] == "cuda")
    if request["per_device"] > 1:
        os.environ.update({**SHARED_DEVICE, PER_DEVICE: str(request["per_device"])})
    take_place(request["rank"], request["count"], file.parent / "store")
    world = join(request["device_type"], timeout_s=request["limit_s"], backend=request["backend"])
    modules = [import_module(name) for name in ("rank_scenarios", "scenarios")]
    act = next(found for module in modules if (found := getattr(module, request["scenario"], None)))
    torch.save(act(world, **request["given"]), file.with_suffix(".pt"))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
